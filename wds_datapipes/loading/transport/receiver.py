"""The receiving end: reads messages without blocking, rebuilds items, and grants credit for more."""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from wds_datapipes.loading.transport.protocol import (
    AHEAD_BYTES,
    COMMAND_BYTES,
    HEADER,
    MESSAGE_BYTES,
    Command,
    Header,
    Kind,
)
from wds_datapipes.loading.transport.serialization import Serializer, unpack
from wds_datapipes.loading.transport.shared_memory import SegmentLender
from wds_datapipes.loading.transport.status_page import StatusPage

__all__ = ["Message", "Receiver"]

#: With so many segments lent, what comes next is copied out of them: somebody keeps the items, and segments are few.
MOST_LENT = 64

FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC

#: Room for one descriptor.
_DESCRIPTOR = struct.Struct("i")
_ATTACHED = socket.CMSG_LEN(_DESCRIPTOR.size)


class Message(NamedTuple):
    """What the other side said.

    Attributes:
        header: what this is.
        body: what the header announces, unless that is in a segment.
        records: where the pipeline was behind the items.
    """

    header: Header
    body: bytes
    records: bytes = b""


class Receiver:
    """Receives what an `Sender` sends.

    Args:
        channel: this process's end of the socket.
        window: the window of the outlet, in messages.

    Attributes:
        page: what the other process says it is at, or None if it has not begun.
    """

    def __init__(self, channel: socket.socket, *, window: int) -> None:
        self._channel = channel
        self._lender = SegmentLender()
        self._patience = max(window // 4, 1)
        self._taken = self._told = 0
        self._untold_bytes = 0
        self.epoch = 0
        self.page: StatusPage | None = None

    def fileno(self) -> int:
        """The descriptor that gets readable when there is something to `receive`."""
        return self._channel.fileno()

    def receive(self) -> Message | None:
        """Return the next message, or None if none is there.

        Raises:
            EOFError: the other side has gone, and nothing more will come.
        """
        try:
            # Not recv_fds, which ignores the flags that it takes (https://github.com/python/cpython/issues/107898).
            data, attached, flags, _ = self._channel.recvmsg(MESSAGE_BYTES, _ATTACHED, FLAGS)
        except BlockingIOError:
            return None
        except ConnectionError:
            # It went without having read all that it was told, which comes up first, and once. What it sent is there.
            return self.receive()
        if not data:
            raise EOFError
        if flags & socket.MSG_CTRUNC:
            raise OSError("this process has too many open files to take a segment of shared memory: see `ulimit -n`")
        header = Header(*HEADER.unpack_from(data))
        if header.kind == Kind.STATUS:
            self.page = StatusPage(_descriptor(attached[0]))
            return self.receive()
        if header.kind == Kind.GIVEN_UP:
            self._lender.drop(header.segment)
            return self.receive()
        if attached:
            self._lender.add(header.segment, _descriptor(attached[0]))
        if not header.records:
            return Message(header, data[HEADER.size :])
        begin = HEADER.size + header.records
        return Message(header, data[begin:], data[HEADER.size : begin])

    def order(self, command: Command, payload: object = None) -> bytes:
        """Return the message that tells the other side what to do, for `tell`.

        Raises:
            ValueError: it is too large.
            Exception: ``payload`` cannot be pickled.
        """
        body = b"".join(Serializer().pack(payload).parts)
        if len(body) > COMMAND_BYTES - HEADER.size:
            raise ValueError(f"a {command.name} with {len(body)} bytes is more than a worker can be told at once")
        return HEADER.pack(*Header(command, self.epoch)) + body

    def tell(self, order: bytes) -> bool:
        """Send an order without waiting, and return whether there was room for it.

        If the other side has gone, that shows when something is received.
        """
        try:
            self._send(order)
        except BlockingIOError:  # the other side has not listened for a long time
            return False
        return True

    def begin(self, epoch: int) -> None:
        """Begin to count anew."""
        self.epoch = epoch
        self._taken = self._told = 0
        self._untold_bytes = 0

    def body(self, message: Message) -> Any:
        """Return the object in a message without items."""
        if message.header.segment < 0:
            return unpack(message.body)
        try:
            return unpack(self._lender.read(message.header.segment)[: message.header.size])
        finally:
            self._lender.give_back(message.header.segment)

    def data(self, message: Message) -> bytes:
        """Return the bytes of a message without items."""
        if message.header.segment < 0:
            return message.body
        try:
            return bytes(self._lender.read(message.header.segment)[: message.header.size])
        finally:
            self._lender.give_back(message.header.segment)

    def drop(self, message: Message) -> None:
        """Pass over a message."""
        if message.header.segment >= 0:
            self._lender.give_back(message.header.segment)

    def item(self, message: Message) -> Any:
        """Return the one item of a message with arrays, which lie where they were sent."""
        self._take(message.header.size)
        count, arrays, segment = message.header.number, message.header.arrays, message.header.segment
        keep = len(self._lender) < MOST_LENT
        view = self._lender.lend(segment) if keep else self._lender.read(segment)
        begin = 8 * (count + 2 * arrays)
        size, *places = view[:begin].cast("Q").tolist()
        try:
            parts = [view[at : at + length] for at, length in zip(places[::2], places[1::2], strict=True)]
            return unpack(view[begin : begin + size], parts if keep else map(bytearray, parts))
        finally:
            if not keep:
                self._lender.give_back(segment)

    def items(self, message: Message) -> Iterator[Any]:
        """Yield the items of a message without arrays."""
        header, body, _ = message
        self._take(header.size)
        view = memoryview(body) if header.segment < 0 else self._lender.read(header.segment)
        at = 8 * header.number
        try:
            for length in view[:at].cast("Q"):
                yield unpack(view[at : at + length])
                at += length
        finally:
            self.drop(message)

    def credit(self) -> None:
        """Tell the other side what has been used up, so that it goes on, before waiting for it."""
        returned = self._lender.returned
        if self._told != self._taken or returned:
            numbers = array("i")
            with suppress(IndexError):  # another thread may take some, too
                while returned:
                    numbers.append(returned.popleft())
            try:
                self._send(HEADER.pack(*Header(Command.TAKEN, self.epoch, self._taken)) + numbers.tobytes())
            except BlockingIOError:  # it has enough to do
                returned.extend(numbers)
            else:
                self._told = self._taken
                self._untold_bytes = 0

    def cut(self) -> None:
        """Cut the connection, which wakes whoever waits at either end."""
        with suppress(OSError):  # the other side has
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give back the descriptor. Items that were taken stay as they are."""
        self._channel.close()

    def _take(self, size: int) -> None:
        self._taken += 1
        self._untold_bytes += size
        if self._taken - self._told >= self._patience or self._untold_bytes > AHEAD_BYTES // 8:
            self.credit()

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # that shows when something is received
            self._channel.send(message, socket.MSG_DONTWAIT)


def _descriptor(attached: tuple[int, int, bytes]) -> int:
    """Return the descriptor that came with a message."""
    (descriptor,) = _DESCRIPTOR.unpack(attached[2][: _DESCRIPTOR.size])
    return int(descriptor)
