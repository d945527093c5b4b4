"""Messages in the replies to calls: written by a worker on another host, and read by the main process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.loading.transport.flow_control import CALL_TOGETHER_S
from wds_datapipes.loading.transport.message_reader import MessageReader, ReceivedMessage
from wds_datapipes.loading.transport.message_writer import MessageWriter
from wds_datapipes.loading.transport.protocol import HEADER, Header
from wds_datapipes.loading.transport.receiver import keep_freed
from wds_datapipes.loading.transport.serialization import SendableError, serialize
from wds_datapipes.loading.transport.shared_memory import Bytes
from wds_datapipes.loading.transport.status_page import Work


class Reply(NamedTuple):
    """The answer to a call.

    Attributes:
        messages: the messages, each with the array that is its segment, the list of its arrays, or None. There are none
            if the worker is too far ahead, or its epoch is over.
        work: what the worker has done.
        figures: its figures.
        shard: the last shard that it opened, or "".
    """

    messages: list[tuple[bytes, Any]]
    work: Work
    figures: Counter[str]
    shard: str


class OwnPiece:
    """A piece of the memory of this process, which is copied when its message is sent.

    Attributes:
        number: the same for all, because each travels with its message.
        memory: its bytes.
    """

    def __init__(self, size: int) -> None:
        self.number = 0
        self.memory: Bytes = np.empty(size, np.uint8)

    def pass_on(self) -> Bytes:
        """Return the memory."""
        return self.memory


class OwnMemory:
    """The memory for the messages of a reply. A large piece is used again for the next reply."""

    passes_arrays = True

    def __init__(self) -> None:
        self._spare: OwnPiece | None = None
        self._taken: list[OwnPiece] = []

    def take(self, size: int) -> OwnPiece:
        """Return a piece of at least ``size`` bytes."""
        piece, self._spare = self._spare, None
        if piece is None or piece.memory.size < size:
            piece = OwnPiece(size)
        self._taken.append(piece)
        return piece

    def give_back(self, number: int) -> None:
        """Do nothing: `reuse` frees all pieces."""

    def reuse(self) -> None:
        """Make the memory of the previous reply available again; the caller has received a copy."""
        if self._taken:
            self._spare = max(self._taken, key=lambda piece: piece.memory.size)
            self._taken = []


class ReplyWriter(MessageWriter):
    """Collects the messages of a reply.

    Args:
        window: as of a `MessageWriter`.
        together: the maximum number of items in a message.
        name: the name of the worker, for errors.
        alone: the number of its first items that have a message each.

    Attributes:
        messages: the messages for the next reply.
    """

    pool: OwnMemory

    def __init__(self, *, window: int, together: int, name: str, alone: int) -> None:
        super().__init__(OwnMemory(), window=window, together=together, together_s=CALL_TOGETHER_S, name=name)
        self._most, self._alone = together, alone
        self.messages: list[tuple[bytes, Any]] = []
        self.begin(0)

    def call(self, epoch: int, taken: int, taken_bytes: int) -> None:
        """Record how many messages of an epoch, and bytes in them, the loop had taken when it made the current call."""
        self.messages = []
        self.pool.reuse()
        self._together = 1 if self._items < self._alone else self._most
        self._count_waiting(self._ready)
        if epoch == self.epoch:
            self._taken, self._taken_bytes = taken, taken_bytes

    def reply(self) -> Reply:
        """Return the reply to the current call."""
        self._count_making()
        return Reply(self.messages, self._work(), self.counters.figures(), self.counters.shard)

    def receive_requests(self) -> None:
        """Do nothing: requests arrive with calls."""

    def wait(self) -> None:
        """Do nothing: there is nothing to do until the next call."""

    def pack_error(self) -> bytes:
        """Return the current exception for `send`, with the last shard, and what to do if this host lacks a file."""
        error, where = sys.exc_info()[1], self._where()
        while error is not None:
            if isinstance(error, FileNotFoundError) and error.filename:
                where += (
                    f". This host has no {error.filename!r}: the shards of workers on several hosts must be reachable "
                    "from each of them, in a file system that all mount under the same path, or in a store"
                )
                break
            if isinstance(error, ModuleNotFoundError):
                where += (
                    f". This host lacks the module {error.name!r}: install it there, or pass it with the runtime_env "
                    "of ray.init or of worker_options"
                )
                break
            error = error.__cause__ or error.__context__
        return serialize(SendableError(where))

    def _flush_later(self) -> None:
        """Do nothing: a reply has its items when the call returns."""

    def _send(self, header: Header, body: Sequence[bytes] = (), attached: Any = None) -> None:
        if isinstance(attached, np.ndarray):
            attached = attached[: header.size]
        self.messages.append((b"".join((HEADER.pack(*header), *body)), attached))


class ReplyReader(MessageReader):
    """Rebuilds the items in replies."""

    def __init__(self) -> None:
        self._kept = 0

    def memory_of(self, message: ReceivedMessage) -> memoryview:
        """Return the segment of a message: a copy if it has arrays, which may be kept and changed, unlike objects."""
        array: Bytes = np.array(message.attached, copy=message.header.arrays > 0)
        return array.data

    def take(self, header: Header) -> None:
        """Keep memory for messages of this size; it counts as taken since its reply was received."""
        if header.size > self._kept:
            self._kept = keep_freed(header.size)

    def credit(self) -> None:
        """Do nothing: each call is a credit."""
