"""The dispatching process of ``sharding_round_robin_dispatch``: one pipeline that deals its items to the workers."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from wds_datapipes.loading.transport.protocol import Kind
from wds_datapipes.loading.transport.sender import ReceiverGone, Sender
from wds_datapipes.loading.workers.worker import DISPATCH_WINDOW, Worker, WorkerJob, failure, report_errors_of_worker

__all__ = ["run_dispatcher"]

#: How many items are kept for a worker that does not take its share while another needs more.
MOST_KEPT = 10_000


def run_dispatcher(
    job: WorkerJob, channel: socket.socket, targets: Sequence[socket.socket], inherited: Sequence[Any]
) -> None:
    """Run the dispatching process until the main process has gone.

    Args:
        job: what it is to do.
        channel: where the main process is.
        targets: where the workers are.
        inherited: what a fork has left open here, and only others need.
    """
    with report_errors_of_worker("dispatching process", channel, job, inherited) as outlet:
        outlets = [Sender(target, window=DISPATCH_WINDOW, together=job.together) for target in targets]
        job = job.opened()
        Dispatcher(job.pipe, job, outlet, outlets).run()


class EpochEnd(NamedTuple):
    """Comes after all items of a worker: says that this was all, or why."""

    kind: Kind
    payload: bytes = b""


class Dispatcher(Worker):
    """Runs a pipeline and deals its items to the workers, one to each in turn.

    It reads on when a worker may run dry. What it meets on the way for workers that have enough, it keeps for them:
    waiting for those would be waiting for ever if the main process, whose turn it is to take from the worker that has
    nothing, waits too.
    """

    shared = True

    def __init__(self, pipe: Any, job: WorkerJob, outlet: Sender, outlets: Sequence[Sender]) -> None:
        super().__init__(pipe, job, outlet)
        self.who = "dispatching process"  # as torchdata calls it, whose tests compare it
        self.outlets = outlets
        self.kept: list[deque[Any]] = []
        self.turn = 0
        self.is_over = False
        self.poll = select.poll()
        for each in (outlet, *outlets):
            self.poll.register(each, select.POLLIN)

    def step(self) -> None:
        """Do what is next, until something else is."""
        try:
            super().step()
        except (
            ReceiverGone
        ):  # a worker, as the main process sees by itself; or the main process, and then this ends too
            self.outlet.wait()

    def fail(self, told: bytes) -> None:
        """Let each worker raise an exception, after the items before it."""
        self.end(EpochEnd(Kind.ERROR, told))

    def begin(self, epoch: int, seed_generator: Any, iter_reset_fn: Callable[[Any], Any] | None) -> None:
        """Begin an epoch."""
        for each in self.outlets:
            each.begin(epoch)
        self.kept = [deque() for _ in self.outlets]
        self.turn = 0
        self.is_over = False
        super().begin(epoch, seed_generator, iter_reset_fn)

    def name_maker(self) -> None:
        """Tell which stage is to blame for an item that cannot be sent."""
        super().name_maker()
        for each in self.outlets:
            each.maker = self.outlet.maker

    def work(self, iterator: Iterator[Any]) -> None:
        """Deal items until something comes in between."""
        while not self.outlet.orders:
            if self.deal():
                self.listen()
            elif self.is_over and not any(self.kept):
                self.iterator = None
                return
            elif not self.is_over and any(
                not kept and not each.is_full for each, kept in zip(self.outlets, self.kept, strict=True)
            ):
                try:
                    item = next(iterator)
                except StopIteration:
                    self.end(EpochEnd(Kind.END))
                else:
                    self.keep(item)
            else:
                self.poll.poll()
                self.listen()

    def deal(self) -> bool:
        """Send what is kept for workers that want more; return whether anything is on its way."""
        sent = False
        for each, kept in zip(self.outlets, self.kept, strict=True):
            while kept and not each.is_full:
                item = kept.popleft()
                try:
                    if isinstance(item, EpochEnd):
                        each.say(*item)
                    else:
                        sent = each.put(item) or sent
                except ReceiverGone:
                    raise
                except Exception:  # noqa: BLE001 - the worker raises it in the place of this item
                    kept.clear()
                    kept.append(EpochEnd(Kind.ERROR, failure(self.who)))
        return sent

    def keep(self, item: Any) -> None:
        """Keep an item for the worker whose turn it is."""
        kept = self.kept[self.turn]
        if len(kept) >= MOST_KEPT:
            raise BufferError(
                f"Worker {self.turn} has not taken {MOST_KEPT} items that were dispatched to it, while another worker "
                "asked for more: stages behind sharding_round_robin_dispatch drop too unevenly. Put them before it."
            )
        kept.append(item)
        self.turn = (self.turn + 1) % len(self.kept)

    def listen(self) -> None:
        """Learn what the main process and the workers want."""
        for each in (self.outlet, *self.outlets):
            each.listen()

    def end(self, last: EpochEnd) -> None:
        """Let nothing more follow than what is kept."""
        self.is_over = True
        self.iterator = iter(())  # nothing is left to read, but something to send
        for kept in self.kept:
            kept.append(last)
        self.tell_ledger()
