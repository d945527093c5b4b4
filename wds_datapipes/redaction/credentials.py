"""Credentials by name: values of query parameters, headers, options and connection strings with known names."""

from __future__ import annotations

import re

# Errors quote untrusted responses of servers, so every pattern must run in linear time: repetitions are bounded
# wherever another match could start within them.

#: What the names of credentials contain.
NAMES = (
    r"auth|credential|passw|passphrase|secret|signature|token|cookie|session|jwt|hmac|hdnt|"
    r"api[-_]?key|access[-_]?key|account[-_]?key|private[-_]?key|key-pair"
)

#: The user info of a web URL: everything before the ``@``.
WEB_USER = re.compile(r"(?i)(https?://)[^\s/?#]*@")
#: ``user:password@`` of any scheme. Without a password it is a name, as in Azure's ``abfs://container@account``. Digits
#: up to a slash are a port; any other text may be a password, even with a slash that should be escaped as %2F.
PASSWORD = re.compile(r"(://)[^\s/?#:@\[]{0,1024}:(?!:|\d{1,9}(?:[/?#]|$))[^\s?#]{0,1024}@")

#: The values of query parameters that sign or authorize: those of AWS, Google, Azure, CloudFront, Akamai and common
#: APIs. The parameters may be percent-encoded within another URL.
PARAMETER = re.compile(
    rf"(?i)((?:[?&;]|%3F|%26)(?:[\w.-]{{0,99}}(?:{NAMES})"
    r"[\w.-]{0,99}|sig|sign|key|policy|pwd)(?:=|%3D))[^&;\s'\"]+"
)

#: The values of headers such as ``Authorization``, ``X-Api-Key`` and ``Cookie``.
HEADER = re.compile(r"(?i)((?:authorization|token|cookie|api-?key)\s*:\s*|\bbearer\s+)[^\s'\"][^'\"\r\n]*")

#: Quoted values as Python and JSON print them.
NAMED = re.compile(
    r"(?i)((?:credential|passw|passphrase|secret|signature|token(?!i[sz])|api[-_]?key|access_?key|account_?key|"
    r"authorization|cookie)[\w-]{0,99}['\"]?\s*[:=]\s*b?)(['\"])(?:(?!\2).)+\2"
)
#: Parts of connection strings.
CONNECTION = re.compile(r"(?i)\b((?:account_?key|shared_?access_?(?:key|signature)|password|pwd)=)[^;\s'\"&]+")

#: The values of command-line options such as ``--token`` and ``-u name:password``, and of environment variables.
COMMAND = re.compile(
    r"(?i)((?:^|[\s;'\":])(?:--[\w-]{0,99}(?:credential|passw|passphrase|secret|token|api-?key|access-?key)[\w-]{0,99}"
    r"(?:=|\s+)|\w{0,99}(?:credential|passw|passphrase|secret|token|api_?key|access_?key)\w{0,99}="
    r"|(?:-u|--(?:proxy-)?user)(?:=|\s{0,9})['\"]?[^\s:'\"]{1,99}:))[^\s;'\"]+"
)


def mask_credentials(text: str) -> str:
    """Replace the credentials in a text that are known by their names with ``***``.

    The result identifies a URL: it is the same after the URL was signed again, and differs for other parameters.

    >>> mask_credentials("https://host/?file=000.tar&X-Amz-Signature=0123abcd")
    'https://host/?file=000.tar&X-Amz-Signature=***'
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
    """Whether a URL may change when it is redacted; cheaper than redacting it if it cannot."""
    return any(mark in text for mark in ("@", "=", "?", "#", "%3D", "%3d", "pipe:", "PIPE:"))
