"""Descriptions of pipelines: stages and their arguments as strings, which are the same in every process."""

from __future__ import annotations

import inspect
from typing import Any

from wds_datapipes.datapipes import IterDataPipe, MapDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.fingerprint import fingerprint, format_value, is_default, is_own, is_secret, is_users
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import TORCH_ATTRIBUTES, splits
from wds_datapipes.pipes.stage import OpaqueValue
from wds_datapipes.pipes.state.seeding import SEED, SEEDS

#: Attributes that hold the progress of a stage or settings made by the loader.
_IGNORED_ATTRIBUTES = {*TORCH_ATTRIBUTES, *SEEDS, "counters", SEED}

_PIPES = (IterDataPipe, MapDataPipe)
#: Types that descriptions omit: stages are described separately, and limits do not change samples.
_IGNORED_TYPES = (*_PIPES, ReadLimits)

#: Precedes the part of a description that may change during a run, because no position depends on it.
FREE = "\n"
#: Marks an argument whose values on all ranks together determine the items.
PER_RANK = " per rank"


def descriptions(pipe: Any) -> list[str]:
    """Describe the stages of a pipeline that determine its items, from the last to the first.

    The part after `FREE` may change during a run: stages that keep nothing and follow the stage with the position,
    unless a later stage counts items that they drop or combine; and arguments that the first stage with a state
    declares free.
    """
    graph = graph_of(pipe)
    first, found, is_counted = first_stateful(graph), list[str](), False
    for stage in graph.stages:
        known = declared(stage)
        if known.is_transparent:
            continue
        text = description(stage)
        if stage is not first:
            text = text.replace(FREE, "")
            is_free = known.is_stateless and (known.is_one_to_one or not is_counted)
            if is_free and first is not None and first_stateful(graph.at(stage)) is not None:
                text = FREE + text
        found.append(text)
        counts = known.has_state and not known.rereads_samples
        is_counted |= counts and (known.spans_epochs or not known.has_position)
    return found


def first_stateful(pipe: Any) -> Any:
    """Return the first stage of a pipeline that has a state; None if it has no position."""
    try:
        return graph_of(pipe).stateful_stages()[0]
    except StateError:
        return None


def run_source(pipe: Any) -> Any:
    """Return the source of a pipeline if it has the phases of a run; otherwise None."""
    source = first_stateful(pipe)
    return None if source is None else declared(source).phased_source()


def description(stage: Any) -> str:
    """Describe a stage by its class and its arguments, with fingerprints of long values.

    The description covers the code of the user's functions and classes, but not their modules: a script and its
    imported module have the same description. It omits credentials, the stage's progress in its epoch, and what a stage
    of this package has by default: a release that adds an argument loads the states of the release before.
    """
    facts = arguments_of(stage)
    if vars(stage).get("_enabled", True) is False:  # set by DataLoader(shuffle=False)
        facts["enabled"] = False
    uses = declared(stage).argument_uses
    free = {name for name, use in uses.items() if use == "free"}
    facts = {name: facts[name] for name in sorted(facts, key=free.__contains__)}
    texts = [
        f"{name}={format_value(value, _IGNORED_TYPES)}{PER_RANK if uses.get(name) == 'per rank' else ''}".replace(
            FREE, " "
        )
        for name, value in facts.items()
    ]
    fixed = sum(name not in free for name in facts)
    text = ", ".join(texts) if fixed == len(texts) else ", ".join([*texts[:fixed], FREE + ", ".join(texts[fixed:])])
    if not is_users(type(stage).__module__):
        return f"{type(stage).__name__}({text})"
    return f"{type(stage).__name__}({text}) #{fingerprint(type(stage))[:12]}"


def difference(saved: str | None, own: str | None) -> str:
    """Describe how a stage differs from the one at the same position in the state."""
    return f"was {saved or 'absent'}, and is {own or 'absent'}".replace(FREE, "")


def arguments_of(stage: Any) -> dict[str, Any]:
    """Return a stage's arguments if it stores them under their names, or else all of its attributes.

    Those of a stage of this package are without the ones that have their default.
    """
    attributes = {name: value for name, value in vars(stage).items() if name not in _IGNORED_ATTRIBUTES}
    kinds = [kind for kind in type(stage).__mro__ if "__init__" in vars(kind) and issubclass(kind, _PIPES)]
    found, missing = dict[str, Any](), not kinds
    defaults = dict[str, Any]()
    options = attributes.get("_options")
    if has_options := isinstance(options, OpaqueValue):  # a `FunctionStage`
        found |= attributes.pop("_options").value
    for kind in kinds:
        parameters = list(inspect.signature(kind).parameters.values())
        if is_own(kind):
            defaults |= {each.name: each.default for each in parameters if each.default is not each.empty}
        for parameter in parameters:
            name = next((name for name in (parameter.name, f"_{parameter.name}") if name in attributes), None)
            if name is not None:
                found.setdefault(parameter.name, attributes[name])
            elif kind is kinds[0] and (not has_options or is_users(kind.__module__)):
                # The arguments may be attributes of the base class.
                is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                missing |= not (is_open and len(kinds) > 1)
    if missing and not splits(stage):  # stages that split the data store the number of their share
        kept = {id(value) for value in found.values()}
        found |= {name.lstrip("_"): value for name, value in attributes.items() if id(value) not in kept}
    uses = declared(stage).argument_uses
    return {
        name: value.value if isinstance(value, OpaqueValue) else value
        for name, value in found.items()
        if not (uses.get(name) == "ignored" or is_secret(name) or _holds_only_pipes(value))
        if not (name in defaults and is_default(value, defaults[name]))
    }


def _holds_only_pipes(value: Any) -> bool:
    """Whether a value is a stage or a collection of stages, which are described separately."""
    if isinstance(value, tuple | list) and value:
        return all(map(_holds_only_pipes, value))
    return isinstance(value, _PIPES)
