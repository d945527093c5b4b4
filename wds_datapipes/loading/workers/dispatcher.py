"""The dispatching process of ``sharding_round_robin_dispatch``: one pipeline whose items go to the workers in turn."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from wds_datapipes.loading.transport.protocol import Kind
from wds_datapipes.loading.transport.sender import ReceiverGone, Sender
from wds_datapipes.loading.workers.worker import DISPATCH_WINDOW, Worker, WorkerJob, pack_error, report_errors_of_worker

#: The maximum number of items kept for a worker that does not take its share while another needs more.
MAX_KEPT = 10_000


def run_dispatcher(
    job: WorkerJob, channel: socket.socket, targets: Sequence[socket.socket], inherited: Sequence[Any]
) -> None:
    """Run the dispatching process until the main process has exited.

    Args:
        job: the job of the process.
        channel: the connection to the main process.
        targets: the connections to the workers.
        inherited: objects that a fork has inherited open, and that only other processes need.
    """
    with report_errors_of_worker("dispatching process", channel, job, inherited) as sender:
        senders = [Sender(target, window=DISPATCH_WINDOW, together=job.together) for target in targets]
        job = job.unpacked()
        Dispatcher(job.pipe, job, sender, senders).run()


class EpochEnd(NamedTuple):
    """Follows all items of a worker: reports the end, or its cause."""

    kind: Kind
    payload: bytes = b""


class Dispatcher(Worker):
    """Runs a pipeline and distributes its items to the workers in turn.

    It keeps reading while a worker may run dry, and buffers the items of workers that have enough. Waiting for the
    latter would deadlock if the main process waits for the worker that has nothing.
    """

    shared = True

    def __init__(self, pipe: Any, job: WorkerJob, sender: Sender, senders: Sequence[Sender]) -> None:
        super().__init__(pipe, job, sender)
        self.who = "dispatching process"  # torchdata's term, which its tests compare
        self.senders = senders
        self.kept: list[deque[Any]] = []
        self.turn = 0
        self.is_over = False
        self.poll = select.poll()
        for each in (sender, *senders):
            self.poll.register(each, select.POLLIN)

    def step(self) -> None:
        """Perform the next action."""
        try:
            super().step()
        except (
            ReceiverGone
        ):  # a worker, which the main process detects; or the main process, and then this process ends too
            self.sender.wait()

    def fail(self, error: bytes) -> None:
        """Send an exception to each worker, after the preceding items."""
        self.end(EpochEnd(Kind.ERROR, error))

    def begin(self, epoch: int, seed_generator: Any, iter_reset_fn: Callable[[Any], Any] | None) -> None:
        """Begin an epoch."""
        for each in self.senders:
            each.begin(epoch)
        self.kept = [deque() for _ in self.senders]
        self.turn = 0
        self.is_over = False
        super().begin(epoch, seed_generator, iter_reset_fn)

    def name_producer(self) -> None:
        """Name the stage for errors about items that cannot be sent."""
        super().name_producer()
        for each in self.senders:
            each.producer = self.sender.producer

    def make_items(self, iterator: Iterator[Any]) -> None:
        """Distribute items until a request arrives."""
        while not self.sender.requests:
            if self.send_buffered():
                self.receive_all_requests()
            elif self.is_over and not any(self.kept):
                self.iterator = None
                return
            elif not self.is_over and any(
                not kept and not each.is_full for each, kept in zip(self.senders, self.kept, strict=True)
            ):
                try:
                    item = next(iterator)
                except StopIteration:
                    self.end(EpochEnd(Kind.END))
                else:
                    self.buffer_item(item)
            else:
                self.poll.poll()
                self.receive_all_requests()

    def send_buffered(self) -> bool:
        """Send buffered items to workers that want more; return whether anything is on its way."""
        sent = False
        for each, kept in zip(self.senders, self.kept, strict=True):
            while kept and not each.is_full:
                item = kept.popleft()
                try:
                    if isinstance(item, EpochEnd):
                        each.send(*item)
                    else:
                        sent = each.put(item) or sent
                except ReceiverGone:
                    raise
                except Exception:  # noqa: BLE001 - the worker raises it instead of this item
                    kept.clear()
                    kept.append(EpochEnd(Kind.ERROR, pack_error(self.who, self.sender)))
        return sent

    def buffer_item(self, item: Any) -> None:
        """Keep an item for the next worker in turn."""
        kept = self.kept[self.turn]
        if len(kept) >= MAX_KEPT:
            raise BufferError(
                f"Worker {self.turn} has not taken {MAX_KEPT} items that were dispatched to it, while another worker "
                "requested more: stages after sharding_round_robin_dispatch drop too unevenly. Put them before it."
            )
        kept.append(item)
        self.turn = (self.turn + 1) % len(self.kept)

    def receive_all_requests(self) -> None:
        """Receive the requests of the main process and the workers."""
        for each in (self.sender, *self.senders):
            each.receive_requests()

    def end(self, last: EpochEnd) -> None:
        """End the epoch after the buffered items."""
        self.is_over = True
        self.iterator = iter(())  # there is nothing more to read, but there are items to send
        for kept in self.kept:
            kept.append(last)
        self.send_skipped()
