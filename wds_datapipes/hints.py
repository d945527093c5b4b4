"""Hints: advice in messages to pass an argument, spelled for the function or the command that the user called.

A reader raises an error without knowing who called it: ``end_marker`` is an argument of ``.load_wds_shards()``, a field
of `IndexOptions` for `build_indexes`, and ``--end-marker`` for a command. So a message contains one of the phrases of
this module, which the function or the command replaces. This also works for messages from other processes.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, get_args, is_typeddict

from wds_datapipes.errors import WdsError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Hint:
    """Advice to pass an argument; its text is the phrase in messages.

    >>> str(Hint("end_marker", '"optional"')), str(Hint("limits", "ReadLimits(member_bytes=...)"))
    ('pass end_marker="optional"', 'pass limits=ReadLimits(member_bytes=...)')

    Args:
        argument: its name.
        value: its value, as in Python.
        home: a function or a stage that takes it.
    """

    argument: str
    value: str = "..."
    home: str = "read it with .load_wds_shards"

    def __str__(self) -> str:
        return f"pass {self.argument}={self.value}"


END_MARKER = Hint("end_marker", '"optional"')
FINAL = Hint("end_marker", '"final"')
IGNORE_ZEROS = Hint("ignore_zeros", "True")
ON_DUPLICATE = Hint("on_duplicate", '"first"', "read it with .group_samples")
FIRST_DOT, LAST_DOT = (Hint("key_rule", rule, "read it with .group_samples") for rule in ("first_dot", "last_dot"))
NO_KEY_RULE = Hint("key_rule", "None")
INDEX_DIR = Hint("index_dir", home="build it with build_indexes")
REBUILD = Hint("rebuild", "True", "build it with build_indexes")
COLUMNS = Hint("columns", home="build it with build_indexes")
REMOVE_OLD = Hint("remove_old", "True")
REKEY = Hint("rekey", '"{number:08d}"')
REDO, KEEP = Hint("if_changed", '"redo"'), Hint("if_changed", '"keep"')
ALLOW_PICKLE = Hint("allow_pickle", "True")
REGION = Hint("storage_options", '{"client_kwargs": {"region_name": ...}}')
SKIP = Hint("on_error", '"skip"')
IN_PROCESS = Hint("num_workers", "0")
LIMITS = {
    name: Hint("limits", f"ReadLimits({name}=...)")
    for name in (
        *("member_bytes", "name_bytes", "headers", "header_bytes", "gap_bytes", "tail_bytes", "expansion"),
        *("window_bytes", "image_pixels"),
    )
}
HINTS = [*(each for each in globals().copy().values() if isinstance(each, Hint)), *LIMITS.values()]


def spell(message: str, phrase_of: Callable[[Hint], str]) -> str:
    """Replace the hints in a message.

    >>> spell('It has no end marker: pass end_marker="optional"', lambda hint: f"use --{hint.argument}")
    'It has no end marker: use --end_marker'
    """
    for hint in HINTS:
        if (phrase := str(hint)) in message:
            message = message.replace(phrase, phrase_of(hint))
    return message


def phrase_for(function: Callable[..., Any], hint: Hint) -> str:
    """Return a hint as a function takes it: as its own argument, or as a field of one of its options.

    If it takes neither, the hint names a stage that does.

    Examples:
        >>> from wds_datapipes.index import IndexOptions, build_indexes
        >>> phrase_for(build_indexes, END_MARKER), phrase_for(IndexOptions, END_MARKER)
        ('pass options=IndexOptions(end_marker="optional")', 'pass end_marker="optional"')
    """
    text = spell_argument(function, hint.argument, hint.value)
    return f"{hint.home}({hint.argument}={hint.value})" if text is None else f"pass {text}"


def spell_argument(function: Callable[..., Any], argument: str, value: str = "...") -> str | None:
    """Return an argument as a function takes it: as its own, or as a field of one of its options; None if it does not.

    >>> from wds_datapipes import IndexedSamples
    >>> spell_argument(IndexedSamples, "end_marker")
    'access=AccessOptions(indexing=IndexOptions(end_marker=...))'
    """
    found = _route(function, argument)
    if found is None:
        return None
    text = f"{argument}={value}"
    for name, kind in reversed(found):
        text = f"{name}={kind}({text})"
    return text


@cache
def _route(function: Callable[..., Any], argument: str) -> list[tuple[str, str]] | None:
    """Return the arguments, with their classes, through which a function takes an argument; None if it does not."""
    left: deque[tuple[list[tuple[str, str]], Callable[..., Any]]] = deque([([], function)])
    while left:
        path, owner = left.popleft()
        for name, parameter in inspect.signature(owner).parameters.items():
            kind = _resolve(owner, parameter.annotation)
            kinds = [kind, *get_args(kind), type(parameter.default)]
            if name == argument or (is_typeddict(kind) and argument in kind.__optional_keys__):
                return path
            if parameter.kind is not parameter.VAR_KEYWORD:
                left += [([*path, (name, kind.__name__)], kind) for kind in kinds if _is_options(kind)]
    return None


def _resolve(owner: Callable[..., Any], annotation: object) -> Any:
    """Return an annotation as an object, or None if it cannot be resolved when the program runs."""
    names = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    with suppress(Exception):
        names = {**names, "Unpack": _Unpack}  # it may be imported for type checkers only
        return eval(annotation, names) if isinstance(annotation, str) else annotation  # noqa: S307  of this package
    return None


class _Unpack:
    """Stands for the class of this name: ``Unpack[kind]`` is the dictionary of keyword arguments itself."""

    def __class_getitem__(cls, kind: Any) -> Any:
        return kind


def _is_options(kind: object) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and kind.__name__.endswith(("Options", "Limits"))


@contextmanager
def spelled_for(function: Callable[..., Any]) -> Iterator[None]:
    """Spell the hints of errors for the function that the user called."""
    try:
        yield
    except WdsError as error:
        error.args = tuple(
            spell(part, lambda hint: phrase_for(function, hint)) if isinstance(part, str) else part
            for part in error.args
        )
        raise


def spells_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors spell hints as it takes them; other modules call the one that it wraps."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with spelled_for(function):
            return function(*args, **kwargs)

    return call
