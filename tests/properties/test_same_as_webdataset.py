"""The same chain of stages in this package and in webdataset, on the same shards, 600 times.

Each chain is drawn at random, and written twice: for webdataset 1.0.2 and for this package. Both must yield the same
items, or the same items up to an error in both. Intended differences are avoided, and explained by comments.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import webdataset
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.testing import build_shard

#: The number of chains without workers, and with each number of workers.
CHAINS = 600
WITH_WORKERS = 8

Items = IterDataPipe[Any]
Kind = str  # of the items: "raw" and "decoded" samples, "tuple", or "list" of one of these


class Step(NamedTuple):
    """A stage, in both packages.

    Attributes:
        names: the method of webdataset, and that of this package.
        arguments: what both take by position.
        options: what each takes by keyword.
        kind: the kind of the items that it yields.
        ordered: whether the order of the items is the same in both.
        keeps_origin: whether samples keep their origin in both.
        needs_order: whether its items depend on the order of the items that it gets.
    """

    names: list[str]
    arguments: tuple[Any, ...]
    options: tuple[dict[str, Any], dict[str, Any]]
    kind: Kind
    ordered: bool
    keeps_origin: bool
    needs_order: bool

    def add(self, pipe: Any, package: int) -> Any:
        """Add the stage to a pipeline of webdataset (0) or of this package (1)."""
        return getattr(pipe, self.names[package])(*self.arguments, **self.options[package])


def step(
    names: str,
    *arguments: Any,
    rng: random.Random | None = None,
    both: dict[str, Any] | None = None,
    theirs: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
    kind: Kind = "same",
    ordered: bool = True,
    keeps_origin: bool = True,
    needs_order: bool = False,
) -> Step:
    """Return a step; with ``rng``, it has a policy that is drawn, and its equivalent in webdataset."""
    word, handler = rng.choice(POLICIES) if rng else ("raise", None)
    both = both or {}
    theirs = {**both, **(theirs or {}), **({"handler": handler} if rng else {})}
    ours = {**both, **(ours or {}), **({"on_error": word} if rng else {})}
    options = (theirs, ours)
    return Step((names.split() * 2)[:2], arguments, options, kind, ordered, keeps_origin, needs_order)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Sets of shards: many small ones, an empty one, one without samples, and single ones."""
    folder = tmp_path_factory.mktemp("shards")
    rng = random.Random(7)
    made = []
    for number, counts in enumerate([(5,), (3, 4, 2), (1, 0, 6), (0,), (2, 2, 2, 2, 2, 2, 2)]):
        names = [folder / f"set{number}-{shard}.tar" for shard in range(len(counts))]
        made.append([shard(name, count, rng) for name, count in zip(names, counts, strict=True)])
    return made


def shard(path: Path, count: int, rng: random.Random) -> str:
    samples = []
    for number in range(count):
        sample: dict[str, Any] = {"__key__": f"{path.stem}/{number:03}"}
        sample["cls"] = b"%d" % rng.randrange(10)
        sample["txt"] = "".join(rng.choices("abc \u00e4", k=rng.randrange(6))).encode()
        if rng.random() < 0.7:
            sample["meta.json"] = json.dumps({"n": number, "x": [1, None]}).encode()
        if rng.random() < 0.5:
            sample[rng.choice(["seg.txt", "a.b.cls"])] = b"7"
        if rng.random() < 0.5:
            buffer = io.BytesIO()
            np.save(buffer, np.arange(rng.randrange(1, 4)))
            sample["npy"] = buffer.getvalue()
        samples.append(sample)
    return build_shard(path, samples)


# typical user code


def length(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, str, list, dict)) else -1


def upper(value: Any) -> Any:
    return value.upper()


def same(value: Any) -> Any:
    return value


def plus_one(value: Any) -> Any:
    return value + 1


def fails_on_odd(value: Any) -> Any:
    if int(value) % 2:
        raise LookupError(f"{value} is odd")
    return value


def odd_only(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if int(sample["cls"]) % 2 else None


def only_class(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": sample["cls"]}


def has_json(sample: dict[str, Any]) -> bool:
    return "meta.json" in sample


def no_text(name: str) -> bool:
    return not name.endswith(".txt")


def txt_to_text(name: str) -> str:
    return name.replace(".txt", ".text")


FUNCTIONS: list[Callable[[Any], Any]] = [length, upper, same, plus_one, fails_on_odd]
FIELDS = ["cls", "txt", "meta.json", "npy", "seg.txt", "json"]

#: The policies of this package, and the equivalent handlers of webdataset.
POLICIES = [("raise", webdataset.reraise_exception), ("skip", webdataset.ignore_and_continue)]


PATTERNS = ["*.json", "cls", "txt", "t*t", "*.txt", "npy", "a.b.cls", "seg*"]


def decode(rng: random.Random) -> Step:
    only = rng.choice([None, "cls", "cls meta.json", ["txt"]])
    kind = "decoded" if only is None else "raw"
    return step("decode wds_decode", rng=rng, both={"only": only}, kind=kind)


def map_samples(rng: random.Random) -> Step:
    function = rng.choice([odd_only, only_class, same])
    # webdataset keeps only the key
    return step("map map_samples", function, rng=rng, keeps_origin=function is not only_class)


def map_dict(rng: random.Random) -> Step:
    return step("map_dict", rng=rng, both={rng.choice(FIELDS[:4]): rng.choice(FUNCTIONS)})


def rename(rng: random.Random) -> Step:
    new = {name: ";".join(rng.sample(FIELDS, rng.randrange(1, 3))) for name in rng.sample(["x", "y", "cls"], 2)}
    keep = rng.random() < 0.8
    # on purpose: without its origin, later errors could not name the sample
    return step("rename", rng=rng, both={"keep": keep, **new}, keeps_origin=keep)


def to_tuple(rng: random.Random) -> Step:
    specs = [";".join(rng.sample(FIELDS, rng.randrange(1, 3))) for _ in range(rng.randrange(1, 4))]
    specs = [" ".join(specs)] if rng.random() < 0.3 else specs
    is_error = rng.random() < 0.5
    theirs, ours = {"missing_is_error": is_error}, {"missing": "raise" if is_error else "none"}
    return step("to_tuple", *specs, rng=rng, theirs=theirs, ours=ours, kind="tuple")


def map_tuple(rng: random.Random) -> Step:
    return step("map_tuple", rng.choice([None, length, same, plus_one]), rng=rng, kind="tuple")


def select(_: random.Random) -> Step:
    return step("select filter", has_json)


def shuffle(rng: random.Random) -> Step:
    size = rng.randrange(2, 6)
    return step("shuffle shuffle_samples", size, theirs={"initial": size}, ordered=False)


def listed(rng: random.Random) -> Step:
    partial = rng.random() < 0.7
    theirs, ours = {"partial": partial, "collation_fn": None}, {"drop_last": not partial}
    return step("batched batch", rng.randrange(1, 4), theirs=theirs, ours=ours, kind="list", needs_order=True)


def unlisted(_: random.Random) -> Step:
    return step("unlisted unbatch", kind="items")


def extract_keys(rng: random.Random) -> Step:
    patterns = [";".join(rng.sample(PATTERNS, rng.randrange(1, 3))) for _ in range(rng.randrange(1, 3))]
    return step("extract_keys", *patterns, kind="tuple")


def slice_samples(rng: random.Random) -> Step:
    bounds = rng.choice([(3,), (0,), (1, 5), (1, None), (0, None, 2), (2, 7, 3)])
    return step("slice slice_samples", *bounds, needs_order=True)


def rsample(rng: random.Random) -> Step:
    return step("rsample", rng.choice([0.0, 1.0]))  # the choice between them is random


ON_SAMPLES = [
    map_samples, map_dict, rename, extract_keys, to_tuple, select, shuffle, listed, slice_samples, rsample,
]  # fmt: skip

#: What may follow items of a kind.
MENU: dict[Kind, list[Callable[[random.Random], Step]]] = {
    "raw": [decode, decode, *ON_SAMPLES],
    "decoded": [to_tuple, *ON_SAMPLES],
    "tuple": [map_tuple, shuffle, listed, slice_samples, rsample],
    "list": [unlisted],
}


class Chain(NamedTuple):
    """A source, and the stages after it."""

    source: dict[str, Any]
    steps: list[Step]

    def __str__(self) -> str:
        return " | ".join([f"source{sorted(self.source)}", *map(str, self.steps)])

    @property
    def ordered(self) -> bool:
        return all(step.ordered for step in self.steps)


def draw(rng: random.Random) -> Chain:
    source: dict[str, Any] = {}
    if rng.random() < 0.2:
        source["select_files"] = no_text
    if rng.random() < 0.2:
        source["rename_files"] = txt_to_text
    steps: list[Step] = []
    kinds: list[Kind] = ["raw"]
    for _ in range(rng.randrange(1, 7)):
        step = rng.choice(MENU[kinds[-1]])(rng)
        if step.needs_order and not all(earlier.ordered for earlier in steps):
            continue
        steps.append(step)
        if step.kind == "list":
            kinds.append("list")
        elif step.kind == "items":
            kinds.pop()
        elif step.kind != "same":
            kinds[-1] = step.kind
    return Chain(source, steps)


def theirs(chain: Chain, urls: Sequence[str]) -> Any:
    pipe = webdataset.WebDataset(list(urls), shardshuffle=False, empty_check=False, **chain.source)
    for step in chain.steps:
        pipe = step.add(pipe, 0)
    return pipe


def ours(chain: Chain, urls: Sequence[str]) -> Items:
    pipe: Items = ShardList(urls).sharding_filter().load_wds_shards(**chain.source).group_samples()
    for step in chain.steps:
        pipe = step.add(pipe, 1)
    return pipe


class Outcome(NamedTuple):
    """The result of a chain: its items, and whether an error ended it."""

    items: list[Any]
    failed: bool


def outcome(items: Iterable[Any], chain: Chain) -> tuple[Outcome, Exception | None]:
    got: list[Any] = []
    origin = all(step.keeps_origin for step in chain.steps)
    try:
        got.extend(plain(item, origin) for item in items)
    except Exception as error:
        return Outcome(got, failed=True), error
    return Outcome(got, failed=False), None


def plain(item: Any, origin: bool) -> Any:
    """Return an item as a comparable value, with or without its origin."""
    if isinstance(item, dict):
        return {name: plain(item[name], origin) for name in sorted(item) if origin or not name.startswith("__")}
    if isinstance(item, tuple):
        return tuple(plain(each, origin) for each in item)
    if isinstance(item, list):
        return [plain(each, origin) for each in item]
    if isinstance(item, np.ndarray | np.generic | torch.Tensor):
        return ("array", np.asarray(item).tolist()) if item.ndim else item.item()
    return item


def in_any_order(items: Iterable[Any]) -> list[str]:
    return sorted(map(repr, items))


def assert_same(chain: Chain, urls: Sequence[str], their_items: Iterable[Any], our_items: Iterable[Any]) -> None:
    (their, their_error), (our, our_error) = outcome(their_items, chain), outcome(our_items, chain)
    description = f"{chain} on {[Path(url).name for url in urls]}: theirs {their_error!r}, ours {our_error!r}"
    if isinstance(our_error, EmptySourceError):  # on purpose: webdataset's epoch is silently shorter then
        assert their == Outcome([], failed=False), description
        return
    if their.failed and not our.failed and any("slice" in step.names for step in chain.steps):
        # It continues to read to the end of the slice, past the last wanted item.
        assert their.items == our.items[: len(their.items)], description
        return
    assert their.failed == our.failed, description
    if chain.ordered and their.failed:
        # It yields a batch only after the next item, so an error may come first.
        assert their.items == our.items[: len(their.items)], description
    elif chain.ordered:
        assert their.items == our.items, description
    elif not their.failed:  # otherwise the items before the error are random
        assert in_any_order(their.items) == in_any_order(our.items), description


def chains(block: int, count: int) -> Iterator[Chain]:
    rng = random.Random(block)
    for _ in range(count):
        yield draw(rng)


@pytest.mark.parametrize("block", range(3))
def test_a_chain_yields_the_same(block: int, sets: list[list[str]]) -> None:
    rng = random.Random(block)
    for chain in chains(block, CHAINS // 3):
        urls = rng.choice(sets)
        assert_same(chain, urls, theirs(chain, urls), ours(chain, urls))


def loaded(pipe: Any, workers: int) -> Iterator[Any]:
    yield from DataLoader(pipe, batch_size=None, num_workers=workers, collate_fn=same)


def served(pipe: Items, workers: int) -> Iterator[Any]:
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        yield from loader


@pytest.mark.parametrize("load", [loaded, served])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_chain_yields_the_same_in_workers(
    workers: int, load: Callable[[Items, int], Iterator[Any]], sets: list[list[str]]
) -> None:
    rng = random.Random(workers)
    for chain in chains(100 + workers, WITH_WORKERS):
        # torch's DataLoader continues with the other workers after the error of one, and so does webdataset's order.
        urls = rng.choice(sets)
        if outcome(theirs(chain, urls), chain)[0].failed:
            continue
        assert_same(chain, urls, loaded(theirs(chain, urls), workers), load(ours(chain, urls), workers))
