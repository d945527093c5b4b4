"""The pool of worker processes, which yields their items in turn."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing.process import BaseProcess
from socket import socket
from typing import Any

from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.report import LoadingReport, log_skipped
from wds_datapipes.loading.transport.protocol import Command, new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.loading.workers.dispatcher import run_dispatcher
from wds_datapipes.loading.workers.parent_watch import ParentWatch, run_watched
from wds_datapipes.loading.workers.shutdown import close_process, disown_process, end_processes
from wds_datapipes.loading.workers.worker import WorkerJob, run_worker
from wds_datapipes.pipes.stage import Stage

#: How long processes may take to exit on their own, in seconds. An item that is being made is discarded.
GRACE_S = 0.4


class WorkerPool:
    """Starts processes, takes one item from each worker in turn, and ends them.

    Args:
        jobs: the job of each worker.
        dispatching: the job of the dispatching process, or ``None`` if there is none.
        method: the start method of the processes, such as ``"fork"``.
        timeout_s: the maximum time to wait without a message from a worker, in seconds; ``None`` means no limit.

    Attributes:
        workers: the connection to each worker.
    """

    def __init__(
        self, jobs: Sequence[WorkerJob], dispatching: WorkerJob | None, method: str, timeout_s: float | None
    ) -> None:
        self.workers: list[WorkerConnection] = []
        self._dispatcher: WorkerConnection | None = None
        self._processes: list[BaseProcess] = []
        self._channels: list[socket] = []
        self._context: Any = multiprocessing.get_context(method)
        self._timeout_s = timeout_s
        self._owner_pid = os.getpid()
        self._closed = False
        #: The worker that yields the next item.
        self.turn = 0
        self.is_over = False
        self._begun = 0  # epochs
        #: Whether an epoch continues where the previous one ended.
        self.spans_epochs = False
        self._awaits_beginning = False
        #: The workers whose items were taken but not delivered yet, if a stage of the main process prefetches.
        self.ahead: deque[int] | None = None
        if multiprocessing.current_process().daemon:
            raise RuntimeError("A daemonic process, such as a worker, cannot start processes: use num_workers=0 in it.")
        self._parent_watch = ParentWatch()
        ends: list[socket] = []
        try:
            if dispatching is not None:
                pairs = [new_channel() for _ in jobs]
                nears, ends = [near for near, _ in pairs], [end for _, end in pairs]
                try:
                    self._dispatcher = self._start("The dispatching process", run_dispatcher, dispatching, nears, ends)
                finally:
                    for near in nears:
                        near.close()
            for number, job in enumerate(jobs):
                own = ends[number] if ends else None
                others = [end for end in ends if end is not own]
                self.workers.append(self._start(f"Worker {number}", run_worker, job, own, others))
            # If one process ends, the others lack data.
            processes = list(zip(self._connections(), self._processes, strict=True))
            for number, (connection, process) in enumerate(processes):
                connection.dispatcher = None if connection is self._dispatcher else self._dispatcher
                connection.watch(connection, process)
                for other in processes[:number] + processes[number + 1 :]:
                    connection.watch(*other)
        except BaseException:
            self.close()
            raise
        finally:
            for end in ends:
                end.close()

    @property
    def dispatches(self) -> bool:
        """Whether there is a dispatching process."""
        return self._dispatcher is not None

    def begin(
        self,
        epoch: int,
        payloads: Sequence[Any],
        dispatching: Any,
        *,
        resumed: Sequence[WorkerState] | None = None,
        turn: int = 0,
    ) -> None:
        """Begin an epoch.

        Args:
            epoch: its number, larger than that of any earlier epoch.
            payloads: the data that each worker needs to begin it.
            dispatching: the data that the dispatching process needs for it.
            resumed: the position from which each worker resumes, if not at the beginning.
            turn: the worker that yields the first item.
        """
        bases = [WorkerState(None) for _ in self.workers] if resumed is None else resumed
        self.turn = turn
        self.is_over = False
        self._awaits_beginning = self.spans_epochs and resumed is None and self._begun > 0
        self._begun += 1
        if self.ahead is not None:
            self.ahead.clear()
        if self._dispatcher is not None:
            self._dispatcher.drain()
            self._dispatcher.begin(epoch, dispatching)
        for connection, payload, base in zip(self.workers, payloads, bases, strict=True):
            connection.begin(epoch, payload, base)

    def items(self) -> Iterator[Any]:
        """Yield one item from each worker in turn, skipping workers that are exhausted.

        The order depends only on the items of each worker.
        """
        round_of_workers = deque((number, connection.items()) for number, connection in enumerate(self.workers))
        begun = self._begun
        round_of_workers.rotate(-self.turn)
        while round_of_workers:
            number, items = round_of_workers[0]
            try:
                # No variable here refers to the item, whose memory may be needed.
                yield self._taken(number, next(items), begun)
            except StopIteration:
                round_of_workers.popleft()
            else:
                round_of_workers.rotate(-1)
        if begun == self._begun:
            self._compare_lists()

    def _compare_lists(self) -> None:
        """Check that all workers have split the same lists.

        Raises:
            RuntimeError: two lists differ, so some samples were yielded by several workers, or by none.
        """
        for number in range(max((len(each.split_lists) for each in self.workers), default=0)):
            seen = [(each.name, each.split_lists[number]) for each in self.workers if len(each.split_lists) > number]
            known = [(name, found) for name, found in seen if found is not None]
            for name, found in known[1:]:
                first, expected = known[0]
                if found[:2] != expected[:2]:
                    raise RuntimeError(
                        f"{name} and {first} have split different lists: {found[0]} items up to {found[2]}, and "
                        f"{expected[0]} up to {expected[2]}, or in a different order. So items of this epoch were "
                        f"repeated or skipped. The list before the split must be the same in every worker: sort it, or "
                        f"draw it with a seed, instead of deriving it from a set, a time or a UUID"
                    )

    def _taken(self, number: int, item: Any, begun: int) -> Any:
        """Count an item that was taken from a worker, unless another epoch has begun meanwhile."""
        if begun == self._begun:
            if self.ahead is None:
                self.deliver(number)
            else:
                self.ahead.append(number)
        return item

    def deliver(self, number: int) -> None:
        """Count the next item of a worker as delivered to the loop."""
        self.workers[number].position.deliver()
        self.turn = number + 1

    def states(self) -> list[WorkerState]:
        """Return the position from which each worker resumes after the items that the loop has received.

        Raises:
            StateError: the pipeline of a worker has no state.
        """
        for connection in self.workers:
            if self._awaits_beginning and not connection.position.has_snapshots:
                connection.await_state()
        return [connection.position.state() for connection in self.workers]

    def run_command(self, command: Command, payloads: Sequence[Any], dispatching: Any) -> None:
        """Run a command in all processes, and wait for them: first the workers, then the dispatching process."""
        for connection, payload in zip(self.workers, payloads, strict=True):
            connection.send_command(command, payload)
        refusals = [connection.wait_for_response() for connection in self.workers]
        if self._dispatcher is not None:
            self._dispatcher.send_command(command, dispatching)
            refusals.append(self._dispatcher.wait_for_response())
        for refusal in refusals:
            if refusal is not None:
                refusal.reraise()

    def report(self, epoch: int) -> LoadingReport:
        """Return statistics of all processes so far."""
        if self._dispatcher is not None:
            self._dispatcher.drain()
        dispatcher = None if self._dispatcher is None else self._dispatcher.report()
        return LoadingReport(epoch, [worker.report() for worker in self.workers], dispatcher)

    def close(self) -> None:
        """End all processes, whatever their state, and free their resources."""
        # A forked process has a copy of this object, but does not own the processes.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        for connection in self._connections():
            connection.cut()
        end_processes(self._processes, grace_s=GRACE_S)
        for connection in self._connections():
            connection.close()
        for channel in self._channels:  # including those of a process that could not be started
            channel.close()
        for process in self._processes:
            close_process(process)
        self._parent_watch.close()

    def _connections(self) -> list[WorkerConnection]:
        """Return the connections to the processes, in the order in which they were started."""
        return [*([] if self._dispatcher is None else [self._dispatcher]), *self.workers]

    def _start(
        self, name: str, run: Callable[..., None], job: WorkerJob, argument: Any, others: list[socket]
    ) -> WorkerConnection:
        """Start a process; a fork closes its copies of the ``others``, and of objects that only this process needs."""
        try:
            near, far = new_channel()
            self._channels.append(near)
            with far:
                self._start_process(run, job, far, argument, others)
        except OSError as error:
            raise OSError(error.errno, f"{name} cannot be started: {error.strerror}") from error
        return WorkerConnection(name, Receiver(near, window=job.window), self._timeout_s)

    def _start_process(
        self, run: Callable[..., None], job: WorkerJob, channel: socket, argument: Any, others: list[socket]
    ) -> None:
        unwanted = [*self._channels, *others] if self._context.get_start_method() == "fork" else []
        packed = job.packed()
        with closing(packed.pipe), defer_interrupts():
            process = self._context.Process(
                target=run_watched, args=(self._parent_watch, run, packed, channel, argument, unwanted), daemon=True
            )
            self._processes.append(process)
            process.start()
            disown_process(process)


class PooledItems(Stage[Any]):
    """The items of the workers, as the source of the main process's pipeline."""

    #: Only the loader can restart it; stages that restart their source check this.
    is_remote = True

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool  # torch would print an attribute named like the parameter in each error
        self._logged: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[Any]:
        epoch = self._pool.workers[0].epoch
        yield from self._pool.items()
        self._pool.is_over = self._pool.ahead is None
        self._logged = log_skipped(epoch, self._pool.report(epoch).skipped, self._logged)
