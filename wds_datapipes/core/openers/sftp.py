"""Files on SFTP servers: each stream has a channel of its own, and a new connection where one has broken."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, BinaryIO, cast

from wds_datapipes.core.openers.forward import Readable
from wds_datapipes.core.openers.pace import Attempt, TooSlow
from wds_datapipes.core.openers.steady import Opened, Origin, version_of
from wds_datapipes.errors import ChangedShard

__all__ = ["OriginPart", "OriginParts", "SftpOrigin", "connected", "is_sftp"]

#: Opening takes some answers of the server, each of which may take as long as a byte of the file.
ANSWERS = 4
#: How much is read at once, in bytes: what paramiko asks for by one request. More would be asked for piece by piece.
PIECE_BYTES = 32 << 10


def is_sftp(scheme: str) -> bool:
    """Whether the URLs of a scheme are files on SFTP servers."""
    return scheme in ("sftp", "ssh")


def connected(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, which fsspec keeps for its thread with its connection, and the path in it.

    Raises:
        Exception: whatever paramiko raises.
    """
    kind = _file_system()
    filesystem = kind(**{**kind._get_kwargs_from_urls(url), **options})
    return revived(filesystem), kind._strip_protocol(url)


def revived(filesystem: Any, *, anew: bool = False) -> Any:
    """Return the file system with a connection that is not known to be broken.

    Args:
        filesystem: one of `connected`.
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


class SftpOrigin:
    """A file on an SFTP server, from any byte on.

    Args:
        filesystem: one of `connected`.
        path: where it is there.
        timeout_s: the seconds without a byte after which the server has failed.
    """

    def __init__(self, filesystem: Any, path: str, timeout_s: float) -> None:
        self._filesystem, self._path, self._timeout_s = filesystem, path, timeout_s
        self._has_failed = False

    def open_at(self, start: int) -> Opened:
        """Open the file at a byte."""
        client = revived(self._filesystem, anew=self._has_failed).client
        self._has_failed = False
        try:
            return Attempt(partial(self._opened, client, start)).result(ANSWERS * self._timeout_s)
        except Exception as error:
            self._has_failed = True
            if isinstance(error, TooSlow):
                client.close()  # which ends that attempt
            raise

    def fail(self) -> None:
        """Take note that a file could not be read on."""
        self._has_failed = True

    def _opened(self, client: Any, start: int) -> Opened:
        # paramiko's channels are for one thread each.
        channel = client.open_sftp()
        try:
            channel.get_channel().settimeout(self._timeout_s)
            file = channel.open(self._path, "rb")
            facts = file.stat()
            file.seek(start)
        except BaseException:
            channel.close()
            raise
        return Opened(_ChannelFile(file, channel, client, self.fail), start, facts.st_size, version_of(facts.st_mtime))


class _ChannelFile:
    """A file and the channel that it is read by.

    Args:
        file: it.
        channel: its own.
        connection: what the channel is one of, which is closed with the last reference to it.
        fail: is called when it cannot be read.
    """

    def __init__(self, file: Any, channel: Any, connection: Any, fail: Callable[[], None]) -> None:
        self._file, self._channel, self._connection, self._fail = file, channel, connection, fail

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        try:
            return cast(bytes, self._file.read(min(size, PIECE_BYTES)))
        except Exception:
            self._fail()
            raise

    def close(self) -> None:
        """Close the channel, by which the server closes the file: nobody has to wait for its answer."""
        with contextlib.suppress(Exception):
            self._channel.close()


class OriginParts:
    """A file of which parts are read, each by opening it once more.

    Args:
        origin: opens the file from any byte on.
        stream: makes a stream of an origin that reads on where it breaks.
        changed: tells that the file is another one.
        head_bytes: how many bytes its head has.
    """

    def __init__(
        self,
        origin: Origin,
        stream: Callable[[Origin], BinaryIO],
        changed: Callable[[], ChangedShard],
        head_bytes: int,
    ) -> None:
        self._origin, self._stream, self._changed = origin, stream, changed
        opened = origin.open_at(0)
        self._facts = (opened.size, opened.version)
        self.head = b""
        with contextlib.closing(opened.file) as file:
            while len(self.head) < head_bytes and (data := file.read(head_bytes - len(self.head))):
                self.head += data

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        return self._stream(OriginPart(self._origin, self._facts, self._changed, start, end))

    def close(self) -> None:
        """Do nothing: each part is opened by itself."""


class OriginPart:
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
        origin: Origin,
        facts: tuple[int | None, tuple[str, ...]],
        changed: Callable[[], ChangedShard],
        start: int,
        end: int,
    ) -> None:
        self._origin, self._facts, self._changed, self._start, self._end = origin, facts, changed, start, end

    def open_at(self, start: int) -> Opened:
        """Open the part at a byte, if it is one of the very file that was found.

        Raises:
            ChangedShard: it is another one.
        """
        opened = self._origin.open_at(self._start + start)
        size = opened.size
        if (size, opened.version) != self._facts or (size is not None and self._start + start > size):
            opened.file.close()
            raise self._changed()
        end = size if self._end < 0 or size is None else min(self._end, size)
        if end is None:
            return Opened(opened.file, start, None, opened.version)
        left = end - self._start - start
        return Opened(_FirstBytes(opened.file, left), start, end - self._start, opened.version)


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
