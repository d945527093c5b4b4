"""The main process's connection to one worker, which sends commands and receives items."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from wds_datapipes.counters import Skipped
from wds_datapipes.errors import WorkerDiedError, WorkerTimeoutError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.report import WorkerReport, wait_bucket
from wds_datapipes.loading.snapshots import LoopPosition
from wds_datapipes.loading.transport.protocol import Header, Kind
from wds_datapipes.loading.transport.receiver import ReceivedMessage, Receiver
from wds_datapipes.loading.transport.status_page import Work
from wds_datapipes.loading.workers.exit_message import describe_exit
from wds_datapipes.loading.workers.shutdown import is_running
from wds_datapipes.system import POLLIN, POLLOUT, new_poll

#: The maximum duration of one wait, in seconds. The socket or the exit of a process normally ends it earlier; the limit
#: covers a process whose exit is invisible because a grandchild holds its pipes open.
PULSE_S = 1.0

#: The position at the beginning of an epoch.
BEGINNING = WorkerState()


T = TypeVar("T")

#: Returned to a reader whose items are no longer needed.
ABANDONED = ReceivedMessage(Header(Kind.END), b"")


class WorkerConnection:
    """Receives items from one process, and raises its errors.

    Threads may share it: one receives items while another begins an epoch or closes the connection.

    Args:
        name: the name of the process, for messages.
        receiver: the receiving end of its items.
        timeout_s: the maximum time to wait without a message from it, in seconds; ``None`` means no limit.

    Attributes:
        epoch: the current epoch.
        waited_s: the time spent waiting for it, in seconds.
        skipped: the items it has skipped.
        position: the items of this epoch that the loop has received, and the state after them.
        split_lists: the lists that the process has split, available after its epoch: the digest of a `ShardOrder` for
            each, or ``None``.
        dispatcher: the connection to the dispatching process, whose items the process reads, if there is one.
    """

    def __init__(self, name: str, receiver: Receiver, timeout_s: float | None = None) -> None:
        self.name = name
        self.epoch = 0
        self.waited_s = 0.0
        self.skipped = Skipped()
        self.position = LoopPosition()
        self.split_lists: list[Any] = []
        self._receiver = receiver
        self._timeout_s = timeout_s
        self._unhandled: deque[ReceivedMessage] = deque()
        self._backlog: deque[ReceivedMessage] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._reader = threading.current_thread()
        self._pid = 0
        self._waits = Counter[str]()
        self._waiting_since: float | None = None
        self._watched: list[tuple[WorkerConnection, BaseProcess]] = []
        self.dispatcher: WorkerConnection | None = None
        self._checks_processes = False

    def watch(self, connection: WorkerConnection, process: BaseProcess) -> None:
        """From now on, raise an error if a process ends. The first process to watch is the sender; others may follow.

        Args:
            connection: the connection to the process, which stores the name of its last shard.
            process: the process.
        """
        self._pid = self._pid or process.pid or 0
        self._watched.append((connection, process))

    def begin(self, epoch: int, payload: object, base: WorkerState = BEGINNING) -> None:
        """Begin an epoch in the process; messages in transit belong to the previous one.

        If the process has not received commands for a long time, this waits until there is room, and receives messages
        meanwhile, because a process that is blocked in a send does not receive either.

        Args:
            epoch: its number.
            payload: the data that the process needs to begin it.
            base: the position at which its pipeline begins.

        Raises:
            WorkerDiedError: as in `items`, if this must wait. So are other errors of the process itself, but not those
                of its items.
        """
        self.expect(epoch, base)
        with self._lock:
            messages = deque(self._receiver.pack_request(payload))

        def send() -> bool:
            while messages and self._receiver.send_command(messages[0]):
                messages.popleft()
            if messages:
                self._receive()
            return not messages

        self._await(send, POLLIN | POLLOUT)

    def expect(self, epoch: int, base: WorkerState = BEGINNING) -> None:
        """Expect the items of an epoch that this or another process begins."""
        with self._lock:
            self.epoch = epoch
            self._reader = threading.current_thread()
            self.position.begin(base)
            self.split_lists = []
            self._receiver.begin(epoch)
            while self._backlog and self._backlog[0].header.epoch < epoch:
                self._receiver.drop(self._backlog.popleft())

    def items(self) -> Iterator[Any]:
        """Return an iterator over the items of the current epoch. It ends early when another epoch begins.

        Raises:
            WorkerDiedError: the process has ended.
            WorkerTimeoutError: it has sent nothing for too long.
            RuntimeError: the connection was closed meanwhile, or the interpreter is waiting for this thread to end.
            Exception: an exception raised in the process.
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
                self._receiver.body(message).reraise()
            yield from self._receiver.items(message)
        if message.header.size:
            self.split_lists = self._receiver.body(message)

    def await_state(self) -> None:
        """Wait until the process has reported the position at which its epoch begins, or has started without one.

        Raises:
            WorkerDiedError: as in `items`. So are other errors of the process itself, but not those of its items.
        """
        self._await(lambda: self.position.has_snapshots or bool(self._backlog) or self._keep_next())

    def drain(self) -> None:
        """Handle the messages that have arrived, so that a process that is blocked in a send continues.

        Raises:
            WorkerDiedError: the process has closed its end of the connection.
        """
        with self._lock:
            while not self._closed and self._keep_next():
                pass

    def report(self) -> WorkerReport:
        """Return statistics of the process so far."""
        self._read_status()
        page, received = self._receiver.page, self.position.earlier + self.position.delivered
        work, figures = (Work(), Counter[str]()) if page is None else page.read()
        waited_s, waits = self.waited_s, Counter(self._waits)
        if (since := self._waiting_since) is not None:
            waited_s += time.monotonic() - since
            waits[wait_bucket(time.monotonic() - since)] += 1
        return WorkerReport(
            name=self.name,
            pid=self._pid,
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
    def shard(self) -> str:
        """The last shard that the process opened, or ""."""
        return self._receiver.page.text if self._receiver.page is not None else ""

    def close(self) -> None:
        """Close the descriptor."""
        self._receiver.close()
        self._watched = []

    def cut(self) -> None:
        """Shut down the connection, which ends the process and wakes any thread that waits for it."""
        self._closed = True
        self._receiver.cut()

    def _await(self, find: Callable[[], T | None], events: int = POLLIN) -> T:
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
                self._checks_processes = has_event
                if found := find():
                    return found
                self._receiver.credit()
            has_event = self._wait(begin, events)

    def _keep_next(self) -> bool:
        """Keep the next message of the epoch for the reader of its items; return whether there was a message."""
        message = self._receive()
        if message is not None:
            self._backlog.append(message)
        return message is not None

    def _receive(self) -> ReceivedMessage | None:
        """Return the next message of the epoch, if any; handle those that do not concern the reader of its items."""
        while (message := self._unhandled.popleft() if self._unhandled else self._receive_any()) is not None:
            kind, epoch, number = message.header[:3]
            if kind == Kind.ERROR and not epoch:  # at the start of the process
                self._receiver.body(message).reraise()
            elif kind == Kind.COUNTERS:
                self.skipped = self._receiver.body(message)
            elif epoch < self.epoch:
                self._receiver.drop(message)
            elif kind == Kind.STATE:
                self.position.add(self._receiver.data(message), number)
            else:
                if message.records:
                    self.position.add(message.records, number)
                return message
        return None

    def _receive_any(self) -> ReceivedMessage | None:
        try:
            message = self._receiver.receive()
            if message is None and self._checks_processes and (ended := self._find_ended()) is not None:
                # By now, everything that it sent before it ended has arrived.
                message = self._receiver.receive()
                if message is None:
                    raise WorkerDiedError(_exit_message(*ended))
        except EOFError:
            for _, process in self._watched[:1]:
                process.join(PULSE_S)
            ended = self._find_ended()
            if ended is None:
                raise WorkerDiedError(f"{self.name} has closed its end of the connection.{self._context()}") from None
            raise WorkerDiedError(_exit_message(*ended)) from None
        except (OSError, ValueError):
            if self._closed:  # closed by another thread at this moment
                raise RuntimeError(self._closed_message()) from None
            raise
        return message

    def _wait(self, begin: float, events: int = POLLIN) -> bool:
        """Wait for an event or the end of a process; return whether anything but a message may have happened.

        Raises:
            WorkerTimeoutError: the wait that started at ``begin`` has lasted too long.
        """
        limit_s, self._waiting_since = PULSE_S, begin
        if self._timeout_s is not None:
            limit_s = min(begin + self._timeout_s - time.monotonic(), PULSE_S)
            if limit_s <= 0:
                raise WorkerTimeoutError(self._timeout_message())
        own = self._receiver.fileno()
        poll = new_poll()  # a new one, because two threads may wait here: one of them in an epoch that is over
        with suppress(ValueError):  # closed by another thread at this moment
            poll.register(own, events)
            for _, process in self._watched:
                poll.register(process.sentinel, POLLIN)
        return bool(poll.poll(1e3 * limit_s) != [(own, POLLIN)])

    def _find_ended(self) -> tuple[WorkerConnection, BaseProcess] | None:
        """Return the first process that has ended."""
        return next((each for each in self._watched if not is_running(each[1])), None)

    def _has_program_ended(self) -> bool:
        """Whether the program has ended while this thread fetches items for another, as torchdata's FullSync does.

        The interpreter waits for executor threads before it ends the processes that these threads may wait for.
        """
        if not executors._shutdown:
            return False
        thread = threading.current_thread()
        return thread in executors._threads_queues and thread is not self._reader

    def _read_status(self) -> None:
        """Receive the status page of the process, if nothing was received yet."""
        # If another thread is receiving on the connection, the page is already known.
        if self._receiver.page is None and self._lock.acquire(blocking=False):
            try:
                with suppress(OSError, EOFError):
                    message = self._receiver.receive()
                    if message is not None:
                        self._unhandled.append(message)
            finally:
                self._lock.release()

    def _closed_message(self) -> str:
        return f"The connection to {self.name} was shut down during a read."

    def _timeout_message(self) -> str:
        return (
            f"{self.name} (pid {self._pid}) has sent nothing for timeout_s={self._timeout_s:g} s.{self._context()} It "
            "may be waiting for a disk or a store that does not respond; `py-spy dump --pid` shows where."
        )

    def _context(self) -> str:
        if self.shard:
            return f" The last shard that it opened is {self.shard}."
        if self.dispatcher is None:
            return " It has opened no shard yet."
        self.dispatcher._read_status()
        return f" It reads the items of the dispatching process.{self.dispatcher._context()}"


def _exit_message(connection: WorkerConnection, process: BaseProcess) -> str:
    """Describe how a process ended and which shard it had open."""
    connection._read_status()
    return describe_exit(connection.name, process) + connection._context()


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
