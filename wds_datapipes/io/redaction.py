"""Redaction of credentials in messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn
from urllib.parse import quote, quote_plus

__all__ = ["may_hold_credentials", "raise_alone", "redact", "redactor_of", "secrets_in"]

# Errors hold what servers say, so all of these have to take a time in proportion to the text. What repeats is bounded
# where another match could begin within it.

#: Anything in front of the ``@`` of a web address.
WEB_USER = re.compile(r"(?i)(https?://)[^\s/?#]*@")
#: ``user:password@`` of any scheme. Without a password it is a name, as in Azure's ``abfs://container@account``. Digits
#: up to a slash are a port; otherwise even a slash may be one of the password, though it ought to be written as %2F.
PASSWORD = re.compile(r"(://)[^\s/?#:@\[]{0,1024}:(?!\d{1,9}(?:[/?#]|$))[^\s?#]{0,1024}@")

#: The values of query parameters that sign or authorise: those of AWS, Google, Azure, CloudFront and common APIs. They
#: may be parameters of a URL that is one itself.
PARAMETER = re.compile(
    r"(?i)((?:[?&;]|%3F|%26)(?:[\w.-]{0,99}(?:auth|credential|passw|secret|signature|token|api-?_?key|accesskey|key-pair)"
    r"[\w.-]{0,99}|sig|key|policy|pwd)(?:=|%3D))[^&;\s'\"]+"
)

#: The values of headers such as ``Authorization`` and ``X-Auth-Token``.
HEADER = re.compile(r"(?i)((?:authorization|token)\s*:\s*|\bbearer\s+)[^'\"\r\n]+")

#: Quoted values as Python and JSON print them, and parts of connection strings.
NAMED = re.compile(
    r"(?i)((?:credential|passw|secret|signature|token|api_?key|access_?key|account_?key|authorization)[\w-]{0,99}"
    r"['\"]?\s*[:=]\s*b?)(['\"])(?:(?!\2).)+\2"
)
CONNECTION = re.compile(r"(?i)\b((?:account_?key|shared_?access_?(?:key|signature)|password|pwd)=)[^;\s'\"&]+")

#: What commands are given in options such as ``--token`` and ``-u name:password``, and in variables.
COMMAND = re.compile(
    r"(?i)((?:^|[\s;'\":])(?:--[\w-]{0,99}(?:credential|passw|secret|token|api-?key|access-?key)[\w-]{0,99}(?:=|\s+)"
    r"|\w{0,99}(?:credential|passw|secret|token|api_?key|access_?key)\w{0,99}="
    r"|(?:-u|--(?:proxy-)?user)(?:=|\s{0,9})['\"]?[^\s:'\"]{1,99}:))[^\s;'\"]+"
)

#: So deep, values of options are looked into.
DEPTH = 6
#: Texts of at least this many characters are hidden also within words; numbers of at least this many digits are hidden.
LONG, DIGITS = 8, 6


def redact(text: str) -> str:
    """Replace the credentials in a URL, or in a text with URLs, with ``***``.

    >>> redact("https://me:pass@host/000.tar?part=1&X-Amz-Signature=0123abcd")
    'https://***@host/000.tar?part=1&X-Amz-Signature=***'
    >>> redact("abfs://container@account.dfs.core.windows.net/000.tar")
    'abfs://container@account.dfs.core.windows.net/000.tar'
    """
    text = WEB_USER.sub(r"\1***@", text)
    text = PASSWORD.sub(r"\1***@", text)
    text = PARAMETER.sub(r"\1***", text)
    text = NAMED.sub(r"\1\2***\2", text)
    text = CONNECTION.sub(r"\1***", text)
    if "pipe:" in text:
        text = COMMAND.sub(r"\1***", text)
    return HEADER.sub(r"\1***", text)


def may_hold_credentials(text: str) -> bool:
    """Whether a text, such as one of many URLs, has any of the marks by which `redact` would change it."""
    return any(mark in text for mark in ("@", "=", "%3D", "%3d", "pipe:"))


def redactor_of(storage_options: Mapping[str, object]) -> Callable[[str], str]:
    """Return a `redact` that also hides every text in the options, as it is and as messages write it."""
    written = {form for secret in secrets_in(storage_options) for form in _forms(secret)}
    words = sorted(filter(None, written), key=len, reverse=True)
    if not words:
        return redact
    secrets = re.compile(
        "|".join(re.escape(word) if len(word) >= LONG else rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
    )
    return lambda text: redact(secrets.sub("***", text))


def secrets_in(value: object, depth: int = DEPTH) -> Iterator[str]:
    """Return all texts in nested options and their objects: each may be a credential."""
    if isinstance(value, str):
        yield value
        if "=" in value:  # a connection string, of which a message may tell a part
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
    """Raise an error without the context of a library's error, which may hold credentials."""
    try:
        raise error from None
    finally:
        error.__context__ = None
        del error


def _within(value: object) -> Iterable[object]:
    """What is in a container, or in an object of a library, such as credentials."""
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
    """A text as it is, as parts of URLs have it, and as ``repr`` does."""
    yield from (secret, quote(secret, safe=""), quote(secret), quote_plus(secret), repr(secret)[1:-1])
