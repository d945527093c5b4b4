"""Redact the credentials in storage options, which errors of libraries may quote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn
from urllib.parse import quote, quote_plus

from wds_datapipes.redaction import hidden_words, redact_text
from wds_datapipes.redaction.urls import hidden_parts

#: The maximum depth to which nested storage options are searched.
DEPTH = 6
#: Values with at least this many characters are redacted even within words; numbers with at least this many digits are
#: redacted.
LONG, DIGITS = 8, 6


def redactor_of(storage_options: Mapping[str, object], url: str = "") -> Callable[[str], str]:
    """Return a function like `redact_text` for errors of a library, which may quote its arguments.

    The function also redacts every value in the storage options, and the hidden parts of the URL, in any escaped form.
    """
    return _redactor([*secrets_in(storage_options), *hidden_parts(url)])


def redactor_of_command(command: str) -> Callable[[str], str]:
    """Return a function like `redact_text` that also redacts the hidden words of a command, for its messages."""
    return _redactor(hidden_words(command))


def _redactor(secrets: Iterable[str]) -> Callable[[str], str]:
    written = {form for secret in secrets for form in _forms(secret)}
    words = sorted(filter(None, written), key=len, reverse=True)
    if not words:
        return redact_text
    pattern = re.compile(
        "|".join(re.escape(word) if len(word) >= LONG else rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
    )
    return lambda text: redact_text(pattern.sub("***", text))


def secrets_in(value: object, depth: int = DEPTH) -> Iterator[str]:
    """Yield all strings in nested options and in their objects, because each may be a credential."""
    if isinstance(value, str):
        yield value
        if "=" in value:  # an error may quote part of a connection string
            yield from (part for pair in re.split("[;&]", value) if len(part := pair.partition("=")[2]) >= LONG)
    elif isinstance(value, bytes | bytearray):
        yield value.decode(errors="replace")
    elif isinstance(value, int | float):
        if len(str(value)) >= DIGITS and not isinstance(value, bool):
            yield str(value)
    elif depth:
        for each in _within(value):
            yield from secrets_in(each, depth - 1)


def raise_alone(error: Exception) -> NoReturn:
    """Raise an error without chaining the library's error, which may contain credentials."""
    try:
        raise error from None
    finally:
        error.__context__ = None
        del error


def _within(value: object) -> Iterable[object]:
    """Return the items of a container, or the attributes of an object, such as a library's credentials object."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if value is None or isinstance(value, type) or callable(value):
        return ()
    names = [name for kind in type(value).__mro__ for name in _slots(kind)]
    slots = [getattr(value, name, None) for name in names]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _forms(secret: str) -> Iterator[str]:
    """Yield a string unchanged, percent-encoded, and escaped as by ``repr``."""
    yield from (secret, quote(secret, safe=""), quote(secret), quote_plus(secret), repr(secret)[1:-1])
