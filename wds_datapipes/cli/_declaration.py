"""Commands as functions: the signature holds the types and defaults of the options, the docstring describes them.

A section of the docstring, such as ``Options:``, is a panel of the help page. Each of its entries is the name of an
option, perhaps a short one, a word for its value, and its help: ``--output, -o TARGET: The file or URL to write.``
An argument has a name in capitals. A parameter ``from_`` belongs to ``--from``, as some words are not available in
Python. A parameter whose type is a dataclass stands for its fields, which the docstrings of the class and of those that
it inherits from describe; they may also describe parameters that only some commands have.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import typer

Natural: TypeAlias = Annotated[int, typer.Option(min=0)]
Positive: TypeAlias = Annotated[int, typer.Option(min=1)]
Share: TypeAlias = Annotated[float, typer.Option(min=0, max=1)]

HEADING = re.compile(r"[A-Z][\w ]*:")
ENTRY = re.compile(r"((?:--[a-z-]+(?:/--[a-z-]+)?(?:, -\w)?)|[A-Z]+)(?: (\S+))?: (.+)")
#: The panel of options that typer makes by itself.
DEFAULT_PANEL = "Options"


class OptionEntry(NamedTuple):
    """The description of an option, or of an argument, which has no dashes."""

    names: tuple[str, ...]
    metavar: str
    panel: str
    help: str

    @property
    def parameter(self) -> str:
        """The name of the parameter, perhaps without an underscore at its end."""
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


def declare_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as typer expects it, with an annotation for each option."""
    owners: list[Any] = [command]
    groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(command).items() if is_dataclass(kind)}
    for kind in groups.values():
        owners += [each for each in getattr(kind, "__mro__", ()) if is_dataclass(each)]
    described: dict[str, OptionEntry] = {}
    for entry in (each for owner in owners for each in entries_of(owner.__doc__)):
        described.setdefault(entry.parameter, entry)
    signatures = [inspect.signature(owner) for owner in (command, *groups.values())]
    parameters = {name: each for signature in signatures for name, each in signature.parameters.items()}
    kinds = {name: kind for owner in reversed(owners) for name, kind in get_type_hints(owner).items()}
    bounds = {name: kind for owner in owners for name, kind in get_type_hints(owner, include_extras=True).items()}
    declared = [
        _declare(parameters[name], kinds[name], bounds[name], entry)
        for word, entry in described.items()
        for name in (word, f"{word}_")
        if name in parameters
    ]
    missing = set(parameters) - set(groups) - {each.name for each in declared}
    assert not missing, f"{command.__name__} does not describe {missing}"  # noqa: S101  a mistake of ours

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}
        for name, kind in groups.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
        command(**values)

    run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]  # read by inspect.signature
    run.__annotations__ = {each.name: each.annotation for each in declared}
    return run


def _declare(parameter: inspect.Parameter, kind: Any, bounded: Any, entry: OptionEntry) -> inspect.Parameter:
    """Return a parameter with the annotation that typer reads."""
    default = parameter.default
    is_required = default is inspect.Parameter.empty
    if get_origin(kind) is Literal:
        new_enum: Any = Enum  # which old releases of typer know, unlike Literal
        kind = new_enum("Word", [(word, word) for word in get_args(kind)], type=str)
        default = default if is_required else kind(default)
    shown: dict[str, Any] = {"help": entry.help, "metavar": entry.metavar or None}
    shown["show_default"] = not is_required and default not in (None, "", False)
    if entry.panel != DEFAULT_PANEL:
        shown["rich_help_panel"] = entry.panel
    if entry.names[0].startswith("--"):
        bounds = [each for part in (bounded, *get_args(bounded)) for each in getattr(part, "__metadata__", ())]
        option = typer.Option(*entry.names, **shown)
        option.min, option.max = (bounds[0].min, bounds[0].max) if bounds else (None, None)
    else:
        option = typer.Argument(**{**shown, "metavar": entry.names[0]})
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def options_of_command(declared: Callable[..., object]) -> frozenset[str]:
    """Return the names of the options of a declared command."""
    options = [each.annotation.__metadata__[0] for each in inspect.signature(declared).parameters.values()]
    names = {word for option in options for word in (option.default, *(option.param_decls or ()))}
    return frozenset(word for name in names if isinstance(name, str) for word in name.split("/") if word[:1] == "-")
