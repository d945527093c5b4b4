"""The dispatching process of ``.sharding_round_robin_dispatch()``, and the items that its workers receive."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from wds_datapipes.errors import StateError, WorkerDiedError
from wds_datapipes.loading.transport.flow_control import DISPATCHED_MESSAGES, MAX_KEPT, TICK_S
from wds_datapipes.loading.transport.protocol import Kind
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import ReceiverGone, Sender
from wds_datapipes.loading.workers.process_connection import ProcessConnection
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.roles import Loader
from wds_datapipes.pipes.stage import Stage, iterated_by_loader


class EpochEnd(NamedTuple):
    """The end of a worker's items, or the error that ends them."""

    kind: Kind
    payload: bytes


class RoundRobinSender(Sender):
    """A `Sender` that sends each item to the next worker in turn; the main process sends the requests.

    It accepts items while any worker may run out of them, and keeps those of workers that have enough: waiting for
    these would deadlock while the main process waits for a worker that has none. A second thread sends kept items to
    workers that ask for more while the pipeline is slow.

    Args:
        channel: the connection to the main process.
        targets: the connections to the workers.
        together: the maximum number of items in a message.
        name: the name of this process, for errors.
    """

    def __init__(self, channel: socket.socket, targets: Sequence[socket.socket], *, together: int, name: str) -> None:
        self._targets = [Sender(target, window=DISPATCHED_MESSAGES, together=together, name=name) for target in targets]
        self._sending = threading.Lock()  # held by the thread that uses the targets
        self._is_polling = False
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable once the second thread has sent items
        super().__init__(channel, window=1, together=1, name=name)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        for each in (self, *self._targets):
            self._poll.register(each, select.POLLIN)

    @property
    def is_full(self) -> bool:
        """Whether each worker has enough items for now."""
        return all(kept or target.is_full for kept, target in zip(self._kept, self._targets, strict=True))

    def begin(self, epoch: int) -> None:
        """Discard unsent items, and begin another epoch."""
        with self._sending:
            super().begin(epoch)
            for target in self._targets:
                target.begin(epoch)
            self._kept: list[deque[Any]] = [deque() for _ in self._targets]
        self._turn = 0
        self._counted = 0  # the skipped items of the epoch that the main process knows of

    def put(self, item: object, record: object = None) -> bool:  # noqa: ARG002  an argument of every sender
        """Send an item to the next worker, or keep it for that worker; return whether requests should be received.

        Args:
            item: the item.
            record: not sent, because the position of this process is not part of a state.

        Raises:
            BufferError: too many items are kept for the worker.
            ReceiverGone: the other side has closed.
        """
        number, kept = self._turn, self._kept[self._turn]
        if len(kept) >= MAX_KEPT:
            raise BufferError(
                f"Worker {number} has not taken {MAX_KEPT} items that were dispatched to it, while another worker "
                "requires more: the stages after .sharding_round_robin_dispatch() drop items too unevenly. Put them "
                "before it"
            )
        self._items += 1
        self._turn = (number + 1) % len(self._targets)
        with self._sending:
            kept.append(item)
            sent = self._send_kept(number)
            if self._is_behind(number):
                self._flush_later()
            return sent or bool(kept)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send the end of the items, or an error, to each worker after its items, and the counters to the main process.

        The main process reads its connection only now and then, so it gets the counters whenever their number has
        doubled, and at the end.

        Raises:
            ReceiverGone: the other side has closed.
        """
        if kind == Kind.COUNTERS:
            if self.counters.entries >= 2 * self._counted:
                self._counted = self.counters.entries
                super().send(kind, payload)
            return
        self._send_last_counters()
        with self._sending:
            for number, kept in enumerate(self._kept):
                kept.append(EpochEnd(kind, payload))
                self._send_kept(number)

    def flush(self) -> None:
        """Send the waiting items.

        Raises:
            ReceiverGone: the other side has closed.
        """
        for target in self._targets:
            target.flush()

    def receive_requests(self) -> None:
        """Receive the requests that have arrived, and send kept items to the workers that have asked for more.

        Raises:
            ReceiverGone: the other side has closed.
        """
        super().receive_requests()
        with self._sending:
            self._serve()
        self._bytes = sum(target._bytes for target in self._targets)
        self._count_making()
        self._publish()

    def wait(self) -> None:
        """Wait until the main process or a worker sends something.

        Raises:
            ReceiverGone: the other side has closed.
        """
        begin = self._count_making()
        with self._sending:
            self._is_polling = True
        self._poll.poll()
        self._count_waiting(begin)
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        self.receive_requests()
        with self._sending:
            self._is_polling = False
            if any(map(self._is_behind, range(len(self._targets)))):
                self._flush_later()

    def close(self) -> None:
        """Close the descriptors; waiting items are not sent."""
        self.closed.set()
        with self._sending:
            for target in self._targets:
                target.close()
            os.close(self._woken)
        super().close()

    def name_producer(self, producer: str) -> None:
        """Set the name of the stage that produces the items, for messages."""
        for target in self._targets:
            target.name_producer(producer)

    def _is_behind(self, number: int) -> bool:
        """Whether items wait until a worker takes others."""
        target = self._targets[number]
        return bool(self._kept[number]) or (target.is_full and target.has_items)

    def _serve(self) -> None:
        """Send items to the workers that have asked for more."""
        for number, target in enumerate(self._targets):
            was_full = target.is_full
            target.receive_requests()
            if was_full and not target.is_full:
                target.flush()
            self._send_kept(number)

    def _tick(self) -> None:
        while self.has_waiting.wait() and not self.closed.wait(TICK_S):
            with self._sending:
                if self.closed.is_set():
                    return
                if self._is_polling or not any(map(self._is_behind, range(len(self._targets)))):
                    self._is_ticking = False
                    self.has_waiting.clear()
                    continue
                was_full = self.is_full
                try:
                    self._serve()
                except ReceiverGone:  # the other thread detects it, too
                    return
                if was_full and not self.is_full:
                    os.eventfd_write(self._woken, 1)

    def _send_kept(self, number: int) -> bool:
        """Send a worker its kept items while it wants more; return whether a message was sent."""
        target, kept, sent = self._targets[number], self._kept[number], False
        while kept and not target.is_full:
            item = kept.popleft()
            if isinstance(item, EpochEnd):
                target.send(*item)
                continue
            try:
                sent = target.put(item) or sent
            except ReceiverGone:
                raise
            except Exception:  # noqa: BLE001  the worker raises it instead of this item
                kept.clear()
                kept.append(EpochEnd(Kind.ERROR, self.pack_error()))
        return sent

    def _send_last_counters(self) -> None:
        if self._counted != self.counters.entries:
            self._counted = self.counters.entries
            super().send(Kind.COUNTERS, self.pack_counters())


@iterated_by_loader
class DispatchedItems(Loader, Stage[Any]):
    """The items that a worker receives from the dispatching process, in place of the stages that run there."""

    #: Only the loader can restart it; stages that restart their source check this.
    process_boundary = "remote"

    def __init__(self) -> None:
        self.is_lost = False
        self._connection: ProcessConnection | None = None
        self._has_begun = False

    def check_position(self) -> None:
        """Refuse a state of its own: the loader makes the items of the epoch again instead.

        Raises:
            StateError: always.
        """
        raise StateError(".sharding_round_robin_dispatch() has no position in the shards")

    def connect(self, channel: socket.socket) -> None:
        """Connect this worker to the dispatching process."""
        self._connection = ProcessConnection("The dispatching process", Receiver(channel, window=DISPATCHED_MESSAGES))

    def begin(self, epoch: int) -> None:
        """Expect the items of an epoch."""
        self._has_begun = False
        if self._connection is not None:
            self._connection.expect(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._connection is None or self._has_begun:
            raise RuntimeError(
                "The items after .sharding_round_robin_dispatch() can be read once in an epoch, by the worker that "
                "receives them. Put the stage that reads them repeatedly before it"
            )
        self._has_begun = True
        try:
            yield from self._connection.items()
        except WorkerDiedError:
            self.is_lost = True
            raise


def dispatched_items(pipe: Any) -> DispatchedItems | None:
    """Return the stage of a worker's pipeline that receives the items of the dispatching process, if there is one."""
    return next((stage for stage in graph_of(pipe).stages if isinstance(stage, DispatchedItems)), None)
