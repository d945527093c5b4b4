"""The pipelines of this package's stages that the steps of the model represent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from operator import itemgetter
from random import Random
from typing import Any

import webdataset
from pipeline_model import Steps, key_of, number_of, others_of, shards_of
from record_files import write_records
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper
from users_stages import Buckets

from wds_datapipes import ErrorBudget, IndexedSamples, ShardList, Stage
from wds_datapipes.index import EpochOptions, Manifest, build_indexes, read_manifest, write_manifest
from wds_datapipes.testing import build_shard

Pipe = Any


class Own(IterDataPipe[Any]):
    """A user's stage that declares nothing."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for each in self.source:
            yield {**each, "own": 1}


class Sorted(Buckets):
    """A user's stage that buffers samples and has a state: it sorts each group of samples by key."""

    def release(self) -> Iterator[Any]:
        self.held.sort(key=lambda each: key_of(each[1]))
        while self.held:
            yield self.held.pop(0)[1]


class Flaky(Stage[Any]):
    """Drops each sample that a later stage held back the first time that it is read again."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        seen = set[str]()
        for each in self.source:
            tries_again = self.counters.is_tried_again
            if tries_again is not None and each["__key__"] not in seen and tries_again():
                seen.add(each["__key__"])
                continue
            yield each


def tagged(each: dict[str, Any]) -> dict[str, Any]:
    return {**each, "tag": number_of(each)}


def is_kept(modulus: int, each: Any) -> bool:
    return bool(number_of(each) % modulus)


def parity_of(each: Any) -> int:
    return number_of(each) % 2


def with_draw(each: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**each, "drawn": rng.random()}


def copied(samples: Iterable[Any]) -> Iterator[Any]:
    return ({**each, "copy": copy} for each in samples for copy in range(2))


def policy(name: str) -> Any:
    """Return an ``on_error``: a word, a budget, or a handler of webdataset."""
    return ErrorBudget(max_errors=100) if name == "budget" else getattr(webdataset, name, name)


def indexed(
    name: str, sizes: tuple[int, ...], size: int | None, remainder: Any, order: Any, excluded: tuple[str, ...]
) -> Pipe:
    shards: Any = read_manifest(f"{name}.json") if len(sizes) % 4 else f"{name}-{{0..{len(sizes) - 1}}}.tar"
    lanes = 2 if size and order != "sequential" and len(sizes) % 2 else 1
    window = EpochOptions(window_shards=2, exclude=excluded or None)
    return IndexedSamples(shards, global_batch_size=size, lanes=lanes, remainder=remainder, order=order, epoch=window)


def listing(kind: str, name: str, sizes: tuple[int, ...], _: object = ()) -> Pipe:
    if kind == "records":
        return ShardList(f"{name}-{{0..{len(sizes) - 1}}}.msgpack")
    urls = [f"{name}-{shard}.tar" for shard in range(len(sizes))]
    if kind == "FileLister":
        return FileLister(".", f"{name}-*.tar")
    if kind in ("gz", "pipe"):
        return ShardList([f"{url}.gz" if kind == "gz" else f"pipe:cat {url}" for url in urls])
    if kind == "IterableWrapper":
        return IterableWrapper(urls)
    return ShardList(f"{name}-{{0..{len(sizes) - 1}}}.tar" if kind == "pattern" else urls)


#: Functions that build the first stage.
SOURCES: dict[str, Any] = {"list": listing, "indexed": indexed}
#: Functions that build the stage of a step.
STAGES: dict[str, Any] = {
    "shuffle": lambda pipe: pipe.shuffle(),
    "split": lambda pipe: pipe.sharding_filter(),
    "resample": lambda pipe, count, seed: pipe.resample_wds_shards(count, seed=seed),
    "load": lambda pipe, open_shards=1, on_error="raise": pipe.load_wds_shards(
        open_shards=open_shards, on_error=policy(on_error)
    ).group_samples(),
    "load_records": lambda pipe, open_shards=1: pipe.load_wds_records(open_shards=open_shards),
    "mix": lambda pipe, weights, stop, *others: pipe.mix_samples(*map(build, others), weights=weights, stop=stop),
    "mux": lambda pipe, weights, stop, *others: pipe.mux(*map(build, others)),
    "zip": lambda pipe, weights, stop, *others: pipe.zip(*map(build, others)).map(itemgetter(0)),
    "torch_shuffle": lambda pipe, size: pipe.shuffle(buffer_size=size),
    "prefetch": lambda pipe, size: pipe.prefetch(size),
    "own": Own,
    "flaky": Flaky,
    "sorted": Sorted,
    "shuffle_samples": lambda pipe, size, initial: pipe.shuffle_samples(size, initial=initial),
    "tag": lambda pipe: pipe.map_samples(tagged),
    "compose": lambda pipe: pipe.compose(copied),
    "rsample": lambda pipe, probability: pipe.rsample(probability),
    "select": lambda pipe: pipe.select_fields("cls"),
    "keep": lambda pipe, modulus: pipe.filter(partial(is_kept, modulus)),
    "draw": lambda pipe: pipe.map_samples_with_rng(with_draw),
    "decode": lambda pipe: pipe.wds_decode(partial=True),
    "to_tuple": lambda pipe: pipe.to_tuple("__key__", "cls"),
    "key": lambda pipe: pipe.map(key_of),
    "batch": lambda pipe, size, drop_last: pipe.batch(size, drop_last=drop_last),
    "buckets": lambda pipe, size: pipe.bucket_samples(parity_of, boundaries=[0], batch_size=size),
    "unbatch": lambda pipe: pipe.unbatch(),
    "slice": lambda pipe, *positions: pipe.slice_samples(*positions),
    "with_epoch": lambda pipe, count: pipe.with_epoch(count),
}


def build(steps: Steps) -> Pipe:
    """Return the pipeline of some steps."""
    (kind, *source), *others = steps
    pipe = SOURCES[kind](*source)
    for name, *arguments in others:
        pipe = STAGES[name](pipe, *arguments)
    return pipe


def damage(path: str, member: str) -> None:
    """Truncate a shard in the data of a member; without such a member, replace it with data that is not an archive."""
    with open(path, "rb") as file:
        content = file.read()
    at = content.find(member.encode())
    with open(path, "wb") as file:
        file.write(content[: at + 600] if at >= 0 else b"no archive" * 100)


def write_shards(steps: Steps) -> None:
    """Write the shards that a pipeline reads into the working folder."""
    kind, name, sizes = steps[0][1:4] if steps[0][0] == "list" else steps[0][:3]
    for shard, samples in enumerate(shards_of(name, sizes)):
        if kind == "records":
            write_records(f"{name}-{shard}.msgpack", samples)
            continue
        build_shard(f"{name}-{shard}.tar{'.gz' if kind == 'gz' else ''}", samples)
    if kind == "indexed":
        write_manifest(Manifest(build_indexes(f"{name}-{{0..{len(sizes) - 1}}}.tar", num_workers=1)), f"{name}.json")
    for shard, left in steps[0][4] if steps[0][0] == "list" and steps[0][4:] else ():
        damage(f"{name}-{shard}.tar", f"{name}{shard}-{left}.")
    for other in (other for step in steps for other in others_of(step)):
        write_shards(other)
