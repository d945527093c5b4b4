"""Redaction of credentials in every text that leaves the package: errors, warnings, logs, reports and files.

A URL or a command is redacted where it becomes part of a text, by `redact`, which keeps what is known to be harmless:
scheme, host, path and some query parameters of a URL; the programs, paths and names of options of a command. Errors,
warnings, log records and skipped items then pass through `redact_text`, which redacts the URLs within a text, and the
values that have the name of a credential.
"""

from __future__ import annotations

import builtins
import logging
import re
import reprlib

from wds_datapipes.redaction.commands import hidden_words, redact_command
from wds_datapipes.redaction.credentials import mask_credentials, may_hold_credentials
from wds_datapipes.redaction.urls import hidden_parts, redact_urls

__all__ = [
    "hidden_parts",
    "hidden_words",
    "mask_credentials",
    "may_hold_credentials",
    "redact",
    "redact_command",
    "redact_text",
    "short_repr",
]

#: A command that is a URL of its own or the last pattern of several, and one within quotes.
COMMAND = re.compile(r"(?is)(\A|::)pipe:(.*)")
QUOTED_COMMAND = re.compile(r"(?is)(?P<quote>['\"])(?P<scheme>pipe:)(?P<command>(?:\\.|(?!\1)[^\\])*)")
ESCAPED = re.compile(r"\\(['\"\\n])")


def redact(url: str) -> str:
    """Replace the credentials in a URL, a pattern or a path with ``***``.

    >>> redact("https://me:pass@host/000.tar?part=1&X-Amz-Signature=0123abcd")
    'https://***@host/000.tar?part=1&X-Amz-Signature=***'
    >>> redact("abfs://container@account.dfs.core.windows.net/000.tar")
    'abfs://container@account.dfs.core.windows.net/000.tar'
    >>> redact("pipe:curl -u me:pass https://host/000.tar.gz | gunzip")
    'pipe:curl -u *** https://host/000.tar.gz | gunzip'
    """
    if found := COMMAND.search(url):
        start = found.start(2)
        return _redact_plain(url[: found.start()]) + url[found.start() : start] + redact_command(url[start:])
    return _redact_plain(url)


def redact_text(text: str) -> str:
    """Replace the credentials in a text that quotes URLs and commands, such as the message of an error.

    >>> redact_text("There is no shard in ['pipe:curl -u me:pass https://host/a.tar', 's3://me:pass@host/b.tar']")
    "There is no shard in ['pipe:curl -u *** https://host/a.tar', 's3://***@host/b.tar']"
    """
    if "pipe:" in text.lower():
        text = QUOTED_COMMAND.sub(_redact_quoted, text)
    return _redact_plain(text)


class _Shown(str):
    """A text that is its own ``repr``."""

    __slots__ = ()
    __repr__ = str.__str__


class _ShortRepr(reprlib.Repr):
    """A `reprlib.Repr` that redacts strings before it shortens them."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact(x), level)

    def repr_instance(self, x: object, level: int) -> str:
        try:
            text = builtins.repr(x)
        except Exception:  # noqa: BLE001  of the user's class
            return super().repr_instance(x, level)  # which shows only its type
        return super().repr_instance(_Shown(redact_text(text)), level)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return f"b{super().repr_str(redact(x[:1000].decode(errors='replace')), level)}"


#: Returns a short text of any value.
short_repr = _ShortRepr().repr


def _redact_record(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (hidden := redact_text(message)) != message:
        record.msg, record.args = hidden, ()
    return True


logging.getLogger("wds_datapipes").addFilter(_redact_record)


def _redact_quoted(found: re.Match[str]) -> str:
    """Redact a command within quotes, escaped as by ``repr``."""
    command = ESCAPED.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], found["command"])
    if (shown := redact_command(command)) == command:
        return found[0]
    shown = shown.replace("\\", "\\\\").replace("\n", "\\n").replace(found["quote"], f"\\{found['quote']}")
    return found["quote"] + found["scheme"] + shown


def _redact_plain(text: str) -> str:
    return mask_credentials(redact_urls(text))
