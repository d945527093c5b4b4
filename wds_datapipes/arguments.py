"""Checks of calls and of common arguments: choices, integers and field names."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from wds_datapipes.foreign_names import explain_argument
from wds_datapipes.redaction import redact, short_repr
from wds_datapipes.signatures import arguments_of, spell_argument

F = TypeVar("F", bound=Callable[..., Any])


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError unless an argument is one of the values of a ``Literal``."""
    known = get_args(choices)
    if not isinstance(value, tuple(set(map(type, known)))) or value not in known:
        named = ", ".join(f'"{each}"' for each in known[:-1])
        raise ValueError(f'{name} must be {named} or "{known[-1]}", not {value!r}')


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as an int; NumPy integers are accepted, too.

    Args:
        name: the name of the argument, for messages.
        value: its value.
        least: the smallest permitted integer; any by default.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
    return number


def check_seed(seed: Any) -> int:
    """Return a seed that a user has passed, as an int.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative, or has more than 64 bits.
    """
    number = check_integer("seed", seed)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed must be a non-negative integer of at most 64 bits, not {number}")
    return number


def check_optional_integer(name: str, value: Any, least: int) -> int | None:
    """Return an argument that is None or an integer; see `check_integer`."""
    return None if value is None else check_integer(name, value, least)


def check_path(name: str, value: Any) -> str:
    """Return an argument that is a path or a URL as a str."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path or a URL, not {short_repr(value)}")
    if "\0" in path:
        raise ValueError(f"{name} must be a path or a URL, but no file can have the name {redact(path)!r}")
    return path


def check_callable(purpose: str, function: object) -> None:
    """Check that an argument is a function; ``purpose`` says for what."""
    if not callable(function):
        raise TypeError(f"{purpose}, not {function!r}")


def check_fields(fields: object, name: str = "fields") -> None:
    """Raise TypeError unless field names are None or several strings; one string would be taken as many names."""
    if isinstance(fields, str):
        raise TypeError(f'{name} must be a collection of names, as in ["jpg", "cls"], not the string {fields!r}')
    if fields is not None and not (isinstance(fields, Collection) and all(isinstance(each, str) for each in fields)):
        raise TypeError(f'{name} must be a collection of names, as in ["jpg", "cls"], not {fields!r:.200}')


def checks_calls(target: F) -> F:
    """Decorate a function or a class so that wrong arguments raise an error with its name and its arguments."""
    is_class = isinstance(target, type)
    function = vars(target)["__init__"] if is_class else target
    call = f"{target.__name__}()"

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        check_call(call, function, arguments, options, hidden=int(is_class))
        return function(*arguments, **options)

    if is_class:
        target.__init__ = checked  # type: ignore[method-assign]
    return target if is_class else checked  # type: ignore[return-value]


def check_call(
    call: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any], *, hidden: int = 0
) -> None:
    """Raise TypeError if a function does not accept some arguments, or if their types contradict simple annotations.

    Args:
        call: the call as the user has written it, for the message.
        function: the function.
        arguments: the positional arguments.
        options: the keyword arguments.
        hidden: the number of positional arguments that the user does not write, such as ``self``.

    Raises:
        TypeError: an argument is missing, unknown, given twice, or of a wrong type, or there are too many.
    """
    signature = _signature_of(function)
    parameters = list(signature.parameters.values())[hidden:]
    names = [each.name for each in parameters if each.kind != each.VAR_KEYWORD]
    is_open = len(names) < len(parameters)
    unknown = next((name for name in options if not is_open and name not in names), None)
    if unknown is not None:
        problem = f"has no argument {unknown!r}{_advice(unknown, options[unknown], names, function)}"
    else:
        try:
            given = signature.bind(*arguments, **options).arguments
        except TypeError as error:
            problem = f"got wrong arguments: {error}."
        else:
            _check_types({**given, **options}, _kinds_of(function))
            return
    listed = ", ".join(str(each.replace(annotation=each.empty, default=each.empty)) for each in parameters)
    raise TypeError(f"{call} {problem} It takes {listed or 'no arguments'}")


def _advice(unknown: str, value: object, names: Sequence[str], function: Callable[..., Any]) -> str:
    """Return what to write in place of an unknown argument, as sentences."""
    text = spell_argument(function, unknown, short_repr(value))
    if text is not None and not text.startswith(f"{unknown}="):
        return f": pass {text}."
    if similar := difflib.get_close_matches(unknown, names, 1, 0.75):
        return f". Did you mean {similar[0]!r}?"
    others = [name for name in arguments_of(function) if name != unknown]
    if similar := difflib.get_close_matches(unknown, others, 1, 0.75):
        return f". Did you mean {spell_argument(function, similar[0], short_repr(value))}?"
    return f"{explain_argument(unknown)}."


class _Kind(NamedTuple):
    """A kind of values.

    Attributes:
        words: what it is called in messages.
        accepts: whether a value is of this kind.
    """

    words: str
    accepts: Callable[[Any], bool]


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and getattr(value, "shape", ()) == ()


def _is_flag(value: object) -> bool:
    # webdataset's ShardWriter documents verbose=1, for example.
    return isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1))


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, Real) and not isinstance(value, bool))


def _is_named(name: str, value: object) -> bool:
    return any(kind.__name__ == name for kind in type(value).__mro__)


#: The classes of this package that are arguments.
_CLASSES = (
    *("AccessOptions", "EpochOptions", "IndexOptions", "JobOptions", "ReadOptions", "WriteOptions"),
    *("Instance", "Manifest", "ReadLimits", "ShardIndex", "Timeouts"),
)

#: The kinds of values, by the words with which annotations begin.
_KINDS = {
    "None": _Kind("None", lambda value: value is None),
    "bool": _Kind("True or False", _is_flag),
    "int": _Kind("an integer", _is_integer),
    "float": _Kind("a number", _is_number),
    "str": _Kind("a string", lambda value: isinstance(value, str)),
    "os.PathLike": _Kind("a path", lambda value: isinstance(value, os.PathLike)),
    "Callable": _Kind("a function", callable),
    "Mapping": _Kind("a mapping", lambda value: isinstance(value, Mapping)),
    "tuple": _Kind("a tuple", lambda value: isinstance(value, tuple | list)),
    **{name: _Kind(f"{name}(...)", partial(_is_named, name)) for name in _CLASSES},
    **dict.fromkeys(("Sequence", "Collection", "Iterable"), _Kind("a list", lambda value: isinstance(value, Iterable))),
}


@functools.cache
def _kinds_of(function: Callable[..., Any]) -> dict[str, list[_Kind]]:
    """Return the kinds of those arguments whose annotations consist of such kinds only."""
    parameters = _signature_of(function).parameters.values()
    found = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kinds = [_KINDS.get(each.strip().partition("[")[0]) for each in _alternatives(str(parameter.annotation))]
        if None in kinds or (
            _KINDS["Callable"] in kinds and _KINDS["None"] not in kinds
        ):  # a stage checks its function
            continue
        found[parameter.name] = [kind for kind in kinds if kind is not None]
    return found


def _alternatives(annotation: str) -> list[str]:
    """Split a union outside of brackets.

    >>> _alternatives("Sequence[int | str] | None")
    ['Sequence[int | str] ', ' None']
    """
    found, depth = [""], 0
    for character in annotation:
        depth += (character == "[") - (character == "]")
        if character == "|" and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _check_types(given: Mapping[str, Any], kinds: Mapping[str, list[_Kind]]) -> None:
    for name, value in given.items():
        if name in kinds and not any(kind.accepts(value) for kind in kinds[name]):
            words = list(dict.fromkeys(kind.words for kind in kinds[name]))
            if "a path" in words:
                words.remove("a string")
            raise TypeError(f"{name} must be {' or '.join(words)}, not {short_repr(value)}")


_signature_of = functools.cache(inspect.signature)
