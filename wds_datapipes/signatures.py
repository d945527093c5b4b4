"""Signatures of functions: through which of its arguments a function takes an option, and hints in its words."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar, get_args, is_typeddict

from wds_datapipes.errors import WdsError
from wds_datapipes.hints import ARGUMENTS, Hint

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
        if error.hints:
            error.args = (error.args[0].spell(partial(phrase_for, function)),)
        raise


def spells_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors spell hints as it takes them; other modules call the one that it wraps."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with spelled_for(function):
            return function(*args, **kwargs)

    return call
