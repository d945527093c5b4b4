"""Rebuilds the items in messages, for any kind of connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.loading.transport.protocol import HEADER, NUMBER, Header, Kind
from wds_datapipes.loading.transport.serialization import unpack


class ReceivedMessage(NamedTuple):
    """A message from the other side.

    Attributes:
        header: its header.
        body: the data that the header announces, unless it is in a segment.
        records: the positions of the pipeline after the items.
        attached: its segment, or the list of its arrays, if these came with it.
    """

    header: Header
    body: bytes
    records: bytes = b""
    attached: Any = None

    @classmethod
    def of(cls, header: Header, data: bytes, attached: Any = None) -> ReceivedMessage:
        """Return a message, from all of its bytes outside of its segment."""
        begin = HEADER.size + header.records
        return cls(header, data[begin:], data[HEADER.size : begin], attached)


class MessageReader(ABC):
    """Rebuilds the items in the messages of a `MessageWriter`."""

    @abstractmethod
    def memory_of(self, message: ReceivedMessage) -> memoryview:
        """Return the segment of a message, which is free again once nothing refers to any part of it."""

    def is_crowded(self) -> bool:
        """Whether so many segments are lent that further items are copied out of theirs."""
        return False

    @abstractmethod
    def take(self, header: Header) -> None:
        """Count a message as taken."""

    @abstractmethod
    def credit(self) -> None:
        """Let the other side send as many messages as were taken."""

    def body(self, message: ReceivedMessage) -> Any:
        """Return the object in a message without items."""
        return unpack(self.data(message))

    def data(self, message: ReceivedMessage) -> bytes:
        """Return the bytes of a message without items."""
        body = message.body
        if message.header.segment >= 0:
            body = bytes(self.memory_of(message)[: message.header.size])
        return body[NUMBER:]  # after the table

    def drop(self, message: ReceivedMessage) -> None:
        """Discard a message."""
        if message.header.segment >= 0:
            self.memory_of(message)  # nothing refers to it, so it is returned

    def items(self, message: ReceivedMessage) -> Iterator[Any]:
        """Yield the items of a message; their large arrays are views of its segment."""
        if message.header.kind == Kind.PLAIN_ITEMS:
            self.take(message.header)
            yield from self.body(message)
            return
        rows = self._rows(message)
        del message
        while rows:
            yield unpack(*rows.popleft())  # no variable may refer to the memory, which is reused once it is free

    def _rows(self, message: ReceivedMessage) -> deque[tuple[Any, Sequence[Any]]]:
        """Return the pickle and the arrays of each item."""
        header, body = message.header, message.body
        self.take(header)
        count, arrays = header.number, header.arrays
        copies = arrays > 0 and self.is_crowded()
        memory = memoryview(b"") if header.segment < 0 else self.memory_of(message)
        rest = memoryview(body) if body else memory[header.begin : header.size]
        at = NUMBER * (2 * (count + arrays) if arrays else count)
        table = rest[:at].cast("Q").tolist()
        begins = accumulate(table[:count], initial=at)
        pickles: list[Any] = [rest[begin : begin + size] for begin, size in zip(begins, table[:count], strict=False)]
        if not arrays:
            return deque((pickled, ()) for pickled in pickles)
        places = zip(table[2 * count :: 2], table[2 * count + 1 :: 2], strict=True)
        parts: Iterator[Any] = (memory[begin : begin + size] for begin, size in places)
        if isinstance(message.attached, list):
            parts = (np.array(each).data for each in message.attached)
        if copies:
            pickles, parts = [bytes(each) for each in pickles], map(bytearray, parts)
        return deque((pickled, list(islice(parts, n))) for pickled, n in zip(pickles, table[count:], strict=False))
