"""The pool of worker processes, and their items in round-robin order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from multiprocessing.process import BaseProcess
from socket import socket
from typing import Any

from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.report import WorkerReport
from wds_datapipes.loading.transport.protocol import new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.loading.workers.loop_items import LoopItems, Pipe
from wds_datapipes.loading.workers.shutdown import (
    ParentWatch,
    close_process,
    disown_process,
    end_processes,
    run_watched,
)
from wds_datapipes.loading.workers.worker import Connections, Payload, WorkerJob, run_worker
from wds_datapipes.pipes.stage import iterated_by_loader
from wds_datapipes.pipes.state.seeding import seed_stages


class WorkerPool:
    """Starts worker processes, and ends them.

    Args:
        jobs: the job of each worker.
        method: the start method of the processes, such as ``"fork"``.
        timeout_s: the maximum time to wait without a message from a worker, in seconds; ``None`` means no limit.
        dispatching: the job of the dispatching process, if there is one.

    Attributes:
        workers: the connection to each worker.
        dispatcher: the connection to the dispatching process, if there is one.
    """

    def __init__(
        self, jobs: Sequence[WorkerJob], method: str, timeout_s: float | None, dispatching: WorkerJob | None = None
    ) -> None:
        self.workers: list[WorkerConnection] = []
        self.dispatcher: WorkerConnection | None = None
        self._timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._channels: list[socket] = []
        self._context: Any = multiprocessing.get_context(method)
        self._owner_pid = os.getpid()
        self._closed = False
        if multiprocessing.current_process().daemon:
            raise RuntimeError("A daemonic process, such as a worker, cannot start processes: use num_workers=0 in it.")
        self._parent_watch = ParentWatch()
        links: list[tuple[socket, socket]] = []
        try:
            if dispatching is not None:
                links = [new_channel() for _ in jobs]
                self.dispatcher = self._start("The dispatching process", dispatching, links)
            for number, job in enumerate(jobs):
                self.workers.append(self._start(f"Worker {number}", job, links, number))
            # If one process ends, every reader needs to know, because data is missing.
            pairs = list(zip(self._connections(), self._processes, strict=True))
            for number, (connection, _) in enumerate(pairs):
                connection.dispatcher = None if connection is self.dispatcher else self.dispatcher
                for other in (pairs[number], *pairs[:number], *pairs[number + 1 :]):
                    connection.watch(*other)
        except BaseException:
            self.close()
            raise
        finally:
            for end in chain.from_iterable(links):
                end.close()

    def close(self) -> None:
        """Terminate all processes, whatever their state, and free their resources."""
        # A forked process has a copy of this object, but does not own the processes.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        for connection in self._connections():
            connection.cut()
        end_processes(self._processes)
        for connection in self._connections():
            connection.close()
        for channel in self._channels:  # including those of processes that could not be started
            channel.close()
        for process in self._processes:
            close_process(process)
        self._parent_watch.close()

    def _connections(self) -> list[WorkerConnection]:
        """Return the connections to the processes, in the order in which they were started."""
        return [*([] if self.dispatcher is None else [self.dispatcher]), *self.workers]

    def _start(
        self, name: str, job: WorkerJob, links: Sequence[tuple[socket, socket]], number: int | None = None
    ) -> WorkerConnection:
        """Start a process; return the connection to it.

        Args:
            name: its name.
            job: its job.
            links: the two ends of the connection of the dispatching process to each worker.
            number: the number of the worker, or ``None`` for the dispatching process.
        """
        try:
            near, far = new_channel()
            self._channels.append(near)
            if number is None:
                connections = Connections(far, targets=[target for target, _ in links])
            else:
                connections = Connections(far, source=links[number][1] if links else None)
            with far:
                self._start_process(job, connections, list(chain.from_iterable(links)))
        except OSError as error:
            raise OSError(error.errno, f"{name} cannot be started: {error.strerror}") from error
        return WorkerConnection(name, Receiver(near, window=job.window), self._timeout_s)

    def _start_process(self, job: WorkerJob, connections: Connections, ends: Sequence[socket]) -> None:
        # A fork closes its copies of the objects that only other processes need.
        own = {id(connections.source), *map(id, connections.targets)}
        unwanted = [*self._channels, *(end for end in ends if id(end) not in own)]
        unwanted = unwanted if self._context.get_start_method() == "fork" else []
        payload, facts = Payload(job), (job.name, job.window, job.together)
        with closing(payload), defer_interrupts():
            arguments = self._parent_watch, run_worker, payload, *facts, connections, unwanted
            process = self._context.Process(target=run_watched, args=arguments, daemon=True)
            self._processes.append(process)
            process.start()
            disown_process(process)


@iterated_by_loader
class PooledItems(LoopItems):
    """The items of worker processes, one from each in turn.

    Args:
        pool: the workers.
        continues: whether an epoch continues where the previous one ended.
        dispatches_stream: whether this is so for the items of the dispatching process, which has no state.
    """

    #: Only the loader can restart it; stages that restart their source check this.
    process_boundary = "remote"

    def __init__(self, pool: WorkerPool, continues: bool, dispatches_stream: bool) -> None:
        super().__init__([connection.position for connection in pool.workers], continues=continues)
        self._dispatches_stream = dispatches_stream
        self._pool = pool  # in errors, torch prints attributes with the names of parameters
        self._awaits_beginning = False

    def begin(
        self, seed_generator: Any, resumed: Checkpoint | None, iter_reset_fn: Callable[[Pipe], Pipe] | None, pipe: Pipe
    ) -> None:
        """Begin an epoch."""
        if self._dispatches_stream and self.epoch and not self.is_over:
            self._warn_of_lost_items(".sharding_round_robin_dispatch() has no position in the stream")
        bases = self.bases(resumed)
        super().begin(seed_generator, resumed, iter_reset_fn, pipe)
        self._awaits_beginning = self._continues and bases is None
        seed_stages(pipe, seed_generator, self.current)
        if (dispatcher := self._pool.dispatcher) is not None:
            for connection in (dispatcher, *self._pool.workers):
                connection.drain()  # or the dispatching process could wait for a worker that waits for the loop
            dispatcher.begin(self.epoch, (seed_generator, iter_reset_fn, self.current, None))
        for number, connection in enumerate(self._pool.workers):
            base = None if bases is None else bases[number]
            payload = seed_generator.spawn(number), iter_reset_fn, self.current, base if resumed is None else None
            connection.begin(self.epoch, payload, base or WorkerState())

    def __iter__(self) -> Iterator[Any]:
        """Yield one item from each worker in turn, skipping workers that are exhausted.

        The order depends only on the items of each worker.
        """
        epoch = self.epoch
        round_of_workers = deque((number, connection.items()) for number, connection in enumerate(self._pool.workers))
        round_of_workers.rotate(-self.turn)
        while round_of_workers:
            number, items = round_of_workers[0]
            try:
                item = [next(items)]
            except StopIteration:
                round_of_workers.popleft()
                continue
            if epoch == self.epoch:  # no other epoch has begun meanwhile
                self.taken(number)
            yield item.pop()  # no variable may refer to it, because its memory may be needed
            round_of_workers.rotate(-1)
        if epoch == self.epoch:
            self._compare_lists()
            self.end()

    def _compare_lists(self) -> None:
        """Check that all workers have split the same lists.

        Raises:
            RuntimeError: two lists differ, so some samples were yielded by several workers, or by none.
        """
        workers = self._pool.workers
        for number in range(max(len(each.split_lists) for each in workers)):
            seen = [(each.name, each.split_lists[number]) for each in workers if len(each.split_lists) > number]
            known = [(name, found) for name, found in seen if found is not None]
            for name, found in known[1:]:
                first, expected = known[0]
                if found[:2] != expected[:2]:
                    raise RuntimeError(
                        f"{name} and {first} have split different lists: {found[0]} items up to {found[2]}, and "
                        f"{expected[0]} up to {expected[2]}, or in a different order. Some items of this epoch were "
                        f"repeated or skipped. The list before the split must be the same in every worker: sort it, or "
                        f"draw it with a seed, instead of deriving it from a set, a time or a UUID"
                    )

    def states(self) -> list[WorkerState]:
        """Return the position from which each worker resumes after the items that the loop has received.

        Raises:
            StateError: the pipeline of a worker has no state.
        """
        if self._awaits_beginning:
            for connection in self._pool.workers:
                connection.await_state()
        return super().states()

    def reports(self) -> list[WorkerReport]:
        """Return statistics of the workers so far."""
        return [connection.report() for connection in self._pool.workers]

    def report_of_dispatcher(self) -> WorkerReport | None:
        """Return statistics of the dispatching process so far, if there is one."""
        if (dispatcher := self._pool.dispatcher) is None:
            return None
        with suppress(OSError, RuntimeError):  # it has ended, which the loop reports
            dispatcher.drain()
        return dispatcher.report()

    def close(self) -> None:
        """End all processes."""
        self._pool.close()
