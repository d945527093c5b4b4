"""Checks of calls and of common arguments: choices, integers and field names."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args

from wds_datapipes.foreign_names import explain_argument

F = TypeVar("F", bound=Callable[..., Any])


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError unless an argument is one of the values of a ``Literal``."""
    if value not in (known := get_args(choices)):
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


def check_optional_integer(name: str, value: Any, least: int) -> int | None:
    """Return an argument that is None or an integer; see `check_integer`."""
    return None if value is None else check_integer(name, value, least)


def check_fields(fields: object) -> None:
    """Raise TypeError if field names are a single string, because its characters would be taken as names."""
    if isinstance(fields, str):
        raise TypeError(f'fields must be a collection of names, as in ["jpg", "cls"], not the string {fields!r}')


def takes_options(keywords: type) -> Callable[[F], F]:
    """Decorate a function with the ``TypedDict`` of the arguments that its ``**options`` stands for."""

    def decorate(function: F) -> F:
        vars(function)[_KEYWORDS] = tuple(keywords.__annotations__)
        return function

    return decorate


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
    """Raise TypeError if a function does not accept some arguments.

    Args:
        call: the call as the user has written it, for the message.
        function: the function.
        arguments: the positional arguments.
        options: the keyword arguments.
        hidden: the number of positional arguments that the user does not write, such as ``self``.

    Raises:
        TypeError: an argument is missing, unknown, or given twice, or there are too many.
    """
    signature = _signature_of(function)
    parameters = list(signature.parameters.values())[hidden:]
    names = [*(each.name for each in parameters if each.kind != each.VAR_KEYWORD), *vars(function).get(_KEYWORDS, ())]
    is_open = len(names) < len(parameters)
    unknown = next((name for name in options if not is_open and name not in names), None)
    if unknown is not None:
        problem = f"has no argument {unknown!r}{_advice(unknown, names, parameters)}"
    else:
        try:
            signature.bind(*arguments, **options)
            return
        except TypeError as error:
            problem = f"got wrong arguments: {error}."
    texts = {each.name: str(each.replace(annotation=each.empty, default=each.empty)) for each in parameters}
    listed = ", ".join([*(texts.get(name, name) for name in names), *([texts[parameters[-1].name]] if is_open else [])])
    raise TypeError(f"{call} {problem} It takes {listed or 'no arguments'}")


def _advice(unknown: str, names: Sequence[str], parameters: Sequence[inspect.Parameter]) -> str:
    """Return what to write in place of an unknown argument, as sentences."""
    for each in parameters:
        if is_dataclass(each.default) and unknown in (field.name for field in fields(each.default)):
            return f". Write {each.name}={type(each.default).__name__}({unknown}=...)."
    if similar := difflib.get_close_matches(unknown, names, 1, 0.75):
        return f". Did you mean {similar[0]!r}?"
    return f"{explain_argument(unknown)}."


#: The attribute of a function with the names of the arguments that ``**options`` stands for.
_KEYWORDS = "_wds_datapipes_keywords"

_signature_of = functools.cache(inspect.signature)
