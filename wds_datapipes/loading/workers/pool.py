"""The pool of worker processes, from which items are taken in turn."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing.process import BaseProcess
from socket import socket
from typing import Any

from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.report import LoadingReport, log_skipped
from wds_datapipes.loading.torchdata_patches.worker_processes import bind
from wds_datapipes.loading.transport.protocol import Command, new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.loading.workers.dispatcher import run_dispatcher
from wds_datapipes.loading.workers.parent_watch import ParentWatch
from wds_datapipes.loading.workers.shutdown import close_process, end_processes
from wds_datapipes.loading.workers.worker import WorkerJob, run_worker
from wds_datapipes.pipes.stage import Stage

__all__ = ["PooledItems", "WorkerPool"]

#: How long processes may take to end by themselves, in seconds. Nobody needs the item that they may be making.
GRACE_S = 0.4

#: All processes of all crews.
_processes: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _forget_parent() -> None:
    """Forget, in a process that was forked, what is its parent's.

    After ``os.fork``, multiprocessing takes the parent's processes for its own, and terminates them when the forked
    process ends.
    """
    multiprocessing.process._children.difference_update(_processes)  # type: ignore[attr-defined]  # there is no other way


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class WorkerPool:
    """Starts processes, takes one item from each worker in turn, and ends them.

    Args:
        jobs: what each worker is to do.
        dispatching: what the dispatching process is to do, or None if there is none.
        method: how processes are started, such as ``"fork"``.
        timeout_s: how long a worker may send nothing while it is waited for, in seconds; None is without limit.

    Attributes:
        workers: a link to each worker.
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
        #: Which worker's turn is next.
        self.turn = 0
        self.is_over = False
        self._begun = 0  # epochs
        #: Whether an epoch goes on where the one before has ended.
        self.lasts = False
        self._awaits_beginning = False
        #: Whose items were taken and are not delivered yet, where a stage of the main process takes them ahead.
        self.ahead: deque[int] | None = None
        if multiprocessing.current_process().daemon:
            raise RuntimeError("A daemonic process, as a worker is, may not start processes: use num_workers=0 in it.")
        self._lifeline = ParentWatch()
        ends: list[socket] = []
        try:
            if dispatching is not None:
                pairs = [new_channel() for _ in jobs]
                ends = [end for _, end in pairs]
                self._dispatcher = self._start(
                    "The dispatching process", run_dispatcher, dispatching, [near for near, _ in pairs], ends
                )
                for near, _ in pairs:
                    near.close()
            for number, job in enumerate(jobs):
                own = ends[number] if ends else None
                others = [end for end in ends if end is not own]
                self.workers.append(self._start(f"Worker {number}", run_worker, job, own, others))
            # Without one process, the others have too little to go on with.
            everybody = list(zip(self._links(), self._processes, strict=True))
            for number, (link, process) in enumerate(everybody):
                link.feeder = None if link is self._dispatcher else self._dispatcher
                link.watch(link, process)
                for other in everybody[:number] + everybody[number + 1 :]:
                    link.watch(*other)
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
            epoch: its number, larger than that of any before.
            payloads: what each worker needs to begin it.
            dispatching: what the dispatching process needs for that.
            resumed: where each worker goes on, if it is not at the beginning.
            turn: whose item comes first.
        """
        bases = [WorkerState(None) for _ in self.workers] if resumed is None else resumed
        self.turn = turn
        self.is_over = False
        self._awaits_beginning = self.lasts and resumed is None and self._begun > 0
        self._begun += 1
        if self.ahead is not None:
            self.ahead.clear()
        if self._dispatcher is not None:
            self._dispatcher.drain()
            self._dispatcher.begin(epoch, dispatching)
        for link, payload, base in zip(self.workers, payloads, bases, strict=True):
            link.begin(epoch, payload, base)

    def items(self) -> Iterator[Any]:
        """Yield one item from each worker in turn; a worker that has no more leaves the round.

        The order is a function of what each worker yields, and of nothing else.
        """
        round_of_workers = deque((number, link.items()) for number, link in enumerate(self.workers))
        begun = self._begun
        round_of_workers.rotate(-self.turn)
        while round_of_workers:
            number, items = round_of_workers[0]
            try:
                # No name here keeps the item, whose memory may be waited for.
                yield self._taken(number, next(items), begun)
            except StopIteration:
                round_of_workers.popleft()
            else:
                round_of_workers.rotate(-1)
        if begun == self._begun:
            self._compare_lists()

    def _compare_lists(self) -> None:
        """Make sure that all workers have split the same lists.

        Raises:
            RuntimeError: two have not, so samples came from several workers, or from none.
        """
        for number in range(max((len(link.listed) for link in self.workers), default=0)):
            seen = [(link, link.listed[number]) for link in self.workers if len(link.listed) > number]
            known = [(link, each) for link, each in seen if each is not None]
            for link, each in known[1:]:
                first, expected = known[0]
                if each[:2] != expected[:2]:
                    raise RuntimeError(
                        f"{link.name} has split another list than {first.name}: {each[0]} items up to {each[2]}, where "
                        f"that had {expected[0]} up to {expected[2]}, or in another order. So items of this epoch were "
                        f"repeated or left out. What makes the list before the split has to make the same in every "
                        f"worker: not from a set, a time or a uuid, but sorted, or drawn with a seed"
                    )

    def _taken(self, number: int, item: Any, begun: int) -> Any:
        """Take note that an item of a worker was taken, unless another epoch has begun meanwhile."""
        if begun != self._begun:
            return item
        if self.ahead is None:
            self.deliver(number)
        else:
            self.ahead.append(number)
        return item

    def deliver(self, number: int) -> None:
        """Take note that the loop gets the next item of a worker."""
        self.workers[number].trail.deliver()
        self.turn = number + 1

    def states(self) -> list[WorkerState]:
        """Return where each worker has to resume behind what the loop has.

        Raises:
            StateError: the pipeline of a worker has no state.
        """
        for link in self.workers:
            if self._awaits_beginning and not link.trail.is_begun:
                link.await_state()
        return [link.trail.state() for link in self.workers]

    def tell(self, command: Command, payloads: Sequence[Any], dispatching: Any) -> None:
        """Tell all processes what to do, and wait until they have done it: the workers before what feeds them."""
        for link, payload in zip(self.workers, payloads, strict=True):
            link.tell(command, payload)
        refusals = [link.await_answer() for link in self.workers]
        if self._dispatcher is not None:
            self._dispatcher.tell(command, dispatching)
            refusals.append(self._dispatcher.await_answer())
        for refusal in refusals:
            if refusal is not None:
                refusal.reraise()

    def report(self, epoch: int) -> LoadingReport:
        """Return what was done so far."""
        if self._dispatcher is not None:
            self._dispatcher.drain()
        dispatcher = None if self._dispatcher is None else self._dispatcher.report()
        return LoadingReport(epoch, [worker.report() for worker in self.workers], dispatcher)

    def close(self) -> None:
        """End all processes, whatever they are at, and give back what belongs to them."""
        # A forked process has a copy of this object, and the processes are not its own.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        for link in self._links():
            link.cut()
        end_processes(self._processes, grace_s=GRACE_S)
        for link in self._links():
            link.close()
        for channel in self._channels:  # also of a process that could not be started
            channel.close()
        for process in self._processes:
            close_process(process)
        self._lifeline.close()

    def _links(self) -> list[WorkerConnection]:
        """Return a link to each process, in the order in which they were started."""
        return [*([] if self._dispatcher is None else [self._dispatcher]), *self.workers]

    def _start(
        self, name: str, run: Callable[..., None], job: WorkerJob, argument: Any, others: list[socket]
    ) -> WorkerConnection:
        """Start a process; a fork closes its copies of the ``others``, and of what is this process's alone."""
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
        parcelled = job.parcelled()
        with closing(parcelled.pipe):
            process = self._context.Process(
                target=bind, args=(self._lifeline, run, parcelled, channel, argument, unwanted), daemon=True
            )
            self._processes.append(process)
            _processes.add(process)
            process.start()


class PooledItems(Stage[Any]):
    """Where the items of the workers enter the pipeline of the main process."""

    #: Only the loader can begin it again; stages that begin their source again themselves ask for this.
    is_remote = True

    def __init__(self, crew: WorkerPool) -> None:
        self._crew = crew  # torch would print an attribute of the parameter's name in each error
        self._told: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[Any]:
        epoch = self._crew.workers[0].epoch
        yield from self._crew.items()
        self._crew.is_over = self._crew.ahead is None
        self._told = log_skipped(epoch, self._crew.report(epoch).skipped, self._told)
