"""Openers for local files, by path or ``file:`` URL, and for standard input."""

from __future__ import annotations

import io
import multiprocessing
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.request import url2pathname

from wds_datapipes.errors import ShardOpenError
from wds_datapipes.io.urls import OpeningURL, split_scheme

if TYPE_CHECKING:
    from typing_extensions import Buffer


def open_path(url: str, /, **_options: object) -> BinaryIO:
    """Open the local file with exactly this name."""
    return open_local(url, name=url)


def open_file_url(url: str, /, **_options: object) -> BinaryIO:
    """Open the file of a ``file:`` URL, after decoding escapes such as ``%20``."""
    return open_local(file_url_path(url), name=url)


def local_path(url: str) -> str | None:
    """Return the path of the local file that a URL names, or ``None`` if the URL is not a local file.

    >>> local_path("data/000.tar"), local_path("file:///data/my%20000.tar"), local_path("s3://data/000.tar")
    ('data/000.tar', '/data/my 000.tar', None)
    """
    if isinstance(url, OpeningURL):
        return url.local_path
    scheme, _ = split_scheme(url)
    if scheme == "file":
        return file_url_path(url)
    return url if scheme == "" else None


def file_url_path(url: str) -> str:
    """Return the path of a ``file:`` URL."""
    _, rest = split_scheme(url)
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise ShardOpenError(
                f"{url} names a file on the host {host!r}, but file: URLs open only files on this host. Write "
                "file:///absolute/path or file:relative/path"
            )
        rest = slash + path
    return url2pathname(rest)


def open_local(path: str, *, name: str) -> BinaryIO:
    """Open a file unbuffered, since shard readers have their own buffers; ``name`` is its name in errors."""
    try:
        return Path(path).open("rb", buffering=0)
    except FileNotFoundError as error:
        base = "" if Path(path).is_absolute() else f" Relative paths start from {Path.cwd()}."
        raise ShardOpenError(
            f"There is no file {name!r}.{base} Check the name, and that the file is on this host"
        ) from error
    except IsADirectoryError as error:
        raise ShardOpenError(
            f"{name!r} is a directory, not a shard. To let ShardList list the shards in it, end the name in a slash"
        ) from error
    except (OSError, ValueError) as error:
        raise ShardOpenError(
            f"The file {name!r} cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from error


#: The opened standard inputs: one per process, unless the program replaces ``sys.stdin``; each is read once.
_opened: weakref.WeakSet[io.BufferedIOBase] = weakref.WeakSet()


class _StandardInput(io.RawIOBase):
    """Reads standard input and leaves it open."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        return self._source.readinto1(buffer)


def open_standard_input(url: str, /, **_options: object) -> BinaryIO:
    """Open standard input, which can be read only once."""
    if multiprocessing.parent_process() is not None:
        raise ShardOpenError(
            f"The shard {url!r} is standard input, which worker processes do not have. Read it with num_workers=0"
        )
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        raise ShardOpenError(f"The shard {url!r} is standard input, which this process does not have")
    if source in _opened:
        raise ShardOpenError(
            f"The shard {url!r} is standard input, which was already opened and cannot be read twice. "
            "Write it to a file to read it more than once"
        )
    _opened.add(source)
    return cast(BinaryIO, _StandardInput(source))
