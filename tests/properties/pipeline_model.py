"""A plain model of the items of pipelines, built from lists, generators and itertools, without the package.

A pipeline is a tuple of steps, each a tuple of a name and its arguments; ``built_pipelines.py`` builds the stages that
they represent. The model knows the order of items unless a stage draws, and otherwise which samples come.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Step = tuple[Any, ...]
Steps = tuple[Step, ...]

#: Steps after which the order is random.
SHUFFLING = ("shuffle", "shuffle_samples", "torch_shuffle")
#: Steps that read other pipelines as well.
MIXING = ("mix", "mux", "zip")
#: Levels of knowledge about the order, from most to least; see `known`.
DEGREES = ["order", "bag", "within", "drawn"]
END = object()


class Place(NamedTuple):
    """One of the processes that read: a worker of a rank."""

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    @property
    def instance(self) -> int:
        """The number of this process: the first worker of every rank, then the second of every rank."""
        return self.worker * self.ranks + self.rank


def shards_of(name: str, sizes: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """Return the samples of each shard of a dataset."""
    return [[sample(name, shard, number) for number in range(size)] for shard, size in enumerate(sizes)]


def sample(name: str, shard: int, number: int) -> dict[str, Any]:
    """Return a sample as it is written; some have metadata, and the sizes of fields differ."""
    fields: dict[str, Any] = {"__key__": f"{name}{shard}-{number}", "cls": str(number).encode()}
    fields["txt"] = b"text " * (7 * number * (shard + 1) % 5)
    if number % 3 == 0:
        fields["json"] = json.dumps({"shard": shard, "tags": [number] * (number % 2)}).encode()
    return fields


def epochs_of(steps: Steps, place: Place, count: int) -> list[list[Any]]:
    """Return the items of one process in each of some epochs, if nothing is random."""
    names = [step[0] for step in steps]
    if "with_epoch" not in names:
        return [list(one_pass(steps, place, 0)) for _ in range(count)]
    at = names.index("with_epoch")
    stream = endless(steps[:at], place, 0)
    share = steps[at][1]
    if splits(steps[:at]):
        share = share // place.workers + (place.worker < share % place.workers)
    cut = [list(itertools.islice(stream, share)) for _ in range(count)]
    return [list(applied(steps[at + 1 :], epoch)) for epoch in cut]


def endless(steps: Steps, place: Place, turn: int) -> Iterator[Any]:
    """Yield pass after pass; the shares of the processes advance by one with each pass."""
    return itertools.chain.from_iterable(one_pass(steps, place, turn + number) for number in itertools.count())


def one_pass(steps: Steps, place: Place, turn: int) -> Iterator[Any]:
    """Yield the items of one process in a pass."""
    (name, *arguments), source = steps[-1], tuple(steps[:-1])
    if name == "list":
        dataset, sizes, *damaged = arguments[1:]
        left = dict(damaged[0]) if damaged else {}
        yield from ((dataset, shard, left.get(shard, size)) for shard, size in enumerate(sizes))
    elif name == "indexed":
        yield from indexed(place, *arguments)
    elif name == "split":
        instances = place.ranks * place.workers
        yield from itertools.islice(one_pass(source, place, turn), (place.instance + turn) % instances, None, instances)
    elif name == "mix":
        _, stop, *others = arguments
        read = endless if stop == "never" else one_pass
        yield from in_turn([read(each, place, turn) for each in (source, *others)], stop=stop)
    elif name in MIXING:
        for items in zip(*(one_pass(each, place, turn) for each in (source, *arguments[2:])), strict=False):
            yield from items if name == "mux" else items[:1]
    else:
        yield from applied(steps[-1:], one_pass(source, place, turn))


def indexed(
    place: Place, name: str, sizes: tuple[int, ...], size: int | None, remainder: str, _: str, excluded: tuple[str, ...]
) -> Iterator[Any]:
    """Yield the share of one process in the global batches of a dataset, in order, without the excluded samples."""
    items = [each for shard in shards_of(name, sizes) for each in shard]
    size, count = size or place.ranks, len(items)
    if remainder == "drop":
        items = items[: count // size * size]
    elif remainder == "pad":
        items = [
            {**items[number % count], "__padding__": number >= count} for number in range(-(-count // size) * size)
        ]
    elif remainder == "any":
        copies = [False, *[True] * (size // count + 1)]
        items = [{**each, "__padding__": is_copy} for is_copy in copies for each in items]
    for number in range(place.worker * size, len(items), place.workers * size):
        batch = items[number : number + size]
        part = batch[len(batch) * place.rank // place.ranks : len(batch) * (place.rank + 1) // place.ranks]
        yield from (each for each in part if each["__key__"] not in excluded)


def in_turn(sources: Iterable[Iterable[Any]], stop: str = "all") -> Iterator[Any]:
    """Yield one item of each remaining source in turn; stop with the first source that ends, or with the last."""
    left = [iter(source) for source in sources]
    while left:
        for source in list(left):
            if (item := next(source, END)) is not END:
                yield item
            elif stop == "first":
                return
            else:
                left.remove(source)


def applied(steps: Steps, items: Iterable[Any]) -> Iterator[Any]:
    """Apply steps to the items of one process."""
    for name, *arguments in steps:
        items = MAKING[name](items, *arguments) if name in MAKING else items
    return iter(items)


def loaded(shards: Iterable[Any], open_shards: int = 1, on_error: str = "raise") -> Iterator[Any]:
    if on_error.endswith("stop"):  # at a shard that is no archive
        shards = itertools.takewhile(lambda shard: shard[2] >= 0, shards)
    left = ([sample(name, shard, number) for number in range(size)] for name, shard, size in shards)
    opened: list[list[Any]] = []
    while opened := opened + list(itertools.islice(left, open_shards - len(opened))):
        current, *opened = opened
        if current:
            yield current[0]
            opened += [current[1:]] if len(current) > 1 else []


def decoded(each: dict[str, Any]) -> dict[str, Any]:
    found = {**each, "cls": int(each["cls"]), "txt": each["txt"].decode()}
    return {**found, "json": json.loads(each["json"])} if "json" in each else found


def batched(items: Iterable[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        if len(batch) == size or not drop_last:
            yield batch


def bucketed(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield batches of samples whose numbers have the same parity."""
    buckets: list[list[Any]] = [[], []]
    for item in items:
        bucket = buckets[number_of(item) % 2]
        bucket.append(item)
        if len(bucket) == size:
            yield bucket.copy()
            bucket.clear()
    yield from filter(None, buckets)


def number_of(item: Any) -> int:
    """Return the number of a sample in its shard, after any steps."""
    key = item["__key__"] if isinstance(item, dict) else item[0] if isinstance(item, tuple) else item
    return int(key.rpartition("-")[2].rstrip("+"))


def key_of(each: dict[str, Any]) -> str:
    """Return the key of a sample, marked if it is padding."""
    return str(each["__key__"]) + "+" * bool(each.get("__padding__"))


def sorted_in_groups(items: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield the samples of each group in key order."""
    for group in batched(items, size, False):
        yield from sorted(group, key=key_of)


#: The fields that remain after the step "select".
SELECTED = ("__key__", "__padding__", "cls")
#: The steps that each process applies to its own items. Others keep the items, in some order.
MAKING: dict[str, Any] = {
    "load": loaded,
    "load_records": loaded,
    "tag": lambda items: ({**each, "tag": number_of(each)} for each in items),
    "keep": lambda items, modulus: (each for each in items if number_of(each) % modulus),
    "own": lambda items: ({**each, "own": 1} for each in items),
    "sorted": sorted_in_groups,
    "decode": lambda items: map(decoded, items),
    "to_tuple": lambda items: ((each["__key__"], each["cls"]) for each in items),
    "key": lambda items: map(key_of, items),
    "batch": batched,
    "buckets": bucketed,
    "unbatch": itertools.chain.from_iterable,
    "select": lambda items: ({key: each[key] for key in each if key in SELECTED} for each in items),
    "compose": lambda items: ({**each, "copy": copy} for each in items for copy in range(2)),
    "slice": lambda items, *positions: itertools.islice(items, *positions),
}


def splits(steps: Steps) -> bool:
    """Whether a pipeline splits the data between the processes, or draws the items of each."""
    return any(step[0] in ("split", "resample", "indexed") or any(map(splits, others_of(step))) for step in steps)


def others_of(step: Step) -> Sequence[Steps]:
    """Return the other pipelines that a step reads."""
    return step[3:] if step[0] in MIXING else ()


def known(steps: Steps) -> str:
    """Return what is known about an epoch.

    Returns:
        str: ``"order"``; or ``"bag"``, all samples of an epoch, in a random order; ``"within"``, some of them;
            ``"drawn"``, any of them, any number of times.
    """
    found = "order"
    for name, *arguments in steps:
        if ends_early((*steps[:1], (name, *arguments))) and found != "order":
            found = max(found, "within", key=DEGREES.index)
        elif name in SHUFFLING or (name == "list" and arguments[0] == "FileLister"):
            found = max(found, "bag", key=DEGREES.index)
        elif name == "resample" or (name == "with_epoch" and found != "order"):
            found = "drawn"
        elif name == "rsample":
            found = max(found, "within", key=DEGREES.index)
        elif name == "indexed" and arguments[4] != "sequential":
            found = max(found, "bag" if arguments[3] == "keep" else "within", key=DEGREES.index)
        elif name == "slice" or (name == "batch" and arguments[1]):
            found = "within" if found == "bag" else found
        elif name in MIXING:
            weighted, stop, *others = arguments
            found = max(found, *map(known, others), "bag" if weighted else "order", key=DEGREES.index)
            if found != "order" and stop != "all":
                found = max(found, "within" if stop == "first" else "drawn", key=DEGREES.index)
    return found


def population(steps: Steps) -> Counter[Hashable]:
    """Return all items that an epoch could contain if nothing were cut off or drawn repeatedly."""
    return Counter(flat(one_pass(uncut(steps), Place(), 0)))


def uncut(steps: Steps) -> Steps:
    """Return a pipeline without the steps that drop items by position."""
    left: list[Step] = []
    for name, *arguments in steps:
        if name in ("mix", "mux"):
            left.append(("mix", None, "all", *map(uncut, arguments[2:])))
        elif name == "indexed":
            left.append((name, *arguments[:3], "any" if arguments[3] == "pad" else "keep", *arguments[4:]))
        elif name == "load":
            left.append((name, *arguments[:1]))
        elif name == "batch":
            left.append((name, arguments[0], False))
        elif name not in ("slice", "with_epoch", "resample", "rsample", "zip"):
            left.append((name, *arguments))
    return tuple(left)


def ends_early(steps: Steps) -> bool:
    """Whether an error ends a stage that reads shards, so that their order determines which of them are read."""
    has_garbage = any(left < 0 for step in steps if step[0] == "list" for _, left in (step[4:] or [()])[0])
    return has_garbage and any(step[0] == "load" and step[2:] and step[2].endswith("stop") for step in steps)


def is_padding(item: Hashable) -> bool:
    """Whether an item of `flat` comes from a padding sample."""
    if isinstance(item, tuple):
        return any(isinstance(each, tuple) and each == ("__padding__", True) for each in item)
    return isinstance(item, str) and item.endswith("+")


def flat(items: Iterable[Any]) -> Iterator[Hashable]:
    """Yield samples for comparison, taken out of their batches."""
    for item in items:
        if isinstance(item, list):
            yield from flat(item)
        else:
            yield frozen(item)


def frozen(item: Any) -> Hashable:
    """Return an item for comparison, without random numbers."""
    if isinstance(item, dict):
        names = sorted(item.keys() - {"drawn"})
        return tuple((name, frozen(item[name])) for name in names)
    if isinstance(item, list | tuple):
        return (type(item).__name__, *map(frozen, item))
    return item  # type: ignore[no-any-return]
