"""Redaction of credentials in messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn
from urllib.parse import quote, quote_plus

__all__ = ["may_hold_credentials", "raise_alone", "redact", "redactor_of", "secrets_in"]

# Errors quote untrusted responses of servers, so every pattern must run in linear time: repetitions are bounded
# wherever another match could start within them.

#: The user info of a web URL: everything before the ``@``.
WEB_USER = re.compile(r"(?i)(https?://)[^\s/?#]*@")
#: ``user:password@`` of any scheme. Without a password it is a name, as in Azure's ``abfs://container@account``. Digits
#: up to a slash are a port; any other text may be a password, even with a slash that should be escaped as %2F.
PASSWORD = re.compile(r"(://)[^\s/?#:@\[]{0,1024}:(?!\d{1,9}(?:[/?#]|$))[^\s?#]{0,1024}@")

#: The values of query parameters that sign or authorize: those of AWS, Google, Azure, CloudFront and common APIs. The
#: parameters may be percent-encoded within another URL.
PARAMETER = re.compile(
    r"(?i)((?:[?&;]|%3F|%26)(?:[\w.-]{0,99}(?:auth|credential|passw|secret|signature|token|api-?_?key|accesskey|key-pair)"
    r"[\w.-]{0,99}|sig|key|policy|pwd)(?:=|%3D))[^&;\s'\"]+"
)

#: The values of headers such as ``Authorization`` and ``X-Auth-Token``.
HEADER = re.compile(r"(?i)((?:authorization|token)\s*:\s*|\bbearer\s+)[^'\"\r\n]+")

#: Quoted values as Python and JSON print them.
NAMED = re.compile(
    r"(?i)((?:credential|passw|secret|signature|token|api_?key|access_?key|account_?key|authorization)[\w-]{0,99}"
    r"['\"]?\s*[:=]\s*b?)(['\"])(?:(?!\2).)+\2"
)
#: Parts of connection strings.
CONNECTION = re.compile(r"(?i)\b((?:account_?key|shared_?access_?(?:key|signature)|password|pwd)=)[^;\s'\"&]+")

#: The values of command-line options such as ``--token`` and ``-u name:password``, and of environment variables.
COMMAND = re.compile(
    r"(?i)((?:^|[\s;'\":])(?:--[\w-]{0,99}(?:credential|passw|secret|token|api-?key|access-?key)[\w-]{0,99}(?:=|\s+)"
    r"|\w{0,99}(?:credential|passw|secret|token|api_?key|access_?key)\w{0,99}="
    r"|(?:-u|--(?:proxy-)?user)(?:=|\s{0,9})['\"]?[^\s:'\"]{1,99}:))[^\s;'\"]+"
)

#: Nested storage options are searched to this depth.
DEPTH = 6
#: Values of at least this many characters are redacted within words too; numbers of at least this many digits are
#: redacted.
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
    """Whether `redact` may change a text; cheaper than `redact` if it cannot."""
    return any(mark in text for mark in ("@", "=", "%3D", "%3d", "pipe:"))


def redactor_of(storage_options: Mapping[str, object]) -> Callable[[str], str]:
    """Return a function like `redact` that also redacts every value in the storage options, in any escaped form."""
    written = {form for secret in secrets_in(storage_options) for form in _forms(secret)}
    words = sorted(filter(None, written), key=len, reverse=True)
    if not words:
        return redact
    secrets = re.compile(
        "|".join(re.escape(word) if len(word) >= LONG else rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
    )
    return lambda text: redact(secrets.sub("***", text))


def secrets_in(value: object, depth: int = DEPTH) -> Iterator[str]:
    """Yield all strings in nested options and their objects: each may be a credential."""
    if isinstance(value, str):
        yield value
        if "=" in value:  # a connection string: an error may quote a part of it
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
