"""Signatures of functions: through which of its arguments a function takes an option, and hints in its words."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar, get_args

from wds_datapipes.hints import ARGUMENTS, Hint, Message

#: The ends of the names of classes that stand for several arguments.
OPTIONS = ("Options", "Limits", "Timeouts")

P = ParamSpec("P")
R = TypeVar("R")


def phrase_for(function: Callable[..., Any], hint: Hint) -> str:
    """Return a hint as a function takes it: as its own argument, or as a field of one of its options.

    If it takes neither, the hint names a stage that does.

    Examples:
        >>> from wds_datapipes.index import IndexOptions, build_indexes
        >>> hint = Hint("end_marker", '"optional"')
        >>> phrase_for(build_indexes, hint), phrase_for(IndexOptions, hint)
        ('pass options=IndexOptions(end_marker="optional")', 'pass end_marker="optional"')
    """
    text = spell_argument(function, hint.argument, hint.code)
    return f"{ARGUMENTS[hint.argument].home}({hint.argument}={hint.code})" if text is None else f"pass {text}"


def spell_argument(function: Callable[..., Any], argument: str, value: str = "...") -> str | None:
    """Return an argument as a function takes it: as its own, or as a field of one of its options; None if it does not.

    >>> from wds_datapipes import IndexedSamples
    >>> spell_argument(IndexedSamples, "end_marker")
    'access=AccessOptions(indexing=IndexOptions(end_marker=...))'
    """
    known = arguments_of(function)
    if argument not in known:
        return None
    text = f"{argument}={value}"
    for name, kind in reversed(known[argument]):
        text = f"{name}={kind}({text})"
    return text


@cache
def arguments_of(function: Callable[..., Any]) -> dict[str, list[tuple[str, str]]]:
    """Return all arguments of a function and of its options, each with the arguments and classes that lead to it.

    >>> from wds_datapipes import ShardWriter
    >>> arguments_of(ShardWriter)["maxcount"], arguments_of(ShardWriter)["compress"]
    ([], [('options', 'WriteOptions')])
    """
    found: dict[str, list[tuple[str, str]]] = {}
    left: deque[tuple[list[tuple[str, str]], Callable[..., Any]]] = deque([([], function)])
    while left:
        path, owner = left.popleft()
        for name, parameter in inspect.signature(owner).parameters.items():
            found.setdefault(name, path)
            kind = _resolve(owner, parameter.annotation)
            kinds = filter(_is_options, [kind, *get_args(kind), type(parameter.default)])
            left += [([*path, (name, each.__name__)], each) for each in dict.fromkeys(kinds)]
    return found


def _resolve(owner: Callable[..., Any], annotation: object) -> Any:
    """Return an annotation as an object, or None if it cannot be resolved when the program runs."""
    with suppress(Exception):
        names = _Names(vars(sys.modules[owner.__module__]))
        return eval(annotation, {}, names) if isinstance(annotation, str) else annotation  # noqa: S307  of this package
    return None


class _Names(dict[str, Any]):
    """The names of a module, and those of public options that it may import for type checkers only."""

    def __missing__(self, name: str) -> Any:
        if name.endswith(OPTIONS):
            return getattr(sys.modules["wds_datapipes"], name)
        raise KeyError(name)


def _is_options(kind: object) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and kind.__name__.endswith(OPTIONS)


@contextmanager
def spelled_for(function: Callable[..., Any]) -> Iterator[None]:
    """Spell the hints of errors for the function that the user called."""
    try:
        yield
    except Exception as error:
        spell_for(function, error)
        raise


def spell_for(function: Callable[..., Any], error: Exception) -> None:
    """Spell the hints of an error for the function that the user called."""
    if len(error.args) == 1 and isinstance(message := error.args[0], Message) and message.hints:
        error.args = (spelled(function, message),)


def spelled(function: Callable[..., Any], text: str) -> str:
    """Return a message with its hints spelled for the function that the user called."""
    return text.spell(partial(phrase_for, function)) if isinstance(text, Message) else text


def spells_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors spell hints as it takes them; other modules call the one that it wraps."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with spelled_for(function):
            return function(*args, **kwargs)

    return call
