"""The receiving end: reads messages without blocking, rebuilds items, and grants credit for more."""

from __future__ import annotations

import socket
import struct
from array import array
from contextlib import suppress

import numpy as np

from wds_datapipes.loading.transport.flow_control import AHEAD_BYTES
from wds_datapipes.loading.transport.message_reader import MessageReader, ReceivedMessage
from wds_datapipes.loading.transport.protocol import COMMAND_BYTES, HEADER, INLINE, Command, Header
from wds_datapipes.loading.transport.serialization import serialize
from wds_datapipes.loading.transport.shared_memory import SegmentLender
from wds_datapipes.loading.transport.status_page import StatusPage

#: If this many segments are lent, further items are copied out of their segments, because the loop may keep items, and
#: segments are limited.
MAX_LENT = 64

#: The limit of `keep_freed`, a little below that of glibc.
MAX_FREED = 31 * 1024 * 1024

#: The maximum size of a message.
MESSAGE_BYTES = HEADER.size + 2 * INLINE

#: Plain numbers, because operations on enum members take a microsecond.
DONT_WAIT, CLOSE_ON_EXEC, TRUNCATED = (
    int(getattr(socket, name, 0))  # where they are missing, `new_channel` raises an error
    for name in ("MSG_DONTWAIT", "MSG_CMSG_CLOEXEC", "MSG_CTRUNC")
)
FLAGS = DONT_WAIT | CLOSE_ON_EXEC

#: Space for one descriptor.
_DESCRIPTOR = struct.Struct("i")
_ATTACHED = socket.CMSG_LEN(_DESCRIPTOR.size) if hasattr(socket, "CMSG_LEN") else 0


def keep_freed(size: int) -> int:
    """Let the C library keep up to ``size`` bytes of freed memory, or `MAX_FREED`; return ``size``.

    Otherwise it gives the memory of a list of samples back to the system when the loop has dropped the list, and gets
    the pages of the next one one by one, which takes twice as long as copying the samples. glibc decides by the largest
    block that the program has freed, see mallopt(3), so one is freed here, whose pages are never used.
    """
    np.empty(min(size, MAX_FREED), np.uint8)
    return size


class Receiver(MessageReader):
    """Receives the messages of a `Sender`.

    Args:
        channel: this process's end of the socket.
        window: the window of the sender, in messages.

    Attributes:
        page: the status page of the other process, or ``None`` before that process has started.
    """

    def __init__(self, channel: socket.socket, *, window: int) -> None:
        self._channel = channel
        self.lender = SegmentLender(spare=window + 2)
        self._credit_interval = max(window // 4, 1)
        self._kept = 0
        self.page: StatusPage | None = None
        self.begin(0)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `receive`."""
        return self._channel.fileno()

    def receive(self) -> ReceivedMessage | None:
        """Return the next message, or ``None`` if there is none.

        Raises:
            EOFError: the other side has closed, and nothing more will arrive.
        """
        try:
            # Not recv_fds, which ignores its flags (https://github.com/python/cpython/issues/107898).
            data, attached, flags, _ = self._channel.recvmsg(MESSAGE_BYTES, _ATTACHED, FLAGS)
        except BlockingIOError:
            return None
        except ConnectionError:
            # The other side closed with unread commands. This is reported once, before the messages that it sent.
            return self.receive()
        if not data:
            raise EOFError
        if flags & TRUNCATED:
            raise OSError("this process has too many open files to receive a segment of shared memory: see `ulimit -n`")
        header = Header._make(HEADER.unpack_from(data))
        if attached:
            (descriptor,) = _DESCRIPTOR.unpack(attached[0][2][: _DESCRIPTOR.size])
            if header.segment < 0:  # it is the status page
                self.page = StatusPage(descriptor)
                return self.receive()
            self.lender.add(header.segment, descriptor)
        return ReceivedMessage.of(header, data)

    def pack_request(self, payload: object) -> list[bytes]:
        """Return the messages of the command to begin the current epoch, for `send_command`.

        Raises:
            Exception: ``payload`` cannot be pickled.
        """
        body, limit = serialize(payload), COMMAND_BYTES - HEADER.size
        parts = [body[begin : begin + limit] for begin in range(0, len(body), limit)]
        kinds = [*[Command.PART] * (len(parts) - 1), Command.RESET]
        return [HEADER.pack(*Header(kind, self.epoch)) + part for kind, part in zip(kinds, parts, strict=True)]

    def send_command(self, message: bytes) -> bool:
        """Send a command without waiting; return whether there was room for it.

        A closed connection is detected at the next receive.
        """
        try:
            self._channel.send(message, DONT_WAIT)
        except BlockingIOError:  # the other side has not received for a long time
            return False
        except ConnectionError:
            pass
        return True

    def begin(self, epoch: int) -> None:
        """Restart counting."""
        self.epoch = epoch
        self._taken = self._credited = self._taken_bytes = self._credited_bytes = 0

    def is_crowded(self) -> bool:
        """Whether so many segments are lent that further items are copied out of theirs."""
        return len(self.lender) >= MAX_LENT

    def memory_of(self, message: ReceivedMessage) -> memoryview:
        """Return the segment of a message."""
        return self.lender.lend(message.header.segment)

    def take(self, header: Header) -> None:
        """Count a message as taken."""
        self._taken += 1
        self._taken_bytes += header.size
        if header.size - header.begin > self._kept:
            self._kept = keep_freed(header.size - header.begin)
        uncredited, uncredited_bytes = self._taken - self._credited, self._taken_bytes - self._credited_bytes
        if uncredited >= self._credit_interval or uncredited_bytes > AHEAD_BYTES // 8:
            self.credit()

    def credit(self) -> None:
        """Grant credit for the messages used so far."""
        returned = self.lender.returned
        if self._credited != self._taken or returned:
            numbers = array("i")
            with suppress(IndexError):  # another thread may pop numbers, too
                while returned:
                    numbers.append(returned.popleft())
            header = Header(Command.TAKEN, self.epoch, self._taken, size=self._taken_bytes)
            if self.send_command(HEADER.pack(*header) + numbers.tobytes()):
                self._credited, self._credited_bytes = self._taken, self._taken_bytes
            else:  # the other side is busy
                returned.extend(numbers)

    def cut(self) -> None:
        """Shut down the connection, which wakes waiting threads at either end."""
        with suppress(OSError):  # the other side has closed
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. Items that were taken remain valid."""
        self._channel.close()
