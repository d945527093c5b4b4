"""Commands as functions: the signature has the types and defaults of the options, and the docstring describes them.

A section of the docstring, such as ``Options:``, is a group of the help page. Each entry has the name of an option,
optionally a short name, a word for the value, and the help: ``--output, -o TARGET: The file or URL to write.``
An argument has a name in capitals. A parameter ``from_`` belongs to ``--from``, since some words are reserved in
Python. A parameter whose type is a dataclass stands for its fields, which the docstrings of the class and its base
classes describe; they may also describe parameters that only some commands have.
"""

from __future__ import annotations

import inspect
import re
from argparse import Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast, get_args, get_origin, get_type_hints


class AtLeast(NamedTuple):
    """Parses a number."""

    least: int

    def __call__(self, text: str) -> int:
        """Parse the value of an option."""
        if not re.fullmatch(r"\s*[+-]?\d+\s*", text) or (number := int(text)) < self.least:
            raise ArgumentTypeError(f"it must be a number of at least {self.least}, not {text!r}")
        return number


Natural: TypeAlias = Annotated[int, AtLeast(0)]
Positive: TypeAlias = Annotated[int, AtLeast(1)]

HEADING = re.compile(r"[A-Z][\w ]*:")
ENTRY = re.compile(r"((?:--[a-z-]+(?:/--[a-z-]+)?(?:, -\w)?)|[A-Z]+)(?: (\S+))?: (.+)")


class OptionEntry(NamedTuple):
    """The description of an option, or of an argument, which has no dashes."""

    names: tuple[str, ...]
    metavar: str
    panel: str
    help: str

    @property
    def parameter(self) -> str:
        """The name of the parameter, except for an underscore at its end."""
        return self.names[0].partition("/")[0].lstrip("-").replace("-", "_").lower()


def describe_command(command: Callable[..., object]) -> str:
    """Return the help of a command: its docstring up to the first section."""
    lines = inspect.cleandoc(command.__doc__ or "").splitlines()
    end = next((number for number, line in enumerate(lines) if HEADING.fullmatch(line)), len(lines))
    return "\n".join(lines[:end]).strip()


def entries_of(docstring: str | None) -> list[OptionEntry]:
    r"""Return the entries of a docstring.

    >>> entries_of("Copy.\n\nOptions:\n    --output, -o TARGET: The file to write,\n        or a URL.")
    [OptionEntry(names=('--output', '-o'), metavar='TARGET', panel='Options', help='The file to write, or a URL.')]
    """
    entries: list[OptionEntry] = []
    panel = ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        if HEADING.fullmatch(line):
            panel = line[:-1]
        elif panel and (found := ENTRY.fullmatch(line.strip())):
            entries.append(OptionEntry(tuple(found[1].split(", ")), found[2] or "", panel, found[3]))
        elif entries and entries[-1].panel == panel and line.startswith(" "):
            entries[-1] = entries[-1]._replace(help=f"{entries[-1].help} {line.strip()}")
    return entries


def declare_options(
    parser: ArgumentParser, command: Callable[..., None]
) -> tuple[list[Action], Callable[[dict[str, Any]], None]]:
    """Add the options of a command to a parser; return them, and a function that runs it with the parsed values."""
    groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(command).items() if is_dataclass(kind)}
    owners: list[Any] = [command]
    for kind in groups.values():
        owners += [each for each in kind.__mro__ if is_dataclass(each)]
    parameters = {
        name: each
        for owner in (command, *groups.values())
        for name, each in inspect.signature(owner).parameters.items()
    }
    kinds = {
        name: kind for each in reversed(owners) for name, kind in get_type_hints(each, include_extras=True).items()
    }
    panels: dict[str, Any] = {}
    added: list[Action] = []
    declared = set(groups)
    for entry in (each for owner in owners for each in entries_of(owner.__doc__)):
        for name in {entry.parameter, f"{entry.parameter}_"} & parameters.keys() - declared:
            declared.add(name)
            panel = panels.get(entry.panel) or panels.setdefault(entry.panel, parser.add_argument_group(entry.panel))
            added.append(_add_option(panel, parameters[name], kinds[name], entry))

    def run(values: dict[str, Any]) -> None:
        for name, kind in groups.items():
            try:
                values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
            except ValueError as error:  # noqa: PERF203  a few groups
                parser.error(str(error))
        command(**values)

    return added, run


def _add_option(panel: Any, parameter: inspect.Parameter, kind: Any, entry: OptionEntry) -> Action:
    """Add an option or an argument of the type of a parameter."""
    if NoneType in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    default = None if parameter.default is inspect.Parameter.empty else parameter.default
    is_shown = default not in (None, "", False, True)
    described = f"{entry.help} (default: {default})" if is_shown else entry.help
    told: dict[str, Any] = {"help": described.replace("%", "%%"), "metavar": entry.metavar or None}
    if get_origin(kind) is Literal:
        told["choices"] = get_args(kind)
    elif get_origin(kind) is list:
        told["action"] = "append"
    elif kind is bool:
        told = {"help": told["help"], "action": BooleanOptionalAction if "/" in entry.names[0] else "store_true"}
    else:
        told["type"] = get_args(kind)[1] if get_origin(kind) is Annotated else kind
    if entry.names[0].startswith("--"):
        names = (entry.names[0].partition("/")[0], *entry.names[1:])
        is_required = parameter.default is inspect.Parameter.empty
        action = panel.add_argument(*names, dest=parameter.name, default=default, required=is_required, **told)
    else:
        is_list = told.pop("action", None) is not None
        told["metavar"] = entry.names[0]
        action = panel.add_argument(parameter.name, **told, nargs="+" if is_list else None)
    return cast("Action", action)
