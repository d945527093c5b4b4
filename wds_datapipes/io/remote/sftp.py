"""Files on SFTP servers: each stream has a channel of its own, and a new connection where one has broken."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, BinaryIO, cast

from wds_datapipes.errors import ChangedShardError
from wds_datapipes.io.remote.forward_stream import Readable
from wds_datapipes.io.remote.resuming_stream import OpenedSource, StreamSource, version_of
from wds_datapipes.io.remote.throughput import Attempt, TooSlowError

__all__ = ["SftpRange", "SftpRangeSource", "SftpSource", "connect", "is_sftp"]

#: Opening takes some answers of the server, each of which may take as long as a byte of the file.
ANSWERS = 4
#: How much is asked for by one request, in bytes, which servers have to take; and how many requests are on their way.
PIECE_BYTES, ON_THE_WAY = 32 << 10, 48


def is_sftp(scheme: str) -> bool:
    """Whether the URLs of a scheme are files on SFTP servers."""
    return scheme in ("sftp", "ssh")


def connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, which fsspec keeps for its thread with its connection, and the path in it.

    Raises:
        Exception: whatever paramiko raises.
    """
    kind = _file_system()
    filesystem = kind(**{**kind._get_kwargs_from_urls(url), **options})
    return reconnect(filesystem), kind._strip_protocol(url)


def reconnect(filesystem: Any, *, anew: bool = False) -> Any:
    """Return the file system with a connection that is not known to be broken.

    Args:
        filesystem: one of `connect`.
        anew: take no connection that is there already: nobody tells of one that has gone silent.
    """
    transport = filesystem.client.get_transport()
    if anew or transport is None or not transport.is_active():
        filesystem._connect()
    return filesystem


@lru_cache(maxsize=1)
def _file_system() -> Any:
    """Return fsspec's class, as one whose connections end."""
    import paramiko  # type: ignore[import-untyped]  # it carries no types
    from fsspec.implementations.sftp import SFTPFileSystem  # type: ignore[import-untyped]  # the same

    class Connection(SFTPFileSystem):  # type: ignore[misc]  # the same
        def _connect(self) -> None:
            options = dict(self.ssh_kwargs)
            known_hosts = options.pop("known_hosts", None)
            self.client = client = paramiko.SSHClient()
            # By default fsspec trusts any server, and some of its releases can be told otherwise.
            client.set_missing_host_key_policy(getattr(self, "host_key_policy", None) or paramiko.AutoAddPolicy())
            try:
                if known_hosts is not None:
                    _trust(client, known_hosts)
                    client.set_missing_host_key_policy(paramiko.RejectPolicy())
                client.connect(self.host, **options)
                self.ftp = client.open_sftp()
            except BaseException:
                client.close()
                raise
            # Or its socket, and the thread that reads it, would be there for good.
            weakref.finalize(client, client.get_transport().close)

    return Connection


def _trust(client: Any, path: str) -> None:
    try:
        client.load_system_host_keys(os.path.expanduser(os.fspath(path)))  # noqa: PTH111  it may be a text
    except (OSError, TypeError) as error:
        raise ValueError(
            f"storage_options['known_hosts'] has to be a file with keys of servers, as ssh writes it: "
            f"{type(error).__name__}"
        ) from None


class SftpSource:
    """A file on an SFTP server, from any byte on.

    Args:
        filesystem: one of `connect`.
        path: where it is there.
        timeout_s: the seconds without a byte after which the server has failed.
        end: the byte before which reading ends, or -1; no more is asked for.
    """

    def __init__(self, filesystem: Any, path: str, timeout_s: float, end: int = -1) -> None:
        self._filesystem, self._path, self._timeout_s, self._end = filesystem, path, timeout_s, end
        self._has_failed = False

    def open_at(self, start: int) -> OpenedSource:
        """Open the file at a byte."""
        client = reconnect(self._filesystem, anew=self._has_failed).client
        self._has_failed = False
        try:
            return Attempt(partial(self._opened, client, start)).result(ANSWERS * self._timeout_s)
        except Exception as error:
            self._has_failed = True
            if isinstance(error, TooSlowError):
                client.close()  # which ends that attempt
            raise

    def fail(self) -> None:
        """Take note that a file could not be read on."""
        self._has_failed = True

    def _opened(self, client: Any, start: int) -> OpenedSource:
        # paramiko's channels are for one thread each.
        channel = client.open_sftp()
        try:
            channel.get_channel().settimeout(self._timeout_s)
            file = channel.open(self._path, "rb")
            facts = file.stat()
        except BaseException:
            channel.close()
            raise
        end = facts.st_size if self._end < 0 else min(self._end, facts.st_size)
        opened = _ChannelFile(file, channel, client, self.fail, start, end)
        return OpenedSource(opened, start, facts.st_size, version_of(facts.st_mtime))


class _ChannelFile:
    """Reads a file by a channel. Many requests are on their way, as each takes as long as the way is.

    paramiko can do that as well, by a thread that nobody waits for and whose errors nobody gets.

    Args:
        file: it.
        channel: its own.
        connection: what the channel is one of, which is closed with the last reference to it.
        fail: is called when it cannot be read.
        start: the first byte to read.
        end: the byte behind the last one.
    """

    def __init__(
        self, file: Any, channel: Any, connection: Any, fail: Callable[[], None], start: int, end: int
    ) -> None:
        self._file, self._channel, self._connection, self._fail = file, channel, connection, fail
        self._next, self._end = start, end
        #: What was asked for, in the order of the file: the number, the place and the length; and what has come.
        self._asked: deque[tuple[int, int, int]] = deque()
        self._came: dict[int, bytes | Exception] = {}
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        try:
            data = self._rest or self._piece()
        except Exception:
            self._fail()
            raise
        self._rest = data[size:]
        return data[:size]

    def _piece(self) -> bytes:
        """Return what has come of the next request."""
        while len(self._asked) < ON_THE_WAY and self._next < self._end:
            length = min(PIECE_BYTES, self._end - self._next)
            self._asked.append((self._ask(self._next, length), self._next, length))
            self._next += length
        if not self._asked:
            return b""
        number, place, length = self._asked.popleft()
        while number not in self._came:
            self._channel._read_response()
        data = self._came.pop(number)
        if isinstance(data, Exception):
            raise data
        if not data:
            raise EOFError("the server has sent nothing")
        if len(data) < length:  # which servers may do
            place, length = place + len(data), length - len(data)
            self._asked.appendleft((self._ask(place, length), place, length))
        return data

    def _ask(self, place: int, length: int) -> int:
        from paramiko.sftp import CMD_READ, int64  # type: ignore[import-untyped]  # it carries no types

        return cast(int, self._channel._async_request(self, CMD_READ, self._file.handle, int64(place), length))

    def _async_response(self, kind: int, message: Any, number: int) -> None:
        """Take an answer; paramiko calls this."""
        from paramiko.sftp import CMD_DATA

        try:
            if kind != CMD_DATA:
                self._channel._convert_status(message)
                raise EOFError("the server has sent no data")
            self._came[number] = message.get_string()
        except Exception as error:  # noqa: BLE001  it is raised where the answer is waited for
            self._came[number] = error

    def close(self) -> None:
        """Close the channel, by which the server closes the file: nobody has to wait for its answer."""
        with contextlib.suppress(Exception):
            self._channel.close()


class SftpRangeSource:
    """A file of which parts are read, each by opening it once more.

    Args:
        until: makes what opens the file from any byte on, to be read up to another one, or to its end if that is -1.
        stream: makes a stream of an origin that reads on where it breaks.
        changed: tells that the file is another one.
        head_bytes: how many bytes its head has.
    """

    def __init__(
        self,
        until: Callable[[int], StreamSource],
        stream: Callable[[StreamSource], BinaryIO],
        changed: Callable[[], ChangedShardError],
        head_bytes: int,
    ) -> None:
        self._until, self._stream, self._changed = until, stream, changed
        opened = until(head_bytes).open_at(0)
        self._facts = (opened.size, opened.version)
        self.head = b""
        with contextlib.closing(opened.file) as file:
            while len(self.head) < head_bytes and (data := file.read(head_bytes - len(self.head))):
                self.head += data

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        return self._stream(SftpRange(self._until(end), self._facts, self._changed, start, end))

    def close(self) -> None:
        """Do nothing: each part is opened by itself."""


class SftpRange:
    """A part of a file, from any of its bytes on: where a `SteadyStream` opens it.

    Args:
        origin: opens the file.
        facts: the size and the version that it has to have.
        changed: tells that it has not.
        start: where the part begins, in bytes.
        end: where it ends, or -1.
    """

    def __init__(
        self,
        origin: StreamSource,
        facts: tuple[int | None, tuple[str, ...]],
        changed: Callable[[], ChangedShardError],
        start: int,
        end: int,
    ) -> None:
        self._origin, self._facts, self._changed, self._start, self._end = origin, facts, changed, start, end

    def open_at(self, start: int) -> OpenedSource:
        """Open the part at a byte, if it is one of the very file that was found.

        Raises:
            ChangedShardError: it is another one.
        """
        opened = self._origin.open_at(self._start + start)
        size = opened.size
        if (size, opened.version) != self._facts or (size is not None and self._start + start > size):
            opened.file.close()
            raise self._changed()
        end = size if self._end < 0 or size is None else min(self._end, size)
        if end is None:
            return OpenedSource(opened.file, start, None, opened.version)
        left = end - self._start - start
        return OpenedSource(_FirstBytes(opened.file, left), start, end - self._start, opened.version)


class _FirstBytes:
    """The first bytes of a file."""

    def __init__(self, file: Readable, left: int) -> None:
        self._file, self._left = file, left

    def read(self, size: int, /) -> bytes:
        data = self._file.read(min(size, self._left)) if self._left > 0 else b""
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()
