"""Positions of items that a stage derives from other items, such as the samples of a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from wds_datapipes.shards.position import Origin, SamplePosition, samples_gone_error

__all__ = ["Expansion", "origins_of", "pack_positions", "take_apart", "unpack_positions"]

T = TypeVar("T")

_END = object()


class Expansion:
    """Resume state of a stage that makes several items of one.

    Args:
        present: what the item was made of of which it has made the last ones; None if there was none.
        given: how many it has made of that.
        again: items that later stages wait for.

    Attributes:
        origin: what the item was made of of which it makes the present ones.
        given: how many it has made of that.
        at: where that is which was read last to make an item.
        is_new: whether it has come to what is new.
        is_unclear: whether it was given an item that was made of nothing, as by a stage that makes several of one and
            does not tell.
    """

    def __init__(self, present: Origin | None = None, given: int = 0, again: Iterable[SamplePosition] = ()) -> None:
        self.origin = present
        self.given = given
        self.at = SamplePosition(-1, 0, 0)
        self.is_new = present is None and not again
        self.is_unclear = False
        self._loaded = present, given
        self._wanted = defaultdict[Origin, set[int]](set)
        for address in again:
            self._wanted[address.way[1]].add(address.way[0])
        earlier = sorted(self._wanted.keys() - {present}, key=lambda each: (each.is_last, each.addresses[-1].place))
        self._again = [*earlier, *([] if present is None else [present])]
        self._taken: list[SamplePosition] = []
        self._has_ended = False
        self._begun = 0

    @property
    def saved(self) -> tuple[Origin | None, int]:
        """What the next state has of it: what was loaded until it has come to what is new."""
        return (self.origin, self.given) if self.is_new else self._loaded

    def address(self) -> SamplePosition:
        """Return the position of the item made last."""
        if self.origin is None or not self.origin.addresses:
            return SamplePosition(-1, 0, 0, (self.given - 1,))
        shard, start, end, _ = self.origin.addresses[-1]
        return SamplePosition(shard, start, end, (self.given - 1, self.origin))

    def feed(self, items: Iterator[T], address: Callable[[], SamplePosition]) -> Iterator[T]:
        """Yield what is needed to make items again, in the order in which they were made; then all that comes next.

        Args:
            items: yield what is needed first, in any order.
            address: tells where the item is that they have yielded last.

        Raises:
            ChangedShardError: something of it does not come.
        """
        early: dict[tuple[int, ...], T] = {}
        missing = {at.place for origin in self._again for at in origin.addresses}
        for origin in self._again:
            for at in origin.addresses:
                place = at.place
                while place not in early:
                    item: Any = next(items, _END)
                    found = None if item is _END else address().place
                    if found not in missing:
                        raise samples_gone_error(len(missing))
                    missing.remove(found)
                    early[found] = item
                    del item
                self._take(at)
                yield early.pop(place)
        for item in items:
            self._take(address())
            yield item
        self._has_ended = True

    def begin(self) -> None:
        """Begin to make items of the next one: of all that was fed since the one before."""
        if self._begun < len(self._again):
            self.origin = self._again[self._begun]
        else:
            self.is_unclear |= not self._taken
            self.origin = Origin(self._has_ended, tuple(self._taken))
        self._begun += 1
        self._taken.clear()
        self.given = 0

    def is_wanted(self) -> bool:
        """Return whether to yield the item: a later stage waits for it, or it is new."""
        number, self.given = self.given, self.given + 1
        if self.is_new:
            return True
        present, given = self._loaded
        if self._begun > len(self._again) or (
            present is not None and self._begun == len(self._again) and number >= given
        ):
            self.is_new = True
            return True
        return number in self._wanted.get(self.origin, ())  # type: ignore[arg-type]  # there is one by now

    def _take(self, address: SamplePosition) -> None:
        self.at = address
        self._taken.append(address)


def take_apart(units: Iterable[T], function: Callable[[Iterator[T]], Iterable[Any]], state: Expansion) -> Iterator[Any]:
    """Yield what a function makes of a stream, of which each item stands for itself, and keep count.

    Args:
        units: the stream.
        function: what it yields between taking one item and the next follows from the first of them.
        state: the state to resume from.
    """

    def taken() -> Iterator[T]:
        for unit in units:
            state.begin()
            yield unit
            del unit  # its memory is free while the next one is made

    for item in function(taken()):
        if state.is_wanted():
            yield item
        del item


def origins_of(again: Iterable[SamplePosition]) -> list[SamplePosition]:
    """Return where all that is of which items are made again, each once."""
    return [at for origin in dict.fromkeys(address.way[1] for address in again) for at in origin.addresses]


def pack_positions(addresses: Sequence[SamplePosition]) -> list[list[Any]]:
    """Return positions as plain lists. An origin is written once, and afterwards as a list of its number.

    >>> origin = Origin(False, (SamplePosition(0, 0, 512), SamplePosition(0, 512, 1024)))
    >>> pack_positions([SamplePosition(0, 512, 1024, (index, origin)) for index in range(2)])
    [[0, 512, 1024, 0, [0, [0, 0, 512], [0, 512, 1024]]], [0, 512, 1024, 1, [0]]]
    """
    known = _Numbers()
    return [_values(address, known) if address.way else [*address[:3]] for address in addresses]


def unpack_positions(values: Iterable[Sequence[Any]]) -> list[SamplePosition]:
    """Return the addresses that `pack_positions` has made lists of.

    >>> unpack_positions([[0, 512, 1024, 3], [1, 0, -1]])
    [SamplePosition(shard=0, start=512, end=1024, way=(3,)), SamplePosition(shard=1, start=0, end=-1, way=())]
    """
    known: list[Origin] = []
    return [_address(each, known) for each in values]


class _Numbers:
    """The numbers of origins. To compare two takes its time, and mostly they are one and the same."""

    def __init__(self) -> None:
        self._of_object: dict[int, int] = {}
        self._of_value: dict[Origin, int] = {}

    def find(self, origin: Origin) -> int | None:
        """Return the number of an origin, if it has one."""
        number = self._of_object.get(id(origin))
        if number is None and (number := self._of_value.get(origin)) is not None:
            self._of_object[id(origin)] = number
        return number

    def add(self, origin: Origin) -> None:
        """Give the next number to an origin."""
        self._of_object[id(origin)] = self._of_value[origin] = len(self._of_value)


def _values(address: SamplePosition, known: _Numbers) -> list[Any]:
    shard, start, end, way = address
    return [shard, start, end, *(each if isinstance(each, int) else _nest_numbers(each, known) for each in way)]


def _nest_numbers(origin: Any, known: _Numbers) -> list[Any]:
    if not isinstance(origin, Origin):  # the places in other shards
        return [*origin]
    if (number := known.find(origin)) is not None:
        return [number]
    values = [int(origin.is_last), *(_values(address, known) for address in origin.addresses)]
    known.add(origin)
    return values


def _address(values: Sequence[Any], known: list[Origin]) -> SamplePosition:
    shard, start, end, *way = values
    if not type(shard) is type(start) is type(end) is int or -1 < end < start:  # which is noticed late otherwise
        raise ValueError(f"an address has the values {values!r:.200}")
    return SamplePosition(
        shard, start, end, tuple(each if isinstance(each, int) else _unnest_numbers(each, known) for each in way)
    )


def _unnest_numbers(values: Sequence[Any], known: list[Origin]) -> Origin | tuple[int, ...]:
    if len(values) == 1:
        number: int = values[0]
        return known[number]
    if isinstance(values[1], int):
        return tuple(values)
    is_last, *addresses = values
    origin = Origin(bool(is_last), tuple(_address(address, known) for address in addresses))
    known.append(origin)
    return origin
