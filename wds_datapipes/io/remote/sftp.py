"""Files on SFTP servers, by fsspec's file system: each file has a channel of its own, and its connection a time-out."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from wds_datapipes.io.remote.fsspec_file import FileExpired
from wds_datapipes.io.remote.throughput import Attempt, TooSlowError
from wds_datapipes.io.remote.timeouts import TIMEOUT_S

__all__ = ["SftpFile", "connect", "is_sftp"]

#: Opening a channel takes some answers of the server, each of which may take as long as a byte of a file.
ANSWERS = 4
#: How much one request asks for, in bytes, which servers have to take; and how much a file reads at a time.
PIECE_BYTES, BATCH_BYTES = 32 << 10, 1 << 20


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
    filesystem.reconnect()
    return filesystem, kind._strip_protocol(url)


@lru_cache(maxsize=1)
def _file_system() -> Any:
    """Return fsspec's class, as one whose connections end, and whose files open again where these break."""
    import paramiko  # type: ignore[import-untyped]  # it carries no types
    from fsspec.implementations.sftp import SFTPFileSystem  # type: ignore[import-untyped]  # the same

    class Connection(SFTPFileSystem):  # type: ignore[misc]  # the same
        #: Whether a file could not be read: a connection that has gone silent looks like one that is fine.
        is_suspect = False

        def reconnect(self) -> None:
            """Take a new connection unless the one that is there works."""
            transport = self.client.get_transport()
            if self.is_suspect or transport is None or not transport.is_active():
                self._connect()

        def open_channel(self) -> Any:
            """Open a channel of the connection: paramiko's are for one thread each."""
            try:
                channel = Attempt(self.client.open_sftp).result(ANSWERS * self._timeout_s)
            except TooSlowError:
                self.client.close()  # which ends that attempt
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
            # By default fsspec trusts any server, and some of its releases can be told otherwise.
            client.set_missing_host_key_policy(getattr(self, "host_key_policy", None) or paramiko.AutoAddPolicy())
            try:
                if known_hosts is not None:
                    _trust(client, known_hosts)
                    client.set_missing_host_key_policy(paramiko.RejectPolicy())
                client.connect(self.host, **options)
                with contextlib.suppress(AttributeError, OSError):  # it may be a command, instead of a socket
                    client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.ftp = self.open_channel()
            except BaseException:
                client.close()
                raise
            self.is_suspect = False
            # Or its socket, and the thread that reads it, would be there for good.
            weakref.finalize(client, client.get_transport().close)

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return SftpFile(self, path) if mode == "rb" else super()._open(path, mode, **options)

    return Connection


def _trust(client: Any, path: str) -> None:
    try:
        client.load_system_host_keys(os.path.expanduser(os.fspath(path)))  # noqa: PTH111  it may be a text
    except (OSError, TypeError) as error:
        raise ValueError(
            f"storage_options['known_hosts'] has to be a file with keys of servers, as ssh writes it: "
            f"{type(error).__name__}"
        ) from None


class SftpFile:
    """A file on an SFTP server. After an error it opens again, if it is still the same file.

    Args:
        filesystem: the connection.
        path: of the file.

    Attributes:
        details: its size and its date, by which one version is told from another.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._at = 0
        self._error: Exception | None = None
        self.details: dict[str, Any] = {}
        self._file, self._channel, self._client = self._opened()

    def seek(self, offset: int) -> int:
        """Continue at a byte."""
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        if (error := self._error) is not None:
            self._error = None
            raise error
        want = min(size, BATCH_BYTES, self.details["size"] - self._at)
        data = bytearray()
        try:
            if self._file is None:
                self._file, self._channel, self._client = self._opened()
            self._file.seek(self._at)
            while len(data) < want:
                piece = self._file.read(min(PIECE_BYTES, want - len(data)))
                if not piece:
                    raise EOFError("the server has sent less of the file than there is")
                data += piece
        except Exception as failure:
            self._filesystem.is_suspect = True
            self.close()
            if not data:
                raise
            self._error = failure  # for the next call: what has come is good
        self._at += len(data)
        return bytes(data)

    def close(self) -> None:
        """Close the channel, by which the server closes the file, without waiting for its answer."""
        self._file = self._client = None
        with contextlib.suppress(Exception):
            self._channel.close()

    def _opened(self) -> tuple[Any, Any, Any]:
        """Return the file, its channel, and the connection, which is closed with the last reference to it."""
        filesystem, channel = self._filesystem, None
        try:
            filesystem.reconnect()
            channel, client = filesystem.open_channel(), filesystem.client
            file = channel.open(self._path, "rb", bufsize=0)
            facts = file.stat()
        except BaseException:
            filesystem.is_suspect = True
            if channel is not None:
                channel.close()
            raise
        details = {"size": facts.st_size, "mtime": facts.st_mtime}
        if self.details not in ({}, details):
            channel.close()
            raise FileExpired("another version of the file is there by now")
        self.details = details
        return file, channel, client
