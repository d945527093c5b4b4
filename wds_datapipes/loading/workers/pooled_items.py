"""The items of the workers of a loader, in round-robin order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.report import WorkerReport
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.loading.workers.loop_items import LoopItems, Pipe
from wds_datapipes.pipes.stage import iterated_by_loader
from wds_datapipes.pipes.state.seeding import seed_stages


class RunningWorkers(Protocol):
    """The running workers of a loader, on this host or on others.

    Attributes:
        workers: the connection to each worker.
        dispatcher: the connection to the dispatching process, if there is one.
    """

    @property
    def workers(self) -> Sequence[WorkerConnection]: ...  # noqa: D102  above

    @property
    def dispatcher(self) -> WorkerConnection | None: ...  # noqa: D102  above

    def close(self) -> None:
        """End the workers, whatever their state, and free their resources."""


@iterated_by_loader
class PooledItems(LoopItems):
    """The items of workers, one from each in turn.

    Args:
        pool: the workers.
        continues: whether an epoch continues where the previous one ended.
        dispatches_stream: whether this is so for the items of the dispatching process, which has no state.
    """

    #: Only the loader can restart it; stages that restart their source check this.
    process_boundary = "remote"

    def __init__(self, pool: RunningWorkers, continues: bool, dispatches_stream: bool) -> None:
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
        beginnings = self._beginnings() if bases is None else bases
        self._awaits_beginning = self._continues and bases is None and not self.epoch
        super().begin(seed_generator, resumed, iter_reset_fn, pipe)
        seed_stages(pipe, seed_generator, self.current)
        if (dispatcher := self._pool.dispatcher) is not None:
            for connection in (dispatcher, *self._pool.workers):
                connection.drain()  # or the dispatching process could wait for a worker that waits for the loop
            dispatcher.begin(self.epoch, (seed_generator, iter_reset_fn, self.current, None))
        for number, connection in enumerate(self._pool.workers):
            base = None if bases is None else bases[number]
            payload = seed_generator.spawn(number), iter_reset_fn, self.current, base if resumed is None else None
            connection.begin(self.epoch, payload, beginnings[number])

    def _beginnings(self) -> Sequence[WorkerState | str]:
        """Return where each worker begins an epoch by itself, or the reason why this is unknown.

        In a stream, this is where it has ended the previous one. An error may end the workers before they say so.
        """
        workers = len(self._pool.workers)
        if not self._continues or not self.epoch:
            return [WorkerState()] * workers
        try:
            return [state.renewed() for state in super().states()]  # all of it has arrived
        except StateError as error:
            return [str(error)] * workers

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
        """End all workers."""
        self._pool.close()
