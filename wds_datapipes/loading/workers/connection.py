"""The main process's connection to one worker, wherever that runs: it begins epochs and receives items."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from typing import Any, TypeVar

from wds_datapipes.counters import Skipped
from wds_datapipes.errors import WorkerTimeoutError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.report import WorkerReport, wait_bucket
from wds_datapipes.loading.snapshots import LoopPosition
from wds_datapipes.loading.transport.message_reader import MessageReader, ReceivedMessage
from wds_datapipes.loading.transport.protocol import Header, Kind
from wds_datapipes.loading.transport.status_page import Work

#: The maximum duration of one wait, in seconds. A message or the end of the worker normally ends it earlier; the limit
#: covers a worker whose end is invisible, for example because a grandchild holds its pipes open.
PULSE_S = 1.0

T = TypeVar("T")

#: Returned to a reader whose items are no longer needed.
ABANDONED = ReceivedMessage(Header(Kind.END), b"")


class WorkerConnection(ABC):
    """Receives items from one worker, and raises its errors.

    Threads may share it: one receives items while another begins an epoch or closes the connection.

    Args:
        name: the name of the worker, for messages.
        reader: rebuilds the items in its messages.
        timeout_s: the maximum time to wait without a message from it, in seconds; ``None`` means no limit.

    Attributes:
        epoch: the current epoch.
        waited_s: the time spent waiting for it, in seconds.
        skipped: the items it has skipped.
        position: the items of this epoch that the loop has received, and the state after them.
        split_lists: the lists that the worker has split, available after its epoch: the digest of a `ShardOrder` for
            each, or ``None``.
    """

    def __init__(self, name: str, reader: MessageReader, timeout_s: float | None = None) -> None:
        self.name = name
        self.epoch = 0
        self.waited_s = 0.0
        self.skipped = Skipped()
        self.position = LoopPosition()
        self.split_lists: list[Any] = []
        self._reader = reader
        self._timeout_s = timeout_s
        self._backlog: deque[ReceivedMessage] = deque()
        self._lock = threading.Lock()
        self._closed = self._has_event = False
        self._thread = threading.current_thread()
        self._waits = Counter[str]()
        self._waiting_since: float | None = None
        self._started = 0.0  # when the worker was started, unless before all waits

    @abstractmethod
    def begin(self, epoch: int, payload: object, base: WorkerState | str | None = None) -> None:
        """Begin an epoch in the worker; messages in transit belong to the previous one.

        Args:
            epoch: its number.
            payload: the data that the worker needs to begin it.
            base: the position at which its pipeline begins, by default that of an epoch, or why it is unknown.

        Raises:
            WorkerDiedError: as in `items`, if this must wait. So are other errors of the worker itself, but not those
                of its items.
        """

    def expect(self, epoch: int, base: WorkerState | str | None = None) -> None:
        """Expect the items of an epoch that this or another process begins."""
        with self._lock:
            self.epoch = epoch
            self._thread = threading.current_thread()
            self.position.begin(WorkerState() if base is None else base)
            self.split_lists = []
            self._begin(epoch)
            while self._backlog and self._backlog[0].header.epoch < epoch:
                self._reader.drop(self._backlog.popleft())

    def items(self) -> Iterator[Any]:
        """Return an iterator over the items of the current epoch. It ends early when another epoch begins.

        Raises:
            WorkerDiedError: the worker has ended.
            WorkerTimeoutError: it has sent nothing for too long.
            RuntimeError: the connection was closed meanwhile, or the interpreter is waiting for this thread to end.
            Exception: an exception raised in the worker.
        """
        return self._items(self.epoch)

    def _items(self, epoch: int) -> Iterator[Any]:
        def take() -> ReceivedMessage | None:
            if epoch != self.epoch or is_abandoned():
                return ABANDONED
            message = self._backlog.popleft() if self._backlog else self._receive()
            if message is not None and message.header.epoch > epoch:  # another process has begun the next epoch
                self._backlog.appendleft(message)
                return ABANDONED
            return message

        while (message := self._await(take)).header.kind != Kind.END:
            if message.header.kind == Kind.ERROR:
                self._reader.body(message).reraise()
            yield from self._reader.items(message)
        if message.header.size:
            self.split_lists = self._reader.body(message)

    def await_state(self) -> None:
        """Wait until the worker has reported the position at which its epoch begins, unless the connection was closed.

        Raises:
            WorkerDiedError: as in `items`. So are other errors of the worker itself, but not those of its items.
        """
        if not self._closed:
            self._await(lambda: self.position.has_snapshots or bool(self._backlog) or self._keep_next())

    def drain(self) -> None:
        """Handle the messages that have arrived, so that a worker that is blocked in a send continues.

        Raises:
            WorkerDiedError: the worker has ended.
        """
        with self._lock:
            while not self._closed and self._keep_next():
                pass

    def report(self) -> WorkerReport:
        """Return statistics of the worker so far."""
        pid, work, figures = self._status()
        received = self.position.earlier + self.position.delivered
        waited_s, waits = self.waited_s, Counter(self._waits)
        if (since := self._waiting_since) is not None:
            waited_s += time.monotonic() - since
            waits[wait_bucket(time.monotonic() - since)] += 1
        return WorkerReport(
            name=self.name,
            pid=pid,
            items=int(work.items),
            bytes=int(work.bytes),
            making_s=work.making_s,
            waiting_s=work.waiting_s,
            waited_s=waited_s,
            shard=self.shard,
            skipped=self.skipped,
            received=received,
            ahead=int(work.items) - received,
            figures=figures,
            waits=waits,
        )

    @property
    @abstractmethod
    def shard(self) -> str:
        """The last shard that the worker opened, as far as it is known, or ""."""

    @abstractmethod
    def close(self) -> None:
        """Free what the connection holds."""

    @abstractmethod
    def cut(self) -> None:
        """Shut down the connection, which ends the worker and wakes any thread that waits for it."""

    @abstractmethod
    def _begin(self, epoch: int) -> None:
        """Forget the messages of earlier epochs."""

    @abstractmethod
    def _receive_any(self) -> ReceivedMessage | None:
        """Return the next message of any kind and epoch, if one has arrived.

        Raises:
            WorkerDiedError: the worker has ended.
        """

    @abstractmethod
    def _wait_s(self, limit_s: float, events: int) -> bool:
        """Wait for a message, or the end of the worker; return whether anything but a message may have happened."""

    @abstractmethod
    def _status(self) -> tuple[int, Work, Counter[str]]:
        """Return the ID of the worker's process, what it has done, and its figures."""

    @abstractmethod
    def _timeout_message(self) -> str:
        """Return the message about a worker that has sent nothing for ``timeout_s``."""

    def _await(self, find: Callable[[], T | None], events: int = 0) -> T:
        """Call a function whenever something has happened, and return its first true result."""
        begin = time.monotonic()
        try:
            return self._find(find, begin, events)
        finally:
            if self._waiting_since == begin:
                self._waiting_since, waited_s = None, time.monotonic() - begin
                self.waited_s += waited_s
                self._waits[wait_bucket(waited_s)] += 1

    def _find(self, find: Callable[[], T | None], begin: float, events: int) -> T:
        has_event = False
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError(self._closed_message())
                if self._has_program_ended():
                    raise RuntimeError(f"The program ended while waiting for {self.name}.")
                self._has_event = has_event
                if found := find():
                    return found
                self._reader.credit()
            has_event = self._wait(begin, events)

    def _keep_next(self) -> bool:
        """Keep the next message of the epoch for the reader of its items; return whether there was a message."""
        message = self._receive()
        if message is not None:
            self._backlog.append(message)
        return message is not None

    def _receive(self) -> ReceivedMessage | None:
        """Return the next message of the epoch, if any; handle those that do not concern the reader of its items."""
        while (message := self._receive_any()) is not None:
            kind, epoch, number = message.header[:3]
            if kind == Kind.ERROR and not epoch:  # at the start of the worker
                self._reader.body(message).reraise()
            elif kind == Kind.COUNTERS:
                self.skipped = self._reader.body(message)
            elif epoch < self.epoch:
                self._reader.drop(message)
            elif kind == Kind.STATE:
                self.position.add(self._reader.data(message), number)
            else:
                if message.records:
                    self.position.add(message.records, number)
                return message
        return None

    def _wait(self, begin: float, events: int) -> bool:
        """Wait for something to happen; return whether anything but a message may have happened.

        Raises:
            WorkerTimeoutError: the wait that started at ``begin`` has lasted too long.
        """
        limit_s, self._waiting_since = PULSE_S, begin
        if self._timeout_s is not None:
            limit_s = min(max(begin, self._started) + self._timeout_s - time.monotonic(), PULSE_S)
            if limit_s <= 0:
                raise WorkerTimeoutError(self._timeout_message())
        return self._wait_s(limit_s, events)

    def _has_program_ended(self) -> bool:
        """Whether the program has ended while this thread fetches items for another, as torchdata's FullSync does.

        The interpreter waits for executor threads before it ends the processes that these threads may wait for.
        """
        if not executors._shutdown:
            return False
        thread = threading.current_thread()
        return thread in executors._threads_queues and thread is not self._thread

    def _closed_message(self) -> str:
        return f"The connection to {self.name} was shut down during a read."


#: In a thread that fills a buffer, ``_filling.data`` is the state shared with the buffer's reader. The stages between
#: them, torchdata's and the user's, would not forward it.
_filling = threading.local()


class Reader:
    """The state that a producer thread shares with its reader.

    Attributes:
        stop_iteration: whether the reader has stopped; the name is torchdata's.
    """

    stop_iteration = False


def set_reader(reader: Any) -> None:
    """Set the reader that `is_abandoned` checks, in this thread."""
    _filling.data = reader


def is_abandoned() -> bool:
    """Whether the current thread fills a prefetch buffer that is no longer read."""
    data = getattr(_filling, "data", None)
    return data is not None and bool(data.stop_iteration)
