"""The sending end: sends items as soon as they are produced, as far ahead as its credit allows."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence

from wds_datapipes.loading.transport.flow_control import TICK_S, TOGETHER_S
from wds_datapipes.loading.transport.message_writer import MessageWriter
from wds_datapipes.loading.transport.protocol import COMMAND_BYTES, HEADER, Command, Header, Kind
from wds_datapipes.loading.transport.serialization import unpack
from wds_datapipes.loading.transport.shared_memory import SegmentPool
from wds_datapipes.loading.transport.status_page import StatusPage


class ReceiverGone(Exception):
    """The other end has closed."""


class Sender(MessageWriter):
    """Sends messages through a socket, and receives requests.

    One thread calls the methods. A second thread ensures that no item waits until the next one is produced.

    Args:
        channel: this process's end of the socket.
        window: as of a `MessageWriter`.
        together: the maximum number of items in a message.
        name: the name of this process, for errors.

    Attributes:
        page: the status page of this process, which the other side reads.
    """

    pool: SegmentPool

    def __init__(self, channel: socket.socket, *, window: int, together: int, name: str = "") -> None:
        super().__init__(SegmentPool(), window=window, together=together, together_s=TOGETHER_S, name=name)
        self._channel = channel
        self._parts = bytearray()
        self.has_waiting = threading.Event()
        self._is_ticking = False  # whether the event is set; faster than is_set()
        self.closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="flush", daemon=True)
        self.page = StatusPage()
        self.counters.on_shard, self.counters.on_retry = self.page.note, self._publish_retry
        self.begin(0)
        self._send(Header(Kind.STATUS), attached=self.page.descriptor)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there are requests to receive."""
        return self._channel.fileno()

    def receive_requests(self) -> None:
        """Receive the requests that have arrived.

        Raises:
            ReceiverGone: the other side has closed.
        """
        while self._receive_request(socket.MSG_DONTWAIT):
            pass

    def wait(self) -> None:
        """Wait until the other side sends something; then send the items that have been waiting for it.

        Raises:
            ReceiverGone: the other side has closed.
        """
        with self._lock:
            begin = self._count_making()
        self._receive_request()
        self.receive_requests()
        with self._lock:
            self._count_waiting(begin)
            if not self.is_full:
                self._flush()
            self._publish()

    def close(self) -> None:
        """Close the descriptors and end the second thread; waiting items are not sent."""
        self.closed.set()
        self.has_waiting.set()
        self._channel.close()
        self.pool.close()

    def _receive_request(self, flags: int = 0) -> bool:
        try:
            message = self._channel.recv(COMMAND_BYTES, flags)
        except BlockingIOError:
            return False
        except ConnectionError:
            message = b""
        if not message:
            raise ReceiverGone
        header, body = Header(*HEADER.unpack_from(message)), memoryview(message)[HEADER.size :]
        if header.kind != Command.TAKEN:
            self._parts += body
            if header.kind == Command.RESET:
                self.requests.append((header.epoch, unpack(self._parts)))
                self._parts = bytearray()
            return True
        with self._lock:
            if header.epoch == self.epoch:
                self._taken, self._taken_bytes = header.number, header.size
            for number in body.cast("i"):
                self.pool.give_back(number)
        return True

    def _send(self, header: Header, body: Sequence[bytes] = (), attached: int | None = None) -> None:
        self._publish()  # includes items that have arrived
        begin = time.perf_counter()
        message = b"".join((HEADER.pack(*header), *body))
        try:
            if attached is None:
                self._channel.send(message)
            else:
                socket.send_fds(self._channel, [message], [attached])
        except ConnectionError as error:
            raise ReceiverGone from error
        finally:
            if attached is not None:
                os.close(attached)
        self._waiting_s += time.perf_counter() - begin

    def _publish(self) -> None:
        self.page.write(self._work(), self.counters.figures())

    def _publish_retry(self) -> None:
        with self._lock:  # a prefetching thread may call this
            self._publish()

    def _flush_later(self) -> None:
        """Wake the second thread, which sends the waiting items soon."""
        if not self._is_ticking:
            self._is_ticking = True
            self.has_waiting.set()
            if not self._ticker.is_alive():
                self._ticker.start()

    def _tick(self) -> None:
        seen = -1
        while self.has_waiting.wait() and not self.closed.wait(TICK_S):
            with self._lock:
                if not self._bundle.count or self.is_full:  # if full, the other thread waits for the receiver
                    self._is_ticking = False
                    self.has_waiting.clear()
                elif seen == self._sent:
                    try:
                        self._flush()
                    except ReceiverGone:  # the other thread detects it, too
                        return
                    except Exception:  # noqa: BLE001, S110 - nothing is lost: the next send retries or raises
                        pass
                seen = self._sent if self._is_ticking else -1
