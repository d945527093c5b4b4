"""Descriptions of a pipeline: its stages and their arguments, as texts that are the same in every process."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from wds_datapipes.fingerprint.code import is_secret, is_users
from wds_datapipes.fingerprint.value_text import describe_value
from wds_datapipes.fingerprint.values import Fingerprint
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.pipes.sharding import splits
from wds_datapipes.pipes.stage import OpaqueValue
from wds_datapipes.pipes.state.graph import as_stage, upstream
from wds_datapipes.pipes.state.seeding import SEED

__all__ = ["description", "descriptions", "difference"]

#: Arguments of this package's stages that change how data is read or kept, and not which samples come.
NOT_COUNTING = {
    "SampleCacher": {"path", "max_bytes"},
    "ColumnAdder": {"storage_options"},
    "DatasetSpec": {"storage_options", "safe", "allow_commands"},
    "ShardList": {"storage_options", "safe", "rewrite"},
    "ShardLoader": {"options"},
}

#: Attributes in which stages keep where they are, and what the loader has set.
_PASSING = {
    *("_buffer", "_enabled", "_fast_forward_iterator", "_number_of_samples_yielded", "_rng", "_seed"),
    *("_snapshot_state", "_uuid", "_valid_iterator_id", SEED),
}

_PIPES = (IterDataPipe, MapDataPipe)
#: What counts nowhere: stages are described themselves, and limits change no sample.
_WITHOUT = (*_PIPES, ReadLimits)

#: A fingerprint in a description.
_FINGERPRINT = re.compile(r" #[0-9a-f]{12}")


def descriptions(pipe: Any, *, without: tuple[type, ...] = ()) -> list[str]:
    """Describe the stages of a pipeline that determine its items, from the last to the first."""
    deciding = (stage for stage in upstream(pipe) if not as_stage(stage).is_transparent)
    return [description(stage) for stage in deciding if not isinstance(stage, without)]


def description(stage: Any) -> str:
    """Describe a stage by its class and its arguments; what is too long for a text by a fingerprint.

    The code of functions and classes of the user counts. The modules that they are in do not, so a script has the same
    description as the module that it is imported as. Neither do credentials, and where a stage is in an epoch.
    """
    facts = _arguments(stage)
    if vars(stage).get("_enabled", True) is False:  # as DataLoader(shuffle=False) has it
        facts["enabled"] = False
    text = ", ".join(f"{name}={describe_value(value, _WITHOUT)}" for name, value in facts.items())
    if not is_users(type(stage).__module__):
        return f"{type(stage).__name__}({text})"
    code = Fingerprint()
    code.add(type(stage))
    return f"{type(stage).__name__}({text}) #{code.hexdigest()[:12]}"


def difference(saved: str | None, own: str | None) -> str:
    """Say how a stage differs from the one that was in its position."""
    said = f"was {saved or 'not there'}, and is {own or 'not there'}"
    if saved and own and _FINGERPRINT.sub("", saved) == _FINGERPRINT.sub("", own):
        said += " (the number behind # stands for code or data, which differ; so does the code of another Python)"
    return said


def _arguments(stage: Any) -> dict[str, Any]:
    """Return the arguments that a stage was made with, if it keeps them under their names; else all that it holds."""
    held = {name: value for name, value in vars(stage).items() if name not in _PASSING}
    kinds = [kind for kind in type(stage).__mro__ if "__init__" in vars(kind) and issubclass(kind, _PIPES)]
    found, missing = dict[str, Any](), not kinds
    for kind in kinds:
        for parameter in list(inspect.signature(kind).parameters.values()):
            name = next((name for name in (parameter.name, f"_{parameter.name}") if name in held), None)
            if name is not None:
                found.setdefault(parameter.name, held[name])
            elif kind is kinds[0]:  # what it hands on to its base is looked for there
                is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                missing |= not (is_open and len(kinds) > 1)
    if missing and not splits(stage):  # what splits the data holds which part this is
        kept = {id(value) for value in found.values()}
        found |= {name.lstrip("_"): value for name, value in held.items() if id(value) not in kept}
    unread = NOT_COUNTING.get(type(stage).__name__, ())
    return {
        name: value.value if isinstance(value, OpaqueValue) else value
        for name, value in found.items()
        if not (name in unread or is_secret(name) or _holds_pipes_alone(value))
    }


def _holds_pipes_alone(value: Any) -> bool:
    """Whether a value is a stage, or a collection of stages, which are described themselves."""
    if isinstance(value, tuple | list) and value:
        return all(map(_holds_pipes_alone, value))
    return isinstance(value, _PIPES)
