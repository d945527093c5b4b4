"""SFTP, based on fsspec's file system: one channel per file, with time-outs."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from wds_datapipes.io.remote.throughput import Attempt, TooSlowError
from wds_datapipes.io.remote.timeouts import TIMEOUT_S

#: The time-out for opening a channel, as a multiple of the time-out of a byte: it takes several responses.
CHANNEL_TIMEOUTS = 4
#: Bytes per request, which every server must support, and bytes per read of a file.
PIECE_BYTES, BATCH_BYTES = 32 << 10, 1 << 20


def is_sftp(scheme: str) -> bool:
    """Whether the URLs of a scheme are files on SFTP servers."""
    return scheme in ("sftp", "ssh")


def connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it; fsspec caches file systems and connections by thread.

    Raises:
        Exception: any error of paramiko.
    """
    kind = _file_system()
    filesystem = kind(**{**kind._get_kwargs_from_urls(url), **options})
    filesystem.reconnect()
    return filesystem, kind._strip_protocol(url)


@lru_cache(maxsize=1)
def _file_system() -> Any:
    """Return a subclass of fsspec's file system that closes its connections, and reconnects after errors."""
    import paramiko  # type: ignore[import-untyped]  # it carries no types
    from fsspec.implementations.sftp import SFTPFileSystem  # type: ignore[import-untyped]  # as above

    class Connection(SFTPFileSystem):  # type: ignore[misc]  # as above
        #: Whether a read has failed: a dead connection may still report itself as active.
        is_suspect = False

        def reconnect(self) -> None:
            """Open a new connection unless the current one works."""
            transport = self.client.get_transport()
            if self.is_suspect or transport is None or not transport.is_active():
                self._connect()

        def open_channel(self) -> Any:
            """Open a channel of the connection: a channel of paramiko belongs to one thread."""
            try:
                channel = Attempt(self.client.open_sftp).result(CHANNEL_TIMEOUTS * self._timeout_s)
            except TooSlowError:
                self.client.close()  # stops the attempt
                raise
            channel.get_channel().settimeout(self._timeout_s)
            return channel

        @property
        def _timeout_s(self) -> float:
            return float(self.ssh_kwargs.get("channel_timeout") or TIMEOUT_S)

        def _connect(self) -> None:
            options = dict(self.ssh_kwargs)
            known_hosts = options.pop("known_hosts", None)
            self.client = client = paramiko.SSHClient()
            # fsspec trusts any server by default; some releases have an option for this.
            client.set_missing_host_key_policy(getattr(self, "host_key_policy", None) or paramiko.AutoAddPolicy())
            try:
                if known_hosts is not None:
                    _trust(client, known_hosts)
                    client.set_missing_host_key_policy(paramiko.RejectPolicy())
                client.connect(self.host, **options)
                with contextlib.suppress(AttributeError, OSError):  # it may be a proxy command instead of a socket
                    client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.ftp = self.open_channel()
            except BaseException:
                client.close()
                raise
            self.is_suspect = False
            # Without this, the socket and the thread that reads it would leak.
            weakref.finalize(client, client.get_transport().close)

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return SftpFile(self, path) if mode == "rb" else super()._open(path, mode, **options)

    return Connection


def _trust(client: Any, path: str) -> None:
    try:
        client.load_system_host_keys(os.path.expanduser(os.fspath(path)))  # noqa: PTH111  it may be a string
    except (OSError, TypeError) as error:
        raise ValueError(
            f"storage_options['known_hosts'] must be a file of server keys, as ssh writes it: {type(error).__name__}"
        ) from None


class SftpFile:
    """A file on an SFTP server, with a channel of its own.

    Args:
        filesystem: the connection.
        path: the path of the file.

    Attributes:
        details: its size and modification time, which identify its version.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._channel = filesystem, cast(Any, None)
        try:
            filesystem.reconnect()
            self._channel = filesystem.open_channel()
            self._client = filesystem.client  # keeps the connection open
            self._file = self._channel.open(path, "rb", bufsize=0)
            facts = self._file.stat()
        except BaseException:
            self._fail()
            raise
        self.details = {"size": facts.st_size, "mtime": facts.st_mtime}

    def seek(self, offset: int) -> None:
        """Set the offset of the next byte."""
        self._file.seek(offset)

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        count, data = min(size, BATCH_BYTES), bytearray()
        try:
            while len(data) < count and (piece := self._file.read(min(PIECE_BYTES, count - len(data)))):
                data += piece
        except Exception:
            self._fail()
            if not data:
                raise
        return bytes(data)  # after an error, those that were received; the next call raises

    def close(self) -> None:
        """Close the channel without waiting for a response; the server closes the file with it."""
        self._client = None
        with contextlib.suppress(Exception):
            self._channel.close()

    def _fail(self) -> None:
        self._filesystem.is_suspect = True
        self.close()
