"""The sending end: sends items as soon as they are made, as far ahead as its credit allows."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.counters import COUNTERS
from wds_datapipes.loading.transport.protocol import AHEAD_BYTES, COMMAND_BYTES, HEADER, INLINE, Command, Header, Kind
from wds_datapipes.loading.transport.serialization import Array, Serializer, describe, unpack
from wds_datapipes.loading.transport.shared_memory import SegmentPool
from wds_datapipes.loading.transport.status_page import StatusPage
from wds_datapipes.pipes.state.recording import Record, pack_records

__all__ = ["ReceiverGone", "Sender"]

#: Small items go together in one message, until it has so many bytes,
TOGETHER_BYTES = 64 * 1024
#: or has waited for so long, in seconds,
TOGETHER_S = 1e-3
#: or until an item took so long to make that a message of its own costs little in comparison.
SLOW_S = 0.25e-3
#: A message with a stuck pipeline behind it is sent after one or two times this, in seconds.
TICK_S = 2e-3

#: Arrays begin at multiples of this, as cache lines do.
ALIGNMENT = 64

#: Pieces that have fewer bytes on the average are joined before they are copied.
LONG = 8 * 1024
#: How many messages may be ahead, however large they are.
FEWEST = 2


class ReceiverGone(Exception):
    """Nobody is at the other end any more."""


class ItemRequest(NamedTuple):
    """A command other than those the outlet deals with itself."""

    command: Command
    epoch: int
    payload: Any


class Sender:
    """Sends items, and learns what the other side wants.

    One thread calls the methods. A second one sees to it that no item waits for the next one to be made.

    Args:
        channel: this process's end of the socket.
        window: how many messages may be on their way, or waiting to be used, at a time; with small items that share
            messages, it can be one more.
        together: how many items may share a message.

    Attributes:
        page: what the other side sees of this process at any time.
        epoch: the epoch that is sent.
        orders: what is to be done next.
        maker: what messages call whoever makes the items.
    """

    def __init__(self, channel: socket.socket, *, window: int, together: int) -> None:
        self._channel = channel
        self._window = window
        self._together = together
        self._pool = SegmentPool(spare=window + 2)
        self._packer = Serializer()
        self._drop()
        self._began = self._ready = time.perf_counter()
        self._lock = threading.Lock()
        self._stirred = threading.Event()
        self._closed = False
        self._ticker = threading.Thread(target=self._tick, name="flush", daemon=True)
        self._items = self._bytes = 0
        self._making_s = self._waiting_s = 0.0
        self.epoch = 0
        self.orders: deque[ItemRequest] = deque()
        self.maker = "The pipeline"
        self.page = StatusPage()
        self._send(Header(Kind.STATUS), descriptor=self.page.pass_on())

    @property
    def is_full(self) -> bool:
        """Whether the other side wants no more for now."""
        ahead = self._sent - self._taken
        return ahead >= self._window or (self._ahead_bytes >= AHEAD_BYTES and ahead >= FEWEST)

    def fileno(self) -> int:
        """The descriptor that gets readable when there is something to `listen` to."""
        return self._channel.fileno()

    def begin(self, epoch: int) -> None:
        """Drop what was not sent, and go on with another epoch."""
        with self._lock:
            self._drop()
            self.epoch = epoch
        self._ready = time.perf_counter()

    def put(self, item: object, record: Record | None = None) -> bool:
        """Send an item, now or together with those that follow shortly; return whether it was now.

        Args:
            item: the item.
            record: where the pipeline is behind it, if that is recorded. It arrives before the item does.

        Raises:
            Gone: the other side has gone.
            PicklingError: the item cannot be sent.
        """
        try:
            packed = self._packer.pack(item)
        except Exception as error:  # pickling runs anybody's code
            raise pickle.PicklingError(
                f"{self.maker} made {describe(item, self._packer.pack)}, which cannot be sent to another process "
                f"({type(error).__name__}: {error}). Let it be turned into plain data, such as bytes, arrays or "
                "tensors, before it leaves the worker."
            ) from error
        now = time.perf_counter()
        took = now - self._ready
        with self._lock:
            self._items += 1
            self._making_s += took
            if record is not None and self._records and self._records[0][1] is not record[1]:
                self._flush()  # the first record of a run comes first in its message
            if packed.arrays or packed.size > TOGETHER_BYTES:
                self._flush()
                self._records += () if record is None else (record,)
                self._send_items([packed.size], packed.parts, packed.arrays)
                if packed.size > TOGETHER_BYTES:
                    self._packer.renew()
            else:
                if not self._lengths:
                    self._began = now
                self._lengths.append(packed.size)
                self._records += () if record is None else (record,)
                self._parts += packed.parts
                self._size += packed.size
                if (
                    took > SLOW_S
                    or self._sent == self._taken
                    or self._size > TOGETHER_BYTES
                    or len(self._lengths) >= self._together
                    or now - self._began > TOGETHER_S
                ):
                    self._flush()
                elif not self._stirred.is_set():
                    self._stir()
            self._ready = time.perf_counter()
            return not self._lengths

    def record(self, record: Record) -> None:
        """Send what there is, and then where the pipeline is behind it.

        Raises:
            Gone: the other side has gone.
        """
        with self._lock:
            self._flush()
            self._send_body(Kind.STATE, [pack_records([record])], number=0)

    def say(self, kind: Kind, payload: bytes = b"") -> None:
        """Send what there is, and then a message without items.

        Raises:
            Gone: the other side has gone.
        """
        with self._lock:
            self._flush()
            self._send_body(kind, [payload])

    def flush(self) -> None:
        """Send what there is.

        Raises:
            Gone: the other side has gone.
        """
        with self._lock:
            self._flush()

    def listen(self) -> None:
        """Learn what the other side wants, if it said anything.

        Raises:
            Gone: the other side has gone.
        """
        while self._hear(socket.MSG_DONTWAIT):
            pass

    def wait(self) -> None:
        """Wait until the other side says something; then send what has waited for that.

        Raises:
            Gone: the other side has gone.
        """
        begin = time.perf_counter()
        self._hear()
        self.listen()
        with self._lock:
            if not self.is_full:
                self._flush()
            self._ready = time.perf_counter()
            self._waiting_s += self._ready - begin
            self._publish()

    def close(self) -> None:
        """Give back the descriptor, and end the second thread; what waits for other items is not sent."""
        self._closed = True
        self._stirred.set()
        self._channel.close()

    def _drop(self) -> None:
        self._parts: list[bytes] = []
        self._lengths: list[int] = []
        self._records: list[Record] = []
        self._size = 0
        self._sent = self._taken = 0
        self._ahead: deque[int] = deque()
        self._ahead_bytes = 0

    def _hear(self, flags: int = 0) -> bool:
        try:
            message = self._channel.recv(COMMAND_BYTES, flags)
        except BlockingIOError:
            return False
        except ConnectionError:
            message = b""
        if not message:
            raise ReceiverGone
        header, body = Header(*HEADER.unpack_from(message)), memoryview(message)[HEADER.size :]
        if header.kind == Command.TAKEN:
            with self._lock:
                if header.epoch == self.epoch:
                    self._taken = header.number
                    while len(self._ahead) > self._sent - self._taken:
                        self._ahead_bytes -= self._ahead.popleft()
                for number in body.cast("i"):
                    if number < 0:
                        self._pool.give_up(~number)
                    elif (given_up := self._pool.give_back(number)) is not None:
                        self._send(Header(Kind.GIVEN_UP, segment=given_up))
        else:
            self.orders.append(ItemRequest(Command(header.kind), header.epoch, unpack(body)))
        return True

    def _flush(self) -> None:
        """Send the items that wait for others."""
        if self._lengths:
            self._send_items(self._lengths, self._parts, [])
            self._lengths, self._parts, self._size = [], [], 0
            self._packer.renew()  # the other thread may be packing, and goes on with what it has begun with

    def _send_items(self, lengths: list[int], parts: list[bytes], arrays: list[Array]) -> None:
        records = b""
        if self._records:
            records = pack_records(self._records)
            if len(records) > INLINE:
                self._send_body(Kind.STATE, [records], number=len(self._records))
                records = b""
            self._records = []
        size = self._send_body(Kind.ITEMS, parts, lengths, arrays, records=records)
        self._sent += 1
        self._ahead.append(size)
        self._ahead_bytes += size

    def _send_body(
        self,
        kind: Kind,
        parts: list[bytes],
        lengths: Sequence[int] = (),
        arrays: Sequence[Array] = (),
        *,
        number: int | None = None,
        records: bytes = b"",
    ) -> int:
        number = len(lengths) if number is None else number
        table = array("Q", lengths)
        first = size = table.itemsize * (len(lengths) + 2 * len(arrays)) + sum(map(len, parts))
        for each in arrays:
            size = -(-size // ALIGNMENT) * ALIGNMENT
            table.append(size)
            table.append(each.nbytes)
            size += each.nbytes
        self._bytes += size
        if size <= INLINE:
            self._send(Header(kind, self.epoch, number, 0, -1, size, len(records)), (records, table.tobytes(), *parts))
            return size
        segment = self._pool.take(size)
        data = segment.memory.data
        at = 0
        parts = [table.tobytes(), *parts]
        for part in [b"".join(parts)] if first < LONG * len(parts) else parts:
            data[at : at + len(part)] = part
            at += len(part)
        for each, place in zip(arrays, table[len(lengths) :: 2], strict=True):
            target = segment.memory[place : place + each.nbytes].view(each.dtype)
            fortran = not each.flags.c_contiguous and each.flags.f_contiguous
            np.copyto(target.reshape(each.shape, order="F" if fortran else "C"), each)
        header = Header(kind, self.epoch, number, len(arrays), segment.number, size, len(records))
        self._send(header, (records,), descriptor=segment.pass_on())
        return size

    def _send(self, header: Header, body: Sequence[bytes] = (), descriptor: int | None = None) -> None:
        self._publish()  # what has arrived is counted
        begin = time.perf_counter()
        message = b"".join((HEADER.pack(*header), *body))
        try:
            if descriptor is None:
                self._channel.send(message)
            else:
                socket.send_fds(self._channel, [message], [descriptor])
        except ConnectionError as error:
            raise ReceiverGone from error
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._waiting_s += time.perf_counter() - begin

    def _publish(self) -> None:
        self.page.write(self._items, self._bytes, self._making_s, self._waiting_s)
        self.page.fetch(COUNTERS.fetched_bytes, COUNTERS.fetching_s)

    def _stir(self) -> None:
        """Have an eye on the items that wait for others."""
        self._stirred.set()
        if not self._ticker.is_alive():
            self._ticker.start()

    def _tick(self) -> None:
        seen = 0.0
        while self._stirred.wait() and not self._closed:
            time.sleep(TICK_S)
            with self._lock:
                if not self._lengths or self.is_full:  # in the second case, the other thread waits for the other side
                    self._stirred.clear()
                elif seen == self._began:
                    try:
                        self._flush()
                    except ReceiverGone:  # as the other thread will see
                        return
                    except Exception:  # noqa: BLE001, S110 - nothing is lost: whoever sends next sends it, or raises
                        pass
                seen = self._began
