"""Redact credentials in every text that leaves the package: errors, warnings, logs, reports and files.

`redact` redacts a URL or a command where it becomes part of a text. It keeps only harmless parts: the scheme, host,
path and some query parameters of a URL, and the programs, paths and option names of a command. Errors, warnings, log
records and skipped items then pass through `redact_text`, which redacts the URLs within a text, and values that are
named like credentials.
"""

from __future__ import annotations

import builtins
import logging
import re
import reprlib
from collections.abc import Iterator
from typing import TypeVar

from wds_datapipes.redaction.urls import mask_credentials, redact_urls

T = TypeVar("T")

#: Spaces, operators with their descriptors, and words with their quotes. Any text matches.
TOKEN = re.compile(
    r"(?s)(?P<space>\s+)|(?P<operator>\d?[|&;()<>]+(?:\d(?!\S))?)"
    r"|(?P<word>(?:\\.|\\\Z|'[^']*(?:'|\Z)|\"(?:\\.|[^\"\\])*(?:\"|\\?\Z)|[^\s|&;()<>'\"\\])+)"
)
QUOTED = re.compile(r"(?s)'([^']*)'?|\"((?:\\.|[^\"\\])*)\"?|\\(.?)")
PROGRAM = re.compile(r"[\w.+/-]{1,60}")
#: The names of options, and of files with a usual extension. An absolute path may also contain @ and #.
HARMLESS = re.compile(
    r"\*\*\*|-\w?|--[a-z][a-z-]{0,60}|/dev/[\w/]+|(?:/[\w./%~*?{}@#,-]*|[\w./%~*?{},-]*)\.(?:7z|age|bin|bz2|cbor|csv|gpg|"
    r"gz|idx|index|jpe?g|jsonl?|lz4|mp4|msgpack|npy|npz|parquet|part|png|pth|py|sh|tar|tbz2?|tgz|txt|wav|xz|zip|zst)"
)
#: URLs and paths in which no pattern finds credentials, since they have no marks and no scheme named like one.
SAFE_URL = re.compile(r"(?:(?:\w{1,4}|https)://)?[\w./-]*")
URL = re.compile(r"[A-Za-z][\w+.-]{0,30}://\S*")
#: Hidden words with at least this many characters are hidden in the messages of the command as well.
LONG = 6

#: A command that is a URL by itself or the last of several patterns, and a command within quotes.
COMMAND = re.compile(r"(?is)(\A|::)pipe:(.*)")
QUOTED_COMMAND = re.compile(r"(?is)(?P<quote>['\"])(?P<scheme>pipe:)(?P<command>(?:\\.|(?!\1)[^\\])*)")
ESCAPED = re.compile(r"\\(['\"\\n])")


def redact(url: str) -> str:
    """Replace credentials in a URL, a pattern or a path with ``***``.

    >>> redact("https://me:pass@host/000.tar?part=1&X-Amz-Signature=0123abcd")
    'https://***@host/000.tar?part=1&X-Amz-Signature=***'
    >>> redact("abfs://container@account.dfs.core.windows.net/000.tar")
    'abfs://container@account.dfs.core.windows.net/000.tar'
    >>> redact("pipe:curl -u me:pass https://host/000.tar.gz | gunzip")
    'pipe:curl -u *** https://host/000.tar.gz | gunzip'
    """
    if SAFE_URL.fullmatch(url):
        return url
    if found := COMMAND.search(url):
        start = found.start(2)
        return (
            _redact_plain(url[: found.start()], is_url=True) + url[found.start() : start] + redact_command(url[start:])
        )
    return _redact_plain(url, is_url=True)


def redact_text(text: str) -> str:
    """Replace credentials in a text that quotes URLs and commands, such as an error message.

    >>> redact_text("There is no shard in ['pipe:curl -u me:pass https://host/a.tar', 's3://me:pass@host/b.tar']")
    "There is no shard in ['pipe:curl -u *** https://host/a.tar', 's3://***@host/b.tar']"
    """
    if "pipe:" in text.lower():
        text = QUOTED_COMMAND.sub(_redact_quoted, text)
    return _redact_plain(text)


def hides_credentials(kind: type[T]) -> type[T]:
    """Redact the values in the ``repr`` of a class."""
    full = kind.__repr__

    def shown(self: T) -> str:
        return redact_text(full(self))

    kind.__repr__ = shown  # type: ignore[method-assign, assignment]
    return kind


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
        except Exception:  # noqa: BLE001  a user's class may raise anything
            return super().repr_instance(x, level)  # this shows only its type
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
    """Redact a command within quotes that is escaped as by ``repr``."""
    command = ESCAPED.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], found["command"])
    if (shown := redact_command(command)) == command:
        return found[0]
    shown = shown.replace("\\", "\\\\").replace("\n", "\\n").replace(found["quote"], f"\\{found['quote']}")
    return found["quote"] + found["scheme"] + shown


def _redact_plain(text: str, *, is_url: bool = False) -> str:
    return mask_credentials(redact_urls(text, is_url=is_url))


def redact_command(command: str) -> str:
    """Replace all words of a shell command that are not known to be harmless with ``***``.

    >>> redact_command("gpg --batch --passphrase hunter2 -d /data/000.tar.gpg | zstd -dc 2>/dev/null")
    'gpg --batch --passphrase *** -d /data/000.tar.gpg | zstd *** 2>/dev/null'
    """
    return mask_credentials("".join(shown for _, shown in _tokens(command)))


def hidden_words(command: str) -> set[str]:
    """Return the words of a command that `redact_command` hides, and parts of these words, except for short ones."""
    tokens = [token for token, shown in _tokens(command) if token != shown]
    words = [_unquote(token) for token in tokens]  # a message may quote the command itself
    words += [word[2:] if word.startswith("-") else word.partition("=")[2] for word in words]
    words += [word.partition("=")[2] for word in words]
    parts = [part for word in words for marks in ("[:=,;@&]+", r"[\s:=,;@&]+") for part in re.split(marks, word)]
    return {word for word in (*tokens, *words, *parts) if len(word) >= LONG}


def _tokens(command: str) -> Iterator[tuple[str, str]]:
    """Yield each token of a command, and the text to show for it."""
    is_program = True
    for match in TOKEN.finditer(command):
        token = match[0]
        if match.lastgroup == "word":
            word = _unquote(token)
            if (is_program and PROGRAM.fullmatch(token)) or HARMLESS.fullmatch(word):
                yield token, token
            else:
                yield token, token.replace(word, redact_urls(word)) if URL.fullmatch(word) and word in token else "***"
            is_program = False
        else:
            is_program = token in ("|", "||", "&&") or (is_program and token.isspace())
            yield token, token


def _unquote(token: str) -> str:
    """Return the value of a word."""
    return QUOTED.sub(lambda part: part[1] or re.sub(r"\\([$`\"\\\n])", r"\1", part[2] or "") or part[3] or "", token)
