"""HTTP answers: the status, the headers and the body of a response, received from a connection.

http.client and urllib3 take four times as much CPU time for a range of 100 kB, mostly for the headers.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from contextlib import suppress
from http.client import BadStatusLine, HTTPException, RemoteDisconnected
from typing import TYPE_CHECKING

from wds_datapipes.errors import plural
from wds_datapipes.io.remote.http_connection import Connection, keep
from wds_datapipes.io.remote.in_flight import abort_lock, wait_for_headers
from wds_datapipes.io.streams import move_bytes

if TYPE_CHECKING:
    from wds_datapipes.io.timeouts import ResolvedTimeouts

#: The maximum size of the headers of a response in bytes.
MAX_HEAD_BYTES = 256 << 10
#: The maximum number of bytes that are received with the headers.
RECEIVED_BYTES = 16 << 10
#: At most this many bytes of a body that have arrived are read so that its connection can be kept.
MAX_DRAINED_BYTES = 4 << 10
#: The end of the headers, and of a line; some servers end lines without a carriage return.
HEAD_END, LINE_END = re.compile(rb"\r?\n\r?\n"), re.compile(rb"\r?\n")
#: The first line of a response: the minor version, the status and its description.
STATUS_LINE = re.compile(r"HTTP/1\.(\d)\s+([1-9]\d\d)(?:\s+(.*?))?\s*", re.ASCII)
#: The size of a chunk, and its extensions.
CHUNK = re.compile(rb"\s*([0-9a-fA-F]{1,16})\s*(?:;.*)?", re.DOTALL)
#: A size in ASCII digits, with a limited length.
SIZE = re.compile(r"[0-9]{1,19}")
#: Linux only: acknowledges the next segments at once. Some servers wait for each acknowledgement, up to 40 ms.
QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)


class Answer:
    """A response of a server. After its body is read to its end, another request can use the connection.

    Args:
        connection: the connection, which has sent the request.
        method: the method of the request.
        timeouts: the time limits.

    Attributes:
        status: the HTTP status.
        reason: the server's description of it.
        headers: the headers by capitalized name, such as ``"Etag"``; the first one counts if a name is repeated.
        is_first: whether this is the first answer on its connection.
    """

    def __init__(self, connection: Connection, method: str, timeouts: ResolvedTimeouts) -> None:
        self._connection: Connection | None = connection
        self._timeouts, self._process = timeouts, os.getpid()
        self.is_first = not connection.kept_until
        #: What has arrived and was not read yet.
        self._received = b""
        try:
            with wait_for_headers(connection.sock):
                self._receive_head(connection, method)
        except BaseException:
            connection.close()
            raise

    def _receive_head(self, connection: Connection, method: str) -> None:
        """Receive the status and the headers, also after responses that only announce it, such as 103."""
        if QUICKACK is not None:
            connection.sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        until, self.status, is_old = time.monotonic() + self._timeouts.response_s, 100, False
        while 100 <= self.status < 200:
            line, *lines = self._receive_until(HEAD_END, until, "its headers").decode("latin-1").split("\n")
            if (found := STATUS_LINE.fullmatch(line)) is None:
                raise BadStatusLine(repr(line[:100]))
            is_old, self.status, self.reason = found[1] == "0", int(found[2]), found[3] or ""
        fields = [line.partition(":") for line in lines]
        self.headers = {name.title(): value.strip() for name, _, value in reversed(fields)}
        option, length = (self.headers.get(name, "").lower() for name in ("Connection", "Content-Length"))
        has_body = method != "HEAD" and self.status not in (204, 304)
        coding = self.headers.get("Transfer-Encoding", "identity").lower() if has_body else "identity"
        if coding not in ("identity", "chunked"):
            raise HTTPException(f"the server sends the body with the transfer coding {coding[:100]!r}, not requested")
        self._is_chunked = coding == "chunked"
        has_size = has_body and not self._is_chunked and SIZE.fullmatch(length)
        #: The remaining bytes of the body or of a chunk; None before the first chunk, or if the body ends when the
        #: connection is closed.
        self._left = int(length) if has_size else None if has_body else 0
        has_end = self._is_chunked or self._left is not None
        self._is_kept = has_end and ("keep-alive" in option if is_old else "close" not in option)
        connection.sock.settimeout(self._timeouts.response_s)

    def readinto(self, view: memoryview) -> int:
        """Read the available bytes, at most ``len(view)``; 0 at the end.

        Raises:
            TimeoutError: no data arrive.
            EOFError: the connection has ended too early.
        """
        if (connection := self._connection) is None:
            raise ValueError("the response is closed")
        if self._is_chunked and not self._left:
            self._begin_chunk()
        view = view[: self._left]
        if not view:
            return 0
        if self._received:
            count, rest = move_bytes(memoryview(self._received), view)
            self._received = bytes(rest)
        else:
            count = self._receive(connection, view)
        if self._left is not None:
            if not count:
                raise EOFError(f"the response ends {plural(self._left, 'byte')} too early")
            self._left -= count
        return count

    def abort(self) -> None:
        """Abort a read in another thread, which then closes the response."""
        with abort_lock, suppress(OSError, AttributeError):  # it may be closed
            if self._connection is not None:
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the request."""
        with abort_lock:
            connection, self._connection = self._connection, None
        if connection is None or os.getpid() != self._process:  # the parent process may still use the connection
            return
        if self._is_kept and not self._is_chunked and self._drain(connection):
            keep(connection, self._timeouts.idle_s)
        else:
            connection.close()

    def _drain(self, connection: Connection) -> bool:
        """Receive the rest of a small body that has arrived; return whether nothing follows it."""
        left = self._left or 0
        if len(self._received) < left <= MAX_DRAINED_BYTES:
            connection.sock.settimeout(1e-3)
            with suppress(OSError, EOFError):
                while len(self._received) < left and (more := connection.sock.recv(left - len(self._received))):
                    self._received += more
        return len(self._received) == left

    def _begin_chunk(self) -> None:
        """Receive the size of the next chunk; the last one has none."""
        until = time.monotonic() + self._timeouts.response_s
        if self._left is not None:
            self._receive_until(LINE_END, until, "a chunk")
        line = self._receive_until(LINE_END, until, "the size of a chunk")
        if (found := CHUNK.fullmatch(line)) is None:
            raise HTTPException(f"the size of a chunk is {line[:100]!r}")
        self._left = int(found[1], 16)
        if not self._left:
            self._is_chunked = False
            while self._receive_until(LINE_END, until, "its last headers"):
                pass
        if self._connection is not None:
            self._connection.sock.settimeout(self._timeouts.response_s)

    def _receive_until(self, end: re.Pattern[bytes], until: float, what: str) -> bytes:
        """Receive the bytes up to a pattern and return them without it; a limit for each read would let a server block.

        Raises:
            TimeoutError: they have not arrived by the time ``until``.
        """
        received = self._received
        while (found := end.search(received)) is None:
            if len(received) > MAX_HEAD_BYTES:
                raise HTTPException(f"the server sends {what} with more than {MAX_HEAD_BYTES} bytes")
            if (connection := self._connection) is None:
                raise ValueError("the response is closed")
            connection.sock.settimeout(max(until - time.monotonic(), 1e-6))
            more = memoryview(bytearray(RECEIVED_BYTES))
            try:
                count = self._receive(connection, more)
            except EOFError:
                count = 0
            if not count:
                raise RemoteDisconnected(f"the server has closed the connection before the end of {what}")
            received += more[:count]
        self._received = received[found.end() :]
        return received[: found.start()]

    def _receive(self, connection: Connection, view: memoryview) -> int:
        """Receive the available bytes, at most ``len(view)``; 0 at the end of the connection."""
        try:
            return int(connection.sock.recv_into(view))
        except TimeoutError:
            raise TimeoutError(
                f"the server has not sent its headers, or the next bytes, within {self._timeouts.response_s:g} s"
            ) from None
        except ssl.SSLEOFError:
            raise EOFError(
                "the connection was cut: it ended without close_notify of TLS, so the rest may be missing"
            ) from None
