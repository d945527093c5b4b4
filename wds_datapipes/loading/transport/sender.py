"""The sending end: sends items as soon as they are produced, as far ahead as its credit allows."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.errors import text_of
from wds_datapipes.loading.transport.bundle import Bundle
from wds_datapipes.loading.transport.flow_control import AHEAD_BYTES, MIN_MESSAGES, TICK_S, TOGETHER_S
from wds_datapipes.loading.transport.protocol import COMMAND_BYTES, HEADER, INLINE, Command, Header, Kind
from wds_datapipes.loading.transport.serialization import (
    SendableError,
    Serializer,
    describe,
    plain_copy,
    serialize,
    unpack,
)
from wds_datapipes.loading.transport.shared_memory import SegmentPool
from wds_datapipes.loading.transport.status_page import StatusPage, Work


class ReceiverGone(Exception):
    """The other end has closed."""


class Sender:
    """Sends items, and receives requests.

    One thread calls the methods. A second thread ensures that no item waits until the next one is produced.

    Args:
        channel: this process's end of the socket.
        window: the maximum number of messages in transit or waiting to be used; if small items share messages, there
            can be one more.
        together: the maximum number of items in a message.
        name: the name of this process, for errors.

    Attributes:
        page: the status page of this process, which the other side reads.
        counters: the counters of the pipeline that produces the items.
        epoch: the epoch that is being sent.
        requests: the requested epochs that have not begun, with the data that they need to begin.
        pack_records: returns the records of some items as bytes; None if items have none.
    """

    def __init__(self, channel: socket.socket, *, window: int, together: int, name: str = "") -> None:
        self._channel = channel
        self._name = name
        self._parts = bytearray()
        self._window = window
        self._together = together
        self.pool = SegmentPool()
        self._bundle = Bundle(self.pool)
        self._serializer = Serializer()
        self._lock = threading.Lock()
        self.has_waiting = threading.Event()
        self._is_ticking = False  # whether the event is set; faster than is_set()
        self.closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="flush", daemon=True)
        self._items = self._bytes = 0
        self._making_s = self._waiting_s = 0.0
        self.requests: deque[tuple[int, Any]] = deque()
        self._producer = "The pipeline"
        self.pack_records: Callable[[Sequence[Any]], bytes] | None = None
        self.page = StatusPage()
        self.counters = Counters()
        self.counters.on_shard, self.counters.on_retry = self.page.note, self._publish_retry
        self.begin(0)
        self._send(Header(Kind.STATUS), descriptor=self.page.descriptor)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there are requests to receive."""
        return self._channel.fileno()

    def name_producer(self, producer: str) -> None:
        """Set the name of the stage that produces the items, for messages."""
        self._producer = producer

    @property
    def is_full(self) -> bool:
        """Whether the other side accepts no further items for now."""
        ahead = self._sent - self._taken
        return ahead >= self._window or (self._sent_bytes - self._taken_bytes >= AHEAD_BYTES and ahead >= MIN_MESSAGES)

    def begin(self, epoch: int) -> None:
        """Discard unsent items, and begin another epoch."""
        with self._lock:
            self._bundle.clear()
            self._records: list[Any] = []
            self._sent = self._taken = self._sent_bytes = self._taken_bytes = 0
            self.epoch = epoch
        self._ready = time.perf_counter()

    def put(self, item: object, record: object = None) -> bool:
        """Send an item, now or together with the next ones; return whether it was sent now.

        Args:
            item: the item.
            record: the record to send along with it, if ``pack_records`` is set. It arrives before the item.

        Raises:
            ReceiverGone: the other side has closed.
            PicklingError: the item cannot be sent.
        """
        plain = plain_copy(item)
        try:
            packed = None if plain is not None else self._serializer.pack(item)
        except Exception as error:  # pickling runs user code
            raise pickle.PicklingError(
                f"{self._producer} made {describe(item, self._serializer.pack)}, which cannot be sent to another "
                f"process ({type(error).__name__}: {text_of(error)}). Convert it to plain data, such as bytes, arrays "
                "or tensors, before it leaves the worker."
            ) from error
        with self._lock:
            bundle = self._bundle
            while not (bundle.add_plain(plain) if packed is None else bundle.add(packed)):
                self._flush()
            if self.pack_records is not None:
                self._records.append(record)
            if (
                bundle.count >= self._together
                or time.perf_counter() - self._ready > TOGETHER_S
                or bundle.is_full
                or not self._sent
            ):
                self._flush()
                return True
            if not self._is_ticking:
                self._is_ticking = True
                self.has_waiting.set()
                if not self._ticker.is_alive():
                    self._ticker.start()
            return False

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send the waiting items, and then a message without items.

        Raises:
            ReceiverGone: the other side has closed.
        """
        with self._lock:
            self._flush()
            self._send_body(kind, payload)

    def send_record(self, record: object) -> None:
        """Send the waiting items, and then, if ``pack_records`` is set, a record that replaces that of the last item.

        Raises:
            ReceiverGone: the other side has closed.
        """
        with self._lock:
            self._flush()
            if self.pack_records is not None:  # after the flush, so that records arrive in the order of packing
                self._send_body(Kind.STATE, self.pack_records([record]))

    def flush(self) -> None:
        """Send the waiting items.

        Raises:
            ReceiverGone: the other side has closed.
        """
        with self._lock:
            self._flush()

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

    def pack_error(self) -> bytes:
        """Return the current exception for `send`, with the last shard that this process opened."""
        shard = f", whose last shard was {self.counters.shard}" if self.counters.shard else ""
        return serialize(SendableError(f"in {self._name}{shard}"))

    def pack_counters(self) -> bytes:
        """Return the counts of skipped items for `send`."""
        return serialize(self.counters.skipped())

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

    def _flush(self) -> None:
        """Send the waiting items."""
        if not self._bundle.count:
            return
        self._items += self._bundle.count
        self._count_making()
        records = b""
        if self.pack_records is not None:
            records = self.pack_records(self._records)
            if len(records) > INLINE:
                self._send_body(Kind.STATE, records, number=len(self._records))
                records = b""
            self._records = []
        self._sent_bytes += self._send_bundle(self._bundle, Kind.ITEMS, self._bundle.count, records)
        self._sent += 1
        # A pickler keeps the memory that large items needed. The other thread may still be packing with the old one.
        self._serializer = Serializer()
        self._ready = time.perf_counter()

    def _count_making(self) -> float:
        """Count the time since the last message or wait as spent producing items; return the current time."""
        now = time.perf_counter()
        self._making_s += now - self._ready
        self._ready = now
        return now

    def _count_waiting(self, begin: float) -> None:
        """Count the time since ``begin`` as spent waiting."""
        self._ready = time.perf_counter()
        self._waiting_s += self._ready - begin

    def _send_body(self, kind: Kind, body: bytes, number: int = 0) -> None:
        """Send a message without items."""
        bundle = Bundle(self.pool)
        if body:
            bundle.add(([body], len(body), []))
        self._send_bundle(bundle, kind, number)

    def _send_bundle(self, bundle: Bundle, kind: Kind, number: int, records: bytes = b"") -> int:
        """Send the contents of a bundle, and return their size."""
        header, body, descriptor = bundle.finish(kind, self.epoch, number, len(records))
        self._bytes += header.size
        self._send(header, (records, *body), descriptor)
        return header.size

    def _send(self, header: Header, body: Sequence[bytes] = (), descriptor: int | None = None) -> None:
        self._publish()  # includes items that have arrived
        begin = time.perf_counter()
        message = b"".join((HEADER.pack(*header), *body))
        try:
            if descriptor is None:
                self._channel.send(message)
            else:
                socket.send_fds(self._channel, [message], [descriptor])
        except ConnectionError as error:
            raise ReceiverGone from error
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._waiting_s += time.perf_counter() - begin

    def _publish(self) -> None:
        work = Work(self._items, self._bytes, self._making_s, self._waiting_s)
        self.page.write(work, self.counters.figures())

    def _publish_retry(self) -> None:
        with self._lock:  # a prefetching thread may call this
            self._publish()

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
