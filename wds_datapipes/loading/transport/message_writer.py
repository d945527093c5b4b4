"""Collects the items of a pipeline into messages, with the position after each, for any kind of connection."""

from __future__ import annotations

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.errors import text_of
from wds_datapipes.loading.transport.bundle import Bundle, Memory
from wds_datapipes.loading.transport.flow_control import AHEAD_BYTES, MIN_MESSAGES
from wds_datapipes.loading.transport.protocol import INLINE, Header, Kind
from wds_datapipes.loading.transport.serialization import SendableError, Serializer, describe, plain_copy, serialize
from wds_datapipes.loading.transport.status_page import Work


class MessageWriter(ABC):
    """Collects items into messages, as far ahead of the loop as its credit allows.

    One thread calls the methods; a second one may flush.

    Args:
        pool: the memory for the large arrays of a message.
        window: the maximum number of messages in transit or waiting to be used; if small items share messages, there
            can be one more.
        together: the maximum number of items in a message.
        together_s: how long after the previous message small items still join a message, in seconds.
        name: the name of this process, for errors.

    Attributes:
        counters: the counters of the pipeline that produces the items.
        epoch: the epoch that is being sent.
        requests: the requested epochs that have not begun, with the data that they need to begin.
        pack_records: returns the records of some items as bytes; None if items have none.
    """

    def __init__(self, pool: Memory, *, window: int, together: int, together_s: float, name: str) -> None:
        self._name = name
        self._window = window
        self._together = together
        self._together_s = together_s
        self.pool = pool
        self._bundle = Bundle(pool)
        self._serializer = Serializer()
        self._lock = threading.Lock()
        self._items = self._bytes = 0
        self._making_s = self._waiting_s = 0.0
        self.requests: deque[tuple[int, Any]] = deque()
        self._producer = "The pipeline"
        self.pack_records: Callable[[Sequence[Any]], bytes] | None = None
        self.counters = Counters()

    def name_producer(self, producer: str) -> None:
        """Set the name of the stage that produces the items, for messages."""
        self._producer = producer

    @property
    def is_full(self) -> bool:
        """Whether the other side accepts no further items for now."""
        ahead = self._sent - self._taken
        return ahead >= self._window or (self._sent_bytes - self._taken_bytes >= AHEAD_BYTES and ahead >= MIN_MESSAGES)

    @property
    def has_items(self) -> bool:
        """Whether items wait to be sent."""
        return self._bundle.count > 0

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
                or time.perf_counter() - self._ready > self._together_s
                or bundle.is_full
                or not self._sent
            ):
                self._flush()
                return True
            self._flush_later()
            return False

    @abstractmethod
    def receive_requests(self) -> None:
        """Receive the requests that have arrived.

        Raises:
            ReceiverGone: the other side has closed.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until the other side sends something; then send the items that have been waiting for it.

        Raises:
            ReceiverGone: the other side has closed.
        """

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

    def pack_error(self) -> bytes:
        """Return the current exception for `send`, with the last shard that this process opened."""
        return serialize(SendableError(self._where()))

    def pack_counters(self) -> bytes:
        """Return the counts of skipped items for `send`."""
        return serialize(self.counters.skipped())

    def _where(self) -> str:
        return f"in {self._name}" + (f", whose last shard was {self.counters.shard}" if self.counters.shard else "")

    @abstractmethod
    def _flush_later(self) -> None:
        """Ensure that the waiting items do not wait for the next one, which may take long, if that is possible."""

    @abstractmethod
    def _send(self, header: Header, body: Sequence[bytes] = (), attached: Any = None) -> None:
        """Send a message.

        Args:
            header: its header.
            body: the parts that follow it.
            attached: what the other side needs to read its segment, if any.
        """

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
        header, body, attached = bundle.finish(kind, self.epoch, number, len(records))
        self._bytes += header.size
        self._send(header, (records, *body), attached)
        return header.size

    def _work(self) -> Work:
        """Return what this process has done."""
        return Work(self._items, self._bytes, self._making_s, self._waiting_s)
