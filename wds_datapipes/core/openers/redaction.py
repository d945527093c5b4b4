"""Keeping credentials out of messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

__all__ = ["redact", "secrets_in"]

#: Anything in front of the ``@`` of a web address.
WEB_USER = re.compile(r"(?i)(https?://)[^\s/?#]*@")
#: ``user:password@`` of any scheme. Without a password it is a name, as in Azure's ``abfs://container@account``.
PASSWORD = re.compile(r"(://)[^\s/?#:@]*:[^\s/?#]*@")

#: The values of query parameters that sign or authorise: those of AWS, Google, Azure, CloudFront and common APIs.
PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:auth|credential|passw|secret|signature|token|api-?_?key|accesskey|key-pair)[\w.-]*"
    r"|sig|key|policy|pwd)=)[^&;\s'\"]+"
)

#: The values of headers such as ``Authorization`` and ``X-Auth-Token``.
HEADER = re.compile(r"(?i)\b((?:authorization|[\w-]*token)\s*:\s*|bearer\s+)[^'\"\r\n]+")


def redact(text: str) -> str:
    """Replace the credentials in a URL, or in a text that holds URLs, by ``***``.

    >>> redact("https://me:pass@host/000.tar?part=1&X-Amz-Signature=0123abcd")
    'https://***@host/000.tar?part=1&X-Amz-Signature=***'
    >>> redact("abfs://container@account.dfs.core.windows.net/000.tar")
    'abfs://container@account.dfs.core.windows.net/000.tar'
    """
    text = WEB_USER.sub(r"\1***@", text)
    text = PASSWORD.sub(r"\1***@", text)
    text = PARAMETER.sub(r"\1***", text)
    return HEADER.sub(r"\1***", text)


def secrets_in(options: Mapping[str, object]) -> Iterator[str]:
    """Every text in nested options: each may be a credential."""
    for value in options.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from secrets_in(value)
