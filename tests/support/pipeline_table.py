"""One table of pipelines for tests of orders and states, and the shards that they read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from record_files import write_records
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper
from users_stages import Buckets, InMain, OwnShuffler, Unchanged

from wds_datapipes import ImageDecoder, IndexedSamples, RandomResizedCrop, ShardList, Stage
from wds_datapipes.index import EpochOptions, Join, Pack, ShardIndex
from wds_datapipes.testing import build_shard

Pipe = Any
Build = Callable[[], Pipe]

#: The number of samples in each shard.
SIZES = {"": (4, 0, 6, 1, 5, 2), "a": (7, 0, 5, 1), "b": (3, 4)}
#: The same samples as records; shards without any are left out.
RECORDS = {
    shard: f"{shard}.{('jsonl', 'cbors.gz', 'msgpack', 'jsonl.zst')[shard % 4]}"
    for shard, size in enumerate(SIZES[""])
    if size
}


def write_shards(times: int = 1) -> None:
    """Write the shards and records of the pipelines to the working directory, each ``times`` as long."""
    for name, sizes in SIZES.items():
        for shard, size in enumerate(sizes):
            numbers = [(f"{name}{shard}-{n}", str(n)) for n in range(times * size)]
            samples = [{"__key__": key, "cls": n, "txt": "x" * (5 * int(n))} for key, n in numbers]
            build_shard(f"{name}{shard}.tar", samples)
            build_shard(f"more-{name}{shard}.tar", [{"__key__": key, "json": n} for key, n in numbers])
            if not name and samples:
                write_records(RECORDS[shard], samples)
            if name == "b":
                build_shard(f"{name}{shard}.tar.gz", samples)
    Path("cut.tar").write_bytes(Path("2.tar").read_bytes()[:4000])


def shards_of(times: int = 1) -> Any:
    """Return a fixture that runs the tests of a module in a folder with the shards, each ``times`` as long."""

    @pytest.fixture(autouse=True, scope="module")
    def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("shards"))
            write_shards(times)
            yield

    return shards


def all_keys(times: int = 1) -> list[str]:
    """Return the sorted keys of the samples in the default shards."""
    return sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES[""]) for number in range(times * size))


def as_it_is(item: Any) -> Any:
    return item


def number_in(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def is_even(sample: dict[str, Any]) -> bool:
    return number_in(sample) % 2 == 0


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def length(sample: dict[str, Any]) -> int:
    return len(sample["txt"]) + 1


def sizes_in(index: ShardIndex) -> Any:
    return index.sample_sizes


def without_some(index: ShardIndex) -> Any:
    return index.sample_sizes % 3 == 1


def draw_beside(item: Any, rng: Random) -> Any:
    return item, rng.random()


def refused(sample: dict[str, Any]) -> dict[str, Any]:
    if number_in(sample) % 3 == 1:
        raise ValueError(key_of(sample))
    return sample


def tokens_of(sample: dict[str, Any]) -> dict[str, Any]:
    number = number_in(sample)
    return {"__key__": sample["__key__"], "tokens": torch.arange(2 * number % 5 + 5 * (number > 3))}


def with_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": torch.arange(len(sample["cls"]) + len(sample["txt"]))}


def token_counts(index: ShardIndex) -> Any:
    return index.sample_sizes


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def with_image(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "ppm": b"P6 4 4 255 " + bytes(range(48))}


#: Decodes a random row of the image.
CROPS = ImageDecoder("rgb8", crop=RandomResizedCrop((1, 4), scale=(0.2, 0.3), ratio=(3, 5)))


def some(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Yields none, one or several items for each item."""
    return [{**sample, "part": part} for part in range(number_in(sample) % 4)]


def neighbours(items: Iterator[Any]) -> Iterator[Any]:
    return itertools.pairwise(items)


def of(urls: str | list[str], **options: Any) -> Pipe:
    return ShardList(urls).shuffle().sharding_filter().load_wds_shards(**options).group_samples()


def split(name: str = "", open_shards: int = 1) -> Pipe:
    return of([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))], open_shards=open_shards)


def drawn(name: str = "", count: int | None = None, open_shards: int = 1) -> Pipe:
    shards = ShardList([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))])
    return shards.resample_wds_shards(count).load_wds_shards(open_shards=open_shards).group_samples()


def recorded(**options: Any) -> Pipe:
    return ShardList([*RECORDS.values()]).shuffle().sharding_filter().load_wds_records(**options)


def listed() -> Pipe:
    return IterableWrapper(range(24)).shuffle().sharding_filter()


class Declared(Stage[Any]):
    """Keeps nothing between two items, and declares this."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield key_of(item)


class OwnMapper(Mapper):  # type: ignore[type-arg]  # torch declares a type parameter that its class does not take
    """torch's loop, which buffers nothing, with another function."""

    def _apply_fn(self, data: Any) -> Any:
        return key_of(data)


class Pairs(Stage[Any]):
    """Yields each item with the two previous ones, which its state contains."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.before: list[str] = []
        self.is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.is_resumed:
            self.before = []
        self.is_resumed = False
        for item in self.source:
            self.before.append(key_of(item))  # the same list that state_dict() returned
            del self.before[:-3]
            yield tuple(self.before)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before, self.is_resumed = [*state.get("before", ())], True


class Windows(Unchanged):
    """Buffers items, and declares nothing."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.pairwise(self.source)


class EverySecond(Declared):
    """Counts items, and falsely declares that it keeps nothing."""

    is_stateless = True

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(iter(self.source), 0, None, 2)


def long_chain() -> Pipe:
    pipe = drawn().rsample(0.8).shuffle_samples(6).slice_samples(1, None).map_samples_with_rng(draw).rsample(0.9)
    return pipe.shuffle_samples(4).log_samples(first=0).slice_samples(20).non_empty().to_tuple("__key__", "drawn")


def shuffled_thrice() -> Pipe:
    pipe = split().shuffle_samples(100, initial=2).rsample(0.8).shuffle_samples(5, initial=2)
    return pipe.map_samples_with_rng(draw).shuffle_samples(2).log_samples(first=0)


def packed(**options: Any) -> Pipe:
    return split().shuffle_samples(4).map(tokens_of).pack_samples(7, "tokens", open_rows=3, **options)


def nested() -> Pipe:
    return split("a").shuffle_samples(3).mix_samples(split("b"), weights=[2, 1], stop="all")


#: These resume at their position.
EXACT: dict[str, Build] = {
    "keys": lambda: split().shuffle_samples(5).map(key_of),
    "shards in lanes": lambda: (
        ShardList("{0..5}.tar").shuffle(lanes=2).sharding_filter().load_wds_shards().group_samples().map(key_of)
    ),
    "a chain": lambda: split().shuffle_samples(5).wds_decode().to_tuple("__key__", "cls").batch(3),
    "a long chain": long_chain,
    "random crops": lambda: split().shuffle_samples(5).map(with_image).wds_decode(CROPS).to_tuple("__key__", "ppm"),
    "random crops in batches": lambda: drawn(count=9).map(with_image).batch(2).decode_batch(CROPS, num_threads=2),
    "shuffles in a row": shuffled_thrice,
    "slices between shuffles": lambda: split().shuffle_samples(5).slice_samples(2, None, 2).shuffle_samples(2),
    "a shuffle of few bytes": lambda: split().shuffle_samples(30, max_bytes=150),
    "drawn shards": lambda: drawn(count=6).shuffle_samples(4),
    "shards in turn": lambda: split(open_shards=3).shuffle_samples(5).wds_decode().batch(2),
    "all shards in turn": lambda: split(open_shards=9),
    "drawn shards in turn": lambda: drawn(count=6, open_shards=2).shuffle_samples(3),
    "one shard": lambda: of("2.tar").shuffle_samples(3),
    "repeated shards": lambda: of("{0,2,0,2}.tar").shuffle_samples(5),
    "compressed shards": lambda: of("b{0,1}.tar.gz").shuffle_samples(3),
    "commands": lambda: of("pipe:cat {0..5}.tar").shuffle_samples(5),
    "a truncated shard": lambda: of("{0,2,cut,4}.tar", on_error="skip").shuffle_samples(4),
    "skipped samples": lambda: split().shuffle_samples(5).map_samples(refused, on_error="skip"),
    "records": lambda: recorded().shuffle_samples(5).batch(2),
    "records in turn": lambda: recorded(open_shards=3).rsample(0.8).shuffle_samples(3),
    "records and members": lambda: recorded().mix_samples(split("a", 2), stop="all").shuffle_samples(4),
    "a mixture of shards in turn": lambda: split("a", 2).mix_samples(split("b", 3), stop="all").shuffle_samples(4),
    "a mixture up to the first end": lambda: split("a").mix_samples(split("b"), weights=[3, 1]).shuffle_samples(3),
    "a mixture of all": lambda: split("a").mix_samples(drawn("b", 5), split(), stop="all").shuffle_samples(6),
    "a mixture in a mixture": lambda: split().mix_samples(nested(), stop="all").shuffle_samples(5).rsample(0.7),
    "a mixture in batches": lambda: split("a").mix_samples(split("b").filter(is_even), stop="all").batch(3),
    "a mixture without end": lambda: (
        split("a").mix_samples(drawn("b"), stop="never").shuffle_samples(9).slice_samples(30)
    ),
    "buckets": lambda: split().shuffle_samples(3).bucket_samples("cls", boundaries=[1, 2], batch_size=2).batch(2),
    "buckets of tokens": lambda: drawn(count=15).bucket_samples(length, max_tokens=40).map(as_it_is),
    "buckets of a mixture": lambda: (
        split("a")
        .mix_samples(drawn("b", 5).rsample(0.8), stop="all")
        .shuffle_samples(4)
        .bucket_samples(length, batch_size=3)
    ),
    "a mixture of buckets": lambda: (
        split("a").bucket_samples(length, batch_size=2).mix_samples(drawn("b", 5).batch(2), stop="all")
    ),
    "packed rows": lambda: packed(long_samples="truncate"),
    "packed parts": lambda: packed(long_samples="split", layout="cu_seqlens"),
    "random buckets": lambda: (
        split(open_shards=3).shuffle_samples(3).bucket_samples(length, batch_size=2).map_samples_with_rng(draw_beside)
    ),
    "random parts": lambda: packed(long_samples="split").map_samples_with_rng(draw_beside),
    "buckets of indexed samples": lambda: (
        IndexedSamples("{0..5}.tar").shuffle_samples(3).bucket_samples(length, batch_size=2)
    ),
    "indexed samples": lambda: IndexedSamples("{0..5}.tar", remainder="keep"),
    "indexed samples by windows": lambda: IndexedSamples(
        "{0..5}.tar", order="window", epoch=EpochOptions(window_shards=2), global_batch_size=4
    ),
    "padded indexed samples": lambda: IndexedSamples("{0..5}.tar", global_batch_size=4, remainder="pad"),
    "indexed samples in lanes": lambda: IndexedSamples(
        "{0..5}.tar", order="window", epoch=EpochOptions(window_shards=2), global_batch_size=8, lanes=4, remainder="pad"
    ).shuffle_samples(3),
    "an indexed mixture in lanes": lambda: IndexedSamples(
        {"a": "a{0..3}.tar", "b": "b{0..1}.tar"},
        weights={"a": 3, "b": 1},
        global_batch_size=8,
        lanes=2,
        remainder="keep",
        epoch=EpochOptions(samples=50, bucket_by=sizes_in, bucket_window=2),
    ),
    "indexed samples by length": lambda: IndexedSamples(
        "{0..5}.tar", global_batch_size=4, epoch=EpochOptions(bucket_by=sizes_in, bucket_window=3), remainder="keep"
    ),
    "an indexed mixture": lambda: IndexedSamples(
        {"a": "a{0..3}.tar", "b": "b{0..1}.tar"}, weights={"a": 1, "b": 2}, epoch=EpochOptions(samples=25)
    ),
    "an indexed mixture by windows": lambda: IndexedSamples(
        {"a": "a{0..3}.tar", "b": "b{0..1}.tar"},
        weights={"a": 3, "b": 1},
        order="window",
        epoch=EpochOptions(window_shards=2),
    ).shuffle_samples(4),
    "selected indexed samples": lambda: IndexedSamples("{0..5}.tar", select=slice(1, None, 2)).shuffle_samples(3),
    "indexed samples without some": lambda: IndexedSamples(
        "{0..5}.tar", global_batch_size=4, epoch=EpochOptions(exclude=without_some)
    ),
    "joined indexed samples": lambda: IndexedSamples(
        "{0..5}.tar", join=Join("more-{5,1,0}.tar", "keep")
    ).shuffle_samples(3),
    "joined indexed samples that have counterparts": lambda: IndexedSamples(
        "{0..5}.tar", join=Join("more-{5,2,0}.tar", "skip"), select=slice(1, None), remainder="keep"
    ),
    "packed indexed samples": lambda: (
        IndexedSamples("{0..5}.tar", global_batch_size=4, remainder="keep").map(tokens_of).pack_samples(9, "tokens")
    ),
    "planned rows": lambda: (
        IndexedSamples(
            "{0..5}.tar",
            global_batch_size=4,
            epoch=EpochOptions(pack=Pack(length=token_counts, row=40, window=20, long_samples="split")),
        )
        .map_samples(with_tokens)
        .pack_rows("tokens")
    ),
    "a stage that keeps nothing": lambda: Declared(split().shuffle_samples(7)),
    "a mapper": lambda: OwnMapper(split().shuffle_samples(5), key_of),
    "a stage with a state": lambda: Pairs(split().shuffle_samples(7)),
    "a stage that holds samples back": lambda: Buckets(split(), 7),
}
#: So do these, whose next epoch starts where the previous one ended.
STREAMS: dict[str, Build] = {
    "batches": lambda: split().shuffle_samples(4).map_samples_with_rng(draw).batch(2).with_epoch(7),
    "a shuffle after it": lambda: drawn().map_samples_with_rng(draw).with_epoch(13).shuffle_samples(5),
    "a small shuffle after it": lambda: split().with_epoch(9).shuffle_samples(30, max_bytes=150),
    "a filter after it": lambda: drawn().shuffle_samples(3).with_epoch(23).filter(is_even),
    "a mixture": lambda: split("a").shuffle_samples(3).mix_samples(drawn("b"), stop="never").with_epoch(12),
    "shards in turn": lambda: drawn(open_shards=3).shuffle_samples(4).with_epoch(11),
    "buckets in it": lambda: split().bucket_samples(length, batch_size=2).with_epoch(16),
    "buckets after it": lambda: drawn().with_epoch(13).bucket_samples(length, max_tokens=50),
    "packed rows": lambda: packed(long_samples="split").with_epoch(8),
}
#: These resume by replay.
REPLAYED: dict[str, Build] = {
    "batches taken apart": lambda: split().shuffle_samples(5).batch(3).unbatch(),
    "parts of samples": lambda: split().map(some).unbatch().shuffle_samples(6),
    "columns of batches": lambda: split().to_tuple("__key__", "cls").batch(2).collate().unbatch_samples(),
    "functions": lambda: split().shuffle_samples(5).compose(neighbours).map_samples(as_it_is),
    "a cache": lambda: split().map_samples_with_rng(draw).cache_samples().shuffle_samples(5),
    "a cache on disk": lambda: split().shuffle_samples(5).cache_samples("kept").rsample(0.8),
    "a mixture of such": lambda: split().compose(neighbours).mix_samples(split("a").compose(neighbours), stop="all"),
    "a shuffle of batches": lambda: split().batch(2).shuffle_samples(3),
    "a shuffle of buckets": lambda: split().bucket_samples(length, batch_size=2).shuffle_samples(3),
    "buckets of rows": lambda: packed(long_samples="split").bucket_samples("tokens", max_tokens=8),
    "a state before a shuffle": lambda: Pairs(split()).shuffle_samples(4),
    "torch's shuffle": lambda: split().shuffle(buffer_size=7),
    "a subclass of it": lambda: OwnShuffler(split(), buffer_size=7),
    "a stage that declares nothing": lambda: Windows(split().shuffle_samples(5)),
    "no shards": listed,
    "zipped": lambda: listed().zip(listed()),
}
#: These have no state with workers, because a stage runs in the main process.
IN_MAIN: dict[str, Build] = {
    "a stage in the main process": lambda: Windows(InMain(split().shuffle_samples(5))),
    "a shuffle there": lambda: Windows(InMain(listed())).shuffle(buffer_size=5),
}
#: These have no state, with the reason.
REFUSED: dict[str, tuple[Build, str]] = {
    "a stream in a mixture": (
        lambda: split("a").with_epoch(4).mix_samples(split("b"), stop="all"),
        "EpochSetter .* no position before SampleMixer. Put it at the end of the pipeline",
    ),
    "a stream in a stream": (lambda: drawn().with_epoch(7).with_epoch(3), "no position before EpochSetter"),
    "a stream of functions": (
        lambda: split().compose(neighbours).with_epoch(9),
        "StreamComposer has no position in the shards.* cannot be replayed: EpochSetter continues",
    ),
    "a cache of the first order": (
        lambda: listed().in_memory_cache(),
        "cannot be replayed: InMemoryCacheHolder keeps the order of the epoch in which it was filled",
    ),
}
