"""The main process's connection to one worker: commands out, items in."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import thread as executors
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from wds_datapipes.counters import Skipped
from wds_datapipes.errors import WorkerDiedError, WorkerTimeoutError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.checkpoint.item_positions import ItemPositions
from wds_datapipes.loading.report import WorkerReport
from wds_datapipes.loading.torchdata_patches.worker_processes import SendableError
from wds_datapipes.loading.transport.protocol import Command, Kind
from wds_datapipes.loading.transport.receiver import Message, Receiver
from wds_datapipes.loading.workers.exit_message import obituary
from wds_datapipes.loading.workers.prefetch_thread import given_up
from wds_datapipes.loading.workers.shutdown import is_running

__all__ = ["WorkerConnection"]

#: How long one wait may last, in seconds. The socket and the end of a process break it off; the limit is for a process
#: whose end shows nowhere, because a grandchild holds its pipes open.
PULSE_S = 1.0

#: Where an epoch begins.
BEGINNING = WorkerState(None)


class WorkerConnection:
    """Takes items from one process, and raises what goes wrong there.

    Threads may share it: one takes items while another begins an epoch or closes.

    Args:
        name: what messages call the process.
        inlet: where its items arrive.
        timeout_s: how long it may send nothing while it is waited for, in seconds; None is without limit.

    Attributes:
        epoch: the epoch that is wanted.
        waited_s: how long it was waited for, in seconds.
        skipped: what it has passed over.
        feeder: the link to the process whose items this one takes, if there is one.
        trail: where its pipeline was behind the items of this epoch.
    """

    def __init__(self, name: str, inlet: Receiver, timeout_s: float | None = None) -> None:
        self.name = name
        self.epoch = 0
        self.waited_s = 0.0
        self.skipped = Skipped()
        self.feeder: WorkerConnection | None = None
        self.trail = ItemPositions()
        self._inlet = inlet
        self._timeout_s = timeout_s
        self._backlog: deque[Message] = deque()
        #: What the process has split, once its epoch is over: for each list what a `Listing` has seen, or None.
        self.listed: list[Any] = []
        self._turn = threading.Lock()
        self._asked = self._answered = 0
        self._refusal: SendableError | None = None
        self._closed = False
        self._reader = threading.current_thread()
        self._pid = 0
        self._watched: list[tuple[WorkerConnection, BaseProcess]] = []

    def watch(self, link: WorkerConnection, process: BaseProcess) -> None:
        """Raise from now on when a process has ended: the one that sends, first, or one that it cannot do without.

        Args:
            link: the one to the process, which knows what it was at.
            process: the process.
        """
        self._pid = self._pid or process.pid or 0
        self._watched.append((link, process))

    def begin(self, epoch: int, payload: object, base: WorkerState = BEGINNING) -> None:
        """Have the process begin an epoch; what is still on its way belongs to the one before.

        Args:
            epoch: its number.
            payload: what the process needs to begin it.
            base: where its pipeline begins.

        Raises:
            WorkerDiedError: as `items`, if the process was told to begin so many epochs, and began none of them, that
                this has to wait for it; the same holds for other errors of the process, and not of its items.
        """
        with self._turn:
            self.epoch = epoch
            self._reader = threading.current_thread()
            self.trail.begin(base)
            self.listed = []
            self._inlet.begin(epoch)
            order = self._inlet.order(Command.RESET, payload)
        self._send(order)

    def expect(self, epoch: int) -> None:
        """Wait for the items of an epoch that somebody else has told the process to begin."""
        self.epoch = epoch
        self._inlet.begin(epoch)

    def items(self) -> Iterator[Any]:
        """Return an iterator over the items of the present epoch. It ends early when another one begins.

        Raises:
            WorkerDiedError: the process has ended.
            WorkerTimeoutError: it has sent nothing for too long.
            RuntimeError: the connection was closed meanwhile, or the interpreter waits for this thread to end.
            Exception: what was raised in the process.
        """
        return self._items(self.epoch)

    def _items(self, epoch: int) -> Iterator[Any]:
        while (message := self._next(epoch)) is not None:
            if message.header.kind == Kind.END:
                self.listed = self._inlet.body(message) if message.header.size else []
                return
            if message.header.arrays:
                yield self._inlet.item(message)
            else:
                yield from self._inlet.items(message)

    def tell(self, command: Command, payload: object) -> None:
        """Tell the process what to do. It answers once it has, which `await_answer` waits for."""
        with self._turn:
            order = self._inlet.order(command, payload)
            self._asked += 1
        self._send(order)

    def await_answer(self) -> SendableError | None:
        """Wait until the process has done what it was told; what it sends before that is kept.

        Another thread may go on to take items: not every stage of the main process that is paused waits for its own.

        Returns:
            What was raised in the process when it did it, after the last item of its epoch. What is raised earlier
            comes instead of the next item.

        Raises:
            WorkerDiedError: as `items`; so are the others that tell of the process, and not of its items.
        """
        begin = time.monotonic()
        woken = False
        while True:
            with self._turn:
                self._check()
                while self._answered < self._asked and (message := self._receive(look_around=woken)) is not None:
                    if _says_that_it_cannot_begin(message):
                        self._inlet.body(message).reraise()
                    if not self._note(message):
                        self._backlog.append(message)
                if self._answered >= self._asked:
                    refusal, self._refusal = self._refusal, None
                    return refusal
                self._inlet.credit()
            woken = self._wait(begin)

    def await_state(self) -> None:
        """Wait until the process has told where its epoch begins, which it does before all else; or goes on without.

        Raises:
            WorkerDiedError: as `items`; so are the others that tell of the process, and not of its items.
        """
        begin = time.monotonic()
        woken = False
        while True:
            with self._turn:
                self._check()
                message = None if self.trail.is_begun else self._sift(self.epoch, look_around=woken)
                if message is not None:
                    self._backlog.appendleft(message)
                if self.trail.is_begun or message is not None:
                    return
                self._inlet.credit()
            woken = self._wait(begin)

    def drain(self) -> None:
        """Take note of what a process says that sends its items to somebody else."""
        with self._turn, suppress(WorkerDiedError):  # whoever waits for its items raises that
            while not self._closed and (message := self._sift(self.epoch, look_around=False)) is not None:
                self._inlet.drop(message)

    def report(self) -> WorkerReport:
        """Return what the process has done so far."""
        self._look()
        page = self._inlet.page
        items, size, making_s, waiting_s = (0, 0, 0.0, 0.0) if page is None else page.read()
        fetched_bytes, fetching_s = (0, 0.0) if page is None else page.fetched()
        return WorkerReport(
            *(self.name, self._pid, items, size, making_s, waiting_s, self.waited_s, self.shard, self.skipped),
            fetched_bytes=fetched_bytes,
            fetching_s=fetching_s,
        )

    @property
    def shard(self) -> str:
        """The shard that the process opened last, or ""."""
        return self._inlet.page.text if self._inlet.page is not None else ""

    def close(self) -> None:
        """Give back the descriptor."""
        self._inlet.close()
        self._watched = []

    def cut(self) -> None:
        """Cut the connection, which ends the process, and wakes a thread that waits for it."""
        self._closed = True
        self._inlet.cut()

    def _send(self, order: bytes) -> None:
        """Send an order, and wait for room if the process has not listened for a long time.

        Meanwhile, messages are received: a process that waits until it can send does not listen either.
        """
        begin = time.monotonic()
        woken = False
        while True:
            with self._turn:
                if self._inlet.tell(order):
                    return
                self._check()
                while (message := self._receive(look_around=woken)) is not None:
                    if _says_that_it_cannot_begin(message):
                        self._inlet.body(message).reraise()
                    elif self._note(message):
                        continue
                    elif message.header.epoch < self.epoch:
                        self._inlet.drop(message)
                    else:
                        self._backlog.append(message)
            woken = self._wait(begin, select.POLLIN | select.POLLOUT)

    def _next(self, epoch: int) -> Message | None:
        """Return the next message of an epoch, or None if that is no longer the one that is wanted."""
        begin = time.monotonic()
        woken = False
        while True:
            with self._turn:
                self._check()
                if epoch != self.epoch or given_up():
                    return None
                message = self._sift(epoch, look_around=woken)
                if message is not None:
                    if message.header.epoch != epoch:
                        return None
                    if message.header.kind == Kind.ERROR:
                        self._inlet.body(message).reraise()
                    return message
                self._inlet.credit()
            woken = self._wait(begin)

    def _sift(self, epoch: int, look_around: bool) -> Message | None:
        """Return the next message that is an epoch's, or of a later one, if there is one; deal with all others."""
        while (message := self._backlog.popleft() if self._backlog else self._receive(look_around)) is not None:
            if _says_that_it_cannot_begin(message):
                self._inlet.body(message).reraise()
            elif self._note(message):
                continue
            elif message.header.epoch < epoch:
                self._inlet.drop(message)
            elif message.header.kind == Kind.STATE and message.header.epoch == epoch:
                self.trail.add(self._inlet.data(message), message.header.number)
            else:
                if message.header.epoch > epoch:
                    self._backlog.appendleft(message)
                elif message.records:
                    self.trail.add(message.records, message.header.number)
                    return message._replace(records=b"")
                return message
        return None

    def _note(self, message: Message) -> bool:
        """Take note of a message that belongs to no place among the items; return whether it is one."""
        if message.header.kind == Kind.COUNTERS:
            self.skipped = self._inlet.body(message)
        elif message.header.kind == Kind.DONE:
            self._answered += 1
            if message.header.size:
                self._refusal = self._inlet.body(message)
        else:
            return False
        return True

    def _check(self) -> None:
        """Raise if there is nothing to wait for any more."""
        if self._closed:
            raise RuntimeError(self._farewell())
        if self._is_pointless():
            raise RuntimeError(f"The program has ended while {self.name} was waited for.")

    def _receive(self, look_around: bool) -> Message | None:
        try:
            message = self._inlet.receive()
            if message is None and look_around and (dead := self._dead()) is not None:
                # What it sent before it ended is there by now.
                message = self._inlet.receive()
                if message is None:
                    raise WorkerDiedError(_obituary(*dead))
        except EOFError:
            for _, process in self._watched[:1]:
                process.join(PULSE_S)
            dead = self._dead()
            if dead is None:
                raise WorkerDiedError(f"{self.name} has closed its end of the connection.{self._context()}") from None
            raise WorkerDiedError(_obituary(*dead)) from None
        except (OSError, ValueError):
            if self._closed:  # by another thread, in this very moment
                raise RuntimeError(self._farewell()) from None
            raise
        return message

    def _wait(self, begin: float, events: int = select.POLLIN) -> bool:
        """Wait until something happens, on the connection one of the events; return whether it is more than a message.

        Raises:
            WorkerTimeoutError: it has waited since ``begin`` for too long.
        """
        now = time.monotonic()
        limit_s = PULSE_S
        if self._timeout_s is not None:
            limit_s = min(begin + self._timeout_s - now, PULSE_S)
            if limit_s <= 0:
                raise WorkerTimeoutError(self._complaint())
        own = self._inlet.fileno()
        poll = select.poll()  # a new one, since two threads may come here: one whose epoch is over, and another
        with suppress(ValueError):  # closed by another thread, in this very moment
            poll.register(own, events)
            for _, process in self._watched:
                poll.register(process.sentinel, select.POLLIN)
        happened = poll.poll(1e3 * limit_s)
        self.waited_s += time.monotonic() - now
        return happened != [(own, select.POLLIN)]

    def _dead(self) -> tuple[WorkerConnection, BaseProcess] | None:
        """Return the first process that has ended."""
        return next((each for each in self._watched if not is_running(each[1])), None)

    def _is_pointless(self) -> bool:
        """Whether the program has ended, and this thread fetches items for another one, as torchdata's FullSync does.

        The interpreter waits for the threads of executors before it ends the processes that they may wait for.
        """
        thread = threading.current_thread()
        return executors._shutdown and thread in executors._threads_queues and thread is not self._reader

    def _look(self) -> None:
        """See what the process was at, if it said so and nothing was received yet."""
        # The link may be the one that is being read, and then that is known.
        if self._inlet.page is None and self._turn.acquire(blocking=False):
            try:
                with suppress(OSError, EOFError):
                    message = self._inlet.receive()
                    if message is not None and not self._note(message):
                        self._backlog.append(message)
            finally:
                self._turn.release()

    def _farewell(self) -> str:
        return f"The connection to {self.name} was shut down while it was read."

    def _complaint(self) -> str:
        return (
            f"{self._name_and_pid()} has sent nothing for timeout_s={self._timeout_s:g} s.{self._context()} It may "
            "wait for a disk or a store that does not answer; `py-spy dump --pid` shows where it is."
        )

    def _context(self) -> str:
        opened = f" The shard that it opened last is {self.shard}." if self.shard else " It has opened no shard yet."
        if self.feeder is None:
            return opened
        self.feeder._look()
        shard = f"which opened {self.feeder.shard} last" if self.feeder.shard else "which has opened no shard yet"
        feeder = self.feeder._name_and_pid()
        return f"{opened if self.shard else ''} It takes the items of {feeder[0].lower()}{feeder[1:]}, {shard}."

    def _name_and_pid(self) -> str:
        return f"{self.name} (pid {self._pid})" if self._pid else self.name


def _says_that_it_cannot_begin(message: Message) -> bool:
    return message.header.kind == Kind.ERROR and not message.header.epoch


def _obituary(link: WorkerConnection, process: BaseProcess) -> str:
    """Say how a process ended, and what it was at."""
    link._look()
    return obituary(link.name, process) + link._context()
