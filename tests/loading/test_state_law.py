"""One law for states: a run resumed from a state yields the rest of this epoch, and the next one.

It holds for a table of pipelines, which resume at their position or by replay, with each loader and number of workers.
Random pipelines, other ranks and other loaders than the one that saved the state are in test_random_pipelines.py.
"""

from __future__ import annotations

import inspect
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2
from torchdata.stateful_dataloader import StatefulDataLoader
from users_stages import Buckets, OwnShuffler

from wds_datapipes import (
    ImageDecoder,
    IndexedSamples,
    RandomResizedCrop,
    ShardList,
    ShardReadingService,
    Stage,
    StatefulShards,
)
from wds_datapipes.codecs.extensions import ExtensionDecoder
from wds_datapipes.errors import StateError
from wds_datapipes.index import ShardIndex
from wds_datapipes.pipes.state.pipeline_state import check_state
from wds_datapipes.testing import build_shard
from wds_datapipes.writing import RecordWriter

pytestmark = [
    # torchdata calls it whenever a StatefulDataLoader is created.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Three workers are more than a small machine has CPUs.
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),
]

Pipe = Any
Build = Callable[[Pipe], Pipe]

SIZES = {"": (4, 0, 6, 1, 5, 2), "a": (7, 0, 5, 1), "b": (3, 4)}


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for name, sizes in SIZES.items():
            for shard, size in enumerate(sizes):
                numbers = [(f"{name}{shard}-{n}", str(n)) for n in range(size)]
                samples = [{"__key__": key, "cls": n, "txt": "x" * (5 * int(n))} for key, n in numbers]
                build_shard(f"{name}{shard}.tar", samples)
                build_shard(f"more-{name}{shard}.tar", [{"__key__": key, "json": n} for key, n in numbers])
                if not name and samples:
                    with RecordWriter(RECORDS[shard]) as records:
                        for sample in samples:
                            records.write(sample)
        yield


#: The same samples as records; shards without any are left out.
RECORDS = {
    shard: f"{shard}.{('jsonl', 'cbors.gz', 'msgpack', 'jsonl.zst')[shard % 4]}"
    for shard, size in enumerate(SIZES[""])
    if size
}


def as_it_is(item: Any) -> Any:
    return item


def twice(item: Any) -> list[Any]:
    return [item, item]


def number_in(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def is_even(sample: dict[str, Any]) -> bool:
    return number_in(sample) % 2 == 0


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def shard_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])[0]


def parity(sample: dict[str, Any]) -> int:
    return number_in(sample) % 2


def length(sample: dict[str, Any]) -> int:
    return len(sample["txt"]) + 1


def sizes_in(index: ShardIndex) -> Any:
    return index.sample_sizes


def draw_beside(item: Any, rng: Random) -> Any:
    return item, rng.random()


def tokens_of(sample: dict[str, Any]) -> dict[str, Any]:
    number = number_in(sample)
    return {"__key__": sample["__key__"], "tokens": torch.arange(2 * number % 5 + 5 * (number > 3))}


def is_member_wanted(member: Any) -> bool:
    return not member.name.endswith("3.cls")


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": sample.get("drawn", 0) + rng.random()}


def with_image(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "ppm": b"P6 4 4 255 " + bytes(range(48))}


#: Decodes a random row of the image.
CROPS = ImageDecoder("rgb8", crop=RandomResizedCrop((1, 4), scale=(0.2, 0.3), ratio=(3, 5)))


def number_of(url: str) -> int:
    return int(int(url[0]) == 3)


def second(pair: Any) -> Any:
    return pair[1]


def more_of(url: str) -> str:
    return f"more-{url}"


def some(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """None, one or several items from one."""
    return [{**sample, "part": part} for part in range(number_in(sample) % 4)]


def every_second(items: Any) -> Any:
    return itertools.islice(items, 0, None, 2)


def neighbours(items: Iterator[Any]) -> Iterator[Any]:
    return itertools.pairwise(items)


def split(name: str = "", open_shards: int = 1) -> Pipe:
    shards = ShardList([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))])
    return shards.shuffle().sharding_filter().load_wds_shards(open_shards=open_shards).group_samples()


def drawn(name: str = "", count: int | None = None, open_shards: int = 1) -> Pipe:
    shards = ShardList([f"{name}{shard}.tar" for shard in range(len(SIZES[name]))])
    return shards.resample_wds_shards(count).load_wds_shards(open_shards=open_shards).group_samples()


def recorded(**options: Any) -> Pipe:
    return ShardList([*RECORDS.values()]).shuffle().sharding_filter().load_wds_records(**options)


def listed() -> Pipe:
    return IterableWrapper(range(24)).shuffle().sharding_filter()


# Stages of users ----------------------------------------------------------------------------------------------------


class Declared(Stage[Any]):
    """Keeps nothing between two items, and declares that."""

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
    """Yields each item with the two before it, and has a state that contains them."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.before: list[str] = []
        self.is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.is_resumed:
            self.before = []
        self.is_resumed = False
        for item in self.source:
            self.before.append(key_of(item))  # the very list that state_dict() has returned
            del self.before[:-3]
            yield tuple(self.before)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any], again: object = ()) -> None:
        self.before, self.is_resumed = [*state["before"]], True


class Windows(IterDataPipe[Any]):
    """Buffers items, and declares nothing."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.pairwise(self.source)


class InMain(Windows):
    """Stays in the main process."""

    def is_replicable(self) -> bool:
        return False


class EverySecond(Stage[Any]):
    """Counts items, and falsely declares that it keeps nothing."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(iter(self.source), 0, None, 2)


# The table ----------------------------------------------------------------------------------------------------------


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
EXACT: dict[str, Callable[[], Pipe]] = {
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
        IndexedSamples("{0..5}.tar", batch_size=2).shuffle_samples(3).bucket_samples(length, batch_size=2)
    ),
    "indexed samples": lambda: IndexedSamples("{0..5}.tar", remainder="keep"),
    "indexed samples by windows": lambda: IndexedSamples("{0..5}.tar", order="window", window_shards=2, batch_size=4),
    "indexed samples in padded batches": lambda: IndexedSamples("{0..5}.tar", batch_size=4, remainder="pad").batch(2),
    "indexed samples by length": lambda: IndexedSamples(
        "{0..5}.tar", batch_size=2, bucket_by=sizes_in, bucket_window=3, remainder="keep"
    ),
    "an indexed mixture": lambda: IndexedSamples(
        {"a": "a{0..3}.tar", "b": "b{0..1}.tar"}, weights={"a": 1, "b": 2}, epoch_samples=25
    ),
    "an indexed mixture by windows": lambda: IndexedSamples(
        {"a": "a{0..3}.tar", "b": "b{0..1}.tar"}, weights={"a": 3, "b": 1}, order="window", window_shards=2
    ).shuffle_samples(4),
    "selected indexed samples": lambda: IndexedSamples("{0..5}.tar", select=slice(1, None, 2)).shuffle_samples(3),
    "joined indexed samples": lambda: IndexedSamples(
        "{0..5}.tar", join="more-{5,1,0}.tar", missing="keep"
    ).shuffle_samples(3),
    "joined indexed samples that have counterparts": lambda: IndexedSamples(
        "{0..5}.tar", join="more-{5,2,0}.tar", missing="skip", select=slice(1, None), remainder="keep"
    ),
    "packed indexed samples": lambda: (
        IndexedSamples("{0..5}.tar", batch_size=3, remainder="keep").map(tokens_of).pack_samples(9, "tokens")
    ),
    "a stage that keeps nothing": lambda: Declared(split().shuffle_samples(7)),
    "a mapper": lambda: OwnMapper(split().shuffle_samples(5), key_of),
    "a stage with a state": lambda: Pairs(split().shuffle_samples(7)),
    "a stage that holds samples back": lambda: Buckets(split(), 7),
}
#: So do these, whose next epoch starts where the last one has ended.
STREAMS: dict[str, Callable[[], Pipe]] = {
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
REPLAYED: dict[str, Callable[[], Pipe]] = {
    "batches taken apart": lambda: split().shuffle_samples(5).batch(3).unbatch_samples(collated=False),
    "parts of samples": lambda: split().map(some).unbatch_samples(collated=False).shuffle_samples(6),
    "columns of batches": lambda: split().to_tuple("__key__", "cls").batch(2).collate().unbatch_samples(),
    "functions": lambda: split().shuffle_samples(5).compose(neighbours).map_samples(as_it_is),
    "joined columns": lambda: split().add_columns(more_of).shuffle_samples(5),
    "a cache": lambda: split().map_samples_with_rng(draw).cache_samples().shuffle_samples(5),
    "a cache on disk": lambda: split().shuffle_samples(5).cache_samples("kept").rsample(0.8),
    "a mixture of such": lambda: split().add_columns(more_of).mix_samples(split("a").compose(neighbours), stop="all"),
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
#: These too, but only with the service.
IN_MAIN: dict[str, Callable[[], Pipe]] = {
    "a stage in the main process": lambda: InMain(split().shuffle_samples(5)),
    "a shuffle there": lambda: InMain(listed()).shuffle(buffer_size=5),
    "dispatched": lambda: split().sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING).map(as_it_is),
}
#: These have no state, with the reason.
REFUSED: dict[str, tuple[Callable[[], Pipe], str]] = {
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


# The loaders --------------------------------------------------------------------------------------------------------


class Service:
    """A `DataLoader2` with a `ShardReadingService`."""

    def __init__(self, build: Callable[[], Pipe], workers: int, state: Any = None) -> None:
        self.loader: Any = DataLoader2(build(), reading_service=ShardReadingService(workers))
        self.loader.seed(8)
        if state is not None:
            self.loader.load_state_dict(state)

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.loader.state_dict()))

    def close(self) -> None:
        self.loader.shutdown()


class Tracked:
    """A `StatefulShards` with torch's ``DataLoader``."""

    kind: Any = DataLoader

    def __init__(
        self, build: Callable[[], Pipe], workers: int, state: Any = None, batch_size: int | None = None, **options: Any
    ) -> None:
        self.data = StatefulShards(build(), seed=8)
        options |= {"batch_size": batch_size, "num_workers": workers}
        options["multiprocessing_context"] = "fork" if workers else None
        self.loader = self.kind(self.data, collate_fn=as_it_is if batch_size is None else list, **options)
        if state is not None:
            self.load(state)

    def load(self, state: Any) -> None:
        self.data.load_state_dict(state)

    def epoch(self) -> Iterator[Any]:
        return self.data.tracked(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.data.state_dict()))

    def close(self) -> None:
        self.loader._iterator = None


class Persistent(Tracked):
    """The same, with workers that persist across epochs."""

    def __init__(self, build: Callable[[], Pipe], workers: int, state: Any = None, **options: Any) -> None:
        super().__init__(build, workers, state, persistent_workers=True, **options)


class InStateful(Tracked):
    """A `StatefulShards` with a ``StatefulDataLoader``, whose loop is tracked."""

    kind = StatefulDataLoader


class Stateful(InStateful):
    """A ``StatefulDataLoader`` that saves and loads its own states."""

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.loader.state_dict()))


def comparable(item: Any) -> Any:
    if isinstance(item, torch.Tensor | np.ndarray):
        return item.tolist()
    if isinstance(item, dict):
        return {key: comparable(value) for key, value in item.items()}
    return [comparable(each) for each in item] if isinstance(item, list | tuple) else item


def items_of(items: Iterator[Any], count: int | None = None) -> list[Any]:
    return [comparable(item) for item in itertools.islice(items, count)]


def is_replayed(state: Any) -> bool:
    return '"replayed' in json.dumps(state).replace("\\", "")


def check_law(new: Callable[..., Any], *, cuts: int) -> str:
    """Check the law; return how the pipeline has resumed, or why it has no state.

    Args:
        new: creates a loader, from a state if one is given.
        cuts: how many states are saved, at even distances from the beginning of the second epoch to its end.
    """
    states, second = list[Any](), list[Any]()
    with closing(new()) as run:
        items_of(run.epoch())
        try:
            states.append(run.state())
            for item in run.epoch():
                second.append(comparable(item))
                states.append(run.state())
        except StateError as error:
            return str(error)
        end, third = run.state(), items_of(run.epoch())
    size = len(second)
    assert size > 1
    for turn, cut in enumerate(sorted({round(number * size / (cuts - 1)) for number in range(cuts)})):
        with closing(new(states[cut])) as run:
            items = run.epoch()
            head = items_of(items, turn % 3)
            # A state of the resumed run is equivalent.
            again, is_over = run.state() if head else states[cut], len(head) < turn % 3
            assert head + items_of(items) == second[cut:], f"after {cut} of {size} items"
            assert items_of(run.epoch()) == third, f"in the epoch after one resumed after {cut} items"
        if turn == cuts // 2:
            with closing(new(again)) as run:
                assert items_of(run.epoch()) == (third if is_over else second[cut + len(head) :])
    with closing(new(end)) as run:
        assert items_of(run.epoch()) == third
    return "replay" if is_replayed(states[1]) else "exact"


Batches = partial(Tracked, batch_size=2, drop_last=True)


@pytest.mark.parametrize("workers", [0, 1, 2, 3] if os.environ.get("WHOLE_SWEEPS") else [0, 3])
@pytest.mark.parametrize("name", [*EXACT, *REPLAYED, *IN_MAIN])
def test_the_service_resumes(name: str, workers: int) -> None:
    build = {**EXACT, **REPLAYED, **IN_MAIN}[name]
    found = check_law(partial(Service, build, workers), cuts=3 if workers else 9)
    assert found == ("exact" if name in EXACT else "replay")


#: With a ``StatefulDataLoader``, whose workers save their states themselves.
SAVED_BY_WORKERS = ("a chain", "a mixture in a mixture", "batches taken apart", "a cache on disk")


@pytest.mark.parametrize(
    ("name", "loader", "workers"),
    [
        *itertools.product([*EXACT, *REPLAYED], [Tracked], [0, 2]),
        *itertools.product(SAVED_BY_WORKERS, [Stateful], [0, 2]),
    ],
)
def test_a_dataset_resumes(name: str, loader: Any, workers: int) -> None:
    new = partial(loader, {**EXACT, **REPLAYED}[name], workers)
    assert check_law(new, cuts=3 if workers else 9) == ("exact" if name in EXACT else "replay")


@pytest.mark.parametrize(
    ("loader", "workers"),
    [
        *((Service, 0), (Service, 2), (Service, 3), (Tracked, 0), (Tracked, 2), (Persistent, 3), (InStateful, 2)),
        *((Batches, 0), (Batches, 2)),
    ],
)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_resumes(name: str, loader: Any, workers: int) -> None:
    new = partial(loader, STREAMS[name], workers)
    assert check_law(new, cuts=4 if workers else 7) == "exact"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("workers", [0, 1])
def test_pipelines_that_cannot_be_replayed_have_no_state(name: str, workers: int) -> None:
    build, message = REFUSED[name]
    with closing(Service(build, workers)) as run:
        next(run.epoch())
        with pytest.raises(StateError, match=message):
            run.state()


def test_declarations_of_user_stages_are_trusted_and_checked_by_check_resume() -> None:
    """The buffering of a class cannot be seen from outside: that is why `check_resume` exists."""
    with pytest.raises(AssertionError, match="after 1 of"):
        check_law(partial(Service, lambda: EverySecond(split()), 0), cuts=19)


# Every stage that is registered by torch, torchdata or this package -------------------------------------------------


def only(build: Build, index: int, pipe: Pipe) -> Pipe:
    """One of the pipelines that a stage splits one into."""
    return build(pipe)[index]


def as_files(pipe: Pipe) -> Pipe:
    return pipe.map(as_file)


def as_file(sample: dict[str, Any]) -> tuple[str, io.BytesIO]:
    return sample["__key__"], io.BytesIO(sample["txt"] + b"a\nb")


def as_lines(sample: dict[str, Any]) -> tuple[str, str]:
    return sample["__key__"], "a line" if parity(sample) else ""


#: What follows samples, for each functional name that can stand there.
AFTER_SAMPLES: dict[str, Build] = {
    # torch
    "batch": lambda pipe: pipe.batch(3),
    "collate": lambda pipe: pipe.to_tuple("__key__", "cls").batch(3).collate(),
    "concat": lambda pipe: pipe.concat(split()),
    "demux": partial(only, lambda pipe: pipe.demux(2, parity, buffer_size=-1), 0),
    "filter": lambda pipe: pipe.filter(is_even),
    "fork": partial(only, lambda pipe: pipe.fork(2, buffer_size=-1), 1),
    "groupby": lambda pipe: pipe.groupby(shard_of, buffer_size=100),
    "map": lambda pipe: pipe.map(as_it_is),
    "mux": lambda pipe: pipe.mux(split()),
    "sharding_filter": lambda _: ShardList("{0..5}.tar").load_wds_shards().group_samples().sharding_filter(),
    "shuffle": lambda pipe: pipe.shuffle(buffer_size=3),
    "unbatch": lambda pipe: pipe.batch(3).unbatch(),
    "zip": lambda pipe: pipe.zip(split()),
    # torchdata
    "add_index": lambda pipe: pipe.add_index(),
    "cycle": lambda pipe: pipe.cycle(2),
    "drop": lambda pipe: pipe.to_tuple("__key__", "cls").drop(1),
    "enumerate": lambda pipe: pipe.enumerate(),
    "flatmap": lambda pipe: pipe.flatmap(twice),
    "flatten": lambda pipe: pipe.to_tuple("__key__", "cls").flatten(1),
    "header": lambda pipe: pipe.header(7),
    "in_batch_shuffle": lambda pipe: pipe.batch(4).in_batch_shuffle(),
    "in_memory_cache": lambda pipe: pipe.in_memory_cache(),
    "lines_to_paragraphs": lambda pipe: pipe.map(as_lines).lines_to_paragraphs(),
    "map_batches": lambda pipe: pipe.map_batches(as_it_is, 3),
    "max_token_bucketize": lambda pipe: pipe.max_token_bucketize(30, len_fn=length, buffer_size=6),
    "memory_cell": lambda pipe: pipe.memory_cell(),
    "mux_longest": lambda pipe: pipe.mux_longest(split()),
    "prefetch": lambda pipe: pipe.prefetch(3),
    "random_split": partial(
        only, lambda pipe: pipe.random_split(weights={"a": 0.5, "b": 0.5}, seed=1, total_length=18), 0
    ),
    "readlines": lambda pipe: as_files(pipe).readlines(),
    "repeat": lambda pipe: pipe.repeat(2),
    "round_robin_demux": partial(only, lambda pipe: pipe.round_robin_demux(2, buffer_size=-1), 1),
    "rows2columnar": lambda pipe: pipe.batch(2).rows2columnar(),
    "set_length": lambda pipe: pipe.set_length(18),
    "shuffled_flatmap": lambda pipe: pipe.shuffled_flatmap(twice, buffer_size=4),
    "slice": lambda pipe: pipe.to_tuple("__key__", "cls").slice(0, 1),
    "threadpool_map": lambda pipe: pipe.threadpool_map(as_it_is, scheduled_tasks=4, max_workers=2),
    "unzip": partial(only, lambda pipe: pipe.to_tuple("__key__", "cls").unzip(2, buffer_size=-1), 0),
    "zip_longest": lambda pipe: pipe.zip_longest(split()),
    "zip_with_iter": lambda pipe: pipe.zip_with_iter(split(), key_fn=key_of, buffer_size=100),
    # this package
    "add_columns": lambda pipe: pipe.add_columns(more_of),
    "bucket_samples": lambda pipe: pipe.bucket_samples(length, batch_size=2),
    "associate": lambda pipe: pipe.associate({f"{s}-{n}": {"n": n} for s in range(6) for n in range(9)}),
    "cache_samples": lambda pipe: pipe.cache_samples(),
    "compose": lambda pipe: pipe.compose(every_second),
    "extract_keys": lambda pipe: pipe.extract_keys("cls"),
    "log_samples": lambda pipe: pipe.log_samples(first=0),
    "map_dict": lambda pipe: pipe.map_dict(cls=as_it_is),
    "map_samples": lambda pipe: pipe.map_samples(as_it_is),
    "map_samples_with_rng": lambda pipe: pipe.map_samples_with_rng(draw),
    "map_tuple": lambda pipe: pipe.to_tuple("__key__", "cls").map_tuple(as_it_is, None),
    "mix_samples": lambda pipe: pipe.mix_samples(split(), stop="all"),
    "non_empty": lambda pipe: pipe.non_empty(),
    "decode_batch": lambda pipe: pipe.map(with_image).batch(2).decode_batch(CROPS),
    "pack_samples": lambda pipe: pipe.map(tokens_of).pack_samples(9, "tokens"),
    "rename": lambda pipe: pipe.rename(label="cls"),
    "rename_keys": lambda pipe: pipe.rename_keys(label="cls"),
    "rsample": lambda pipe: pipe.rsample(0.7),
    "select_fields": lambda pipe: pipe.select_fields("cls"),
    "shuffle_samples": lambda pipe: pipe.shuffle_samples(5),
    "slice_samples": lambda pipe: pipe.slice_samples(1, None, 2),
    "to_tuple": lambda pipe: pipe.to_tuple("__key__", "cls"),
    "unbatch_samples": lambda pipe: pipe.to_tuple("__key__", "cls").batch(2).collate().unbatch_samples(),
    "wds_decode": lambda pipe: pipe.wds_decode(),
    "wds_encode": lambda pipe: pipe.wds_decode().wds_encode(),
    "with_epoch": lambda pipe: pipe.with_epoch(9),
    "with_length": lambda pipe: pipe.with_length(18),
}

#: What stands before .load_wds_shards(), or is built from it. These are replayed from the same seeds.
BEFORE_SHARDS: dict[str, Build] = {
    "batch": lambda urls: urls.batch(2).unbatch(),
    "bucket_samples": lambda urls: urls.bucket_samples(len, batch_size=2).unbatch(),
    "bucketbatch": lambda urls: urls.bucketbatch(2, batch_num=2, bucket_num=1).unbatch(),
    "concat": lambda urls: urls.concat(ShardList("more-{0..2}.tar")),
    "cache_samples": lambda urls: urls.cache_samples(),
    "cache_wds_shards": lambda urls: urls.cache_wds_shards("copies"),
    "compose": lambda urls: urls.compose(every_second),
    "cycle": lambda urls: urls.cycle(2),
    "enumerate": lambda urls: urls.enumerate().map(second),
    "demux": partial(only, lambda urls: urls.demux(2, number_of, buffer_size=-1), 0),
    "filter": lambda urls: urls.filter(bool),
    "flatmap": lambda urls: urls.flatmap(twice),
    "fork": partial(only, lambda urls: urls.fork(2, buffer_size=-1), 0),
    "groupby": lambda urls: urls.groupby(len).unbatch(),
    "header": lambda urls: urls.header(3),
    "in_batch_shuffle": lambda urls: urls.batch(4).in_batch_shuffle().unbatch(),
    "in_memory_cache": lambda urls: urls.in_memory_cache(),
    "log_samples": lambda urls: urls.log_samples(first=0),
    "map": lambda urls: urls.map(as_it_is),
    "map_batches": lambda urls: urls.map_batches(as_it_is, 2),
    "map_samples": lambda urls: urls.map_samples(as_it_is),
    "max_token_bucketize": lambda urls: urls.max_token_bucketize(12, len_fn=len, buffer_size=4).unbatch(),
    "memory_cell": lambda urls: urls.memory_cell(),
    "mix_samples": lambda urls: urls.mix_samples(ShardList("more-{0..2}.tar"), stop="all"),
    "mux": lambda urls: urls.mux(ShardList("more-{0..2}.tar")),
    "mux_longest": lambda urls: urls.mux_longest(ShardList("more-{0..2}.tar")),
    "non_empty": lambda urls: urls.non_empty(),
    "prefetch": lambda urls: urls.prefetch(3),
    "random_split": partial(
        only, lambda urls: urls.random_split(weights={"a": 0.7, "b": 0.3}, seed=1, total_length=6), 0
    ),
    "repeat": lambda urls: urls.repeat(2),
    "resample_wds_shards": lambda urls: ShardList("{0..4}.tar").resample_wds_shards(9),
    "round_robin_demux": partial(only, lambda urls: urls.round_robin_demux(2, buffer_size=-1), 0),
    "rsample": lambda urls: urls.rsample(0.7),
    "set_length": lambda urls: urls.set_length(6),
    "shard_expand": lambda urls: urls.shard_expand(),
    "shuffle": lambda urls: urls.shuffle(buffer_size=2),
    "shuffle_samples": lambda urls: urls.shuffle_samples(3),
    "shuffled_flatmap": lambda urls: urls.shuffled_flatmap(twice, buffer_size=3),
    "slice_samples": lambda urls: urls.slice_samples(1, None),
    "threadpool_map": lambda urls: urls.threadpool_map(as_it_is, scheduled_tasks=4, max_workers=2),
    "with_epoch": lambda urls: urls.with_epoch(3),
    "with_length": lambda urls: urls.with_length(6),
}
AFTER_MEMBERS: dict[str, Build] = {
    "batch": lambda members: members.batch(2).unbatch(),
    "filter": lambda members: members.filter(is_member_wanted),
    "map": lambda members: members.map(as_it_is),
    "prefetch": lambda members: members.prefetch(2),
    "shuffle": lambda members: members.shuffle(buffer_size=1),
    "slice_samples": lambda members: members.slice_samples(0, 20),
}

#: After samples, these resume at their position, and all others by replay.
AT_POSITION = {
    *("batch", "bucket_samples", "collate", "decode_batch", "filter", "map", "pack_samples"),
    *("extract_keys", "log_samples", "map_dict", "map_samples", "map_samples_with_rng", "map_tuple", "non_empty"),
    *("associate", "rename", "rename_keys", "rsample", "select_fields", "shuffle_samples", "slice_samples", "to_tuple"),
    *("mix_samples", "wds_decode", "wds_encode", "with_epoch", "with_length"),
}
#: In any position, this has no state if something before it draws: it keeps the order of the first epoch.
KEEPING = {"in_memory_cache"}
#: Names that stand in other positions in a pipeline. The file about process_shards has its law, as it uses no workers.
ELSEWHERE = {
    *("cache_wds_shards", "group_samples", "load_wds_records", "load_wds_shards", "process_shards"),
    "resample_wds_shards",
}
#: Stages that end a pipeline, so that nothing after them can be trained on. Their classes refuse a state.
WRITING = {"write_wds_shards"}


def after_samples(build: Build) -> Pipe:
    return build(split())


def before_shards(build: Build) -> Pipe:
    return build(ShardList("{0..5}.tar").shuffle().sharding_filter()).load_wds_shards().group_samples()


def after_members(build: Build) -> Pipe:
    return build(ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards()).group_samples()


SWEPT = [
    pytest.param(name, partial(place, build), id=f"{name} {place.__name__.replace('_', ' ')}")
    for place, table in (
        (after_samples, AFTER_SAMPLES),
        (before_shards, BEFORE_SHARDS),
        (after_members, AFTER_MEMBERS),
    )
    for name, build in table.items()
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "build"), SWEPT)
def test_every_stage_resumes_exactly_or_by_replay(name: str, build: Callable[[], Pipe]) -> None:
    found = check_law(partial(Service, build, 0), cuts=5)
    if name in KEEPING:
        assert "cannot be replayed" in found
    elif build.func is after_samples:  # type: ignore[attr-defined]  # it is a partial
        assert found == ("exact" if name in AT_POSITION else "replay")
    elif name == "with_epoch":
        assert "continues from one epoch to the next" in found
    else:
        assert found in ("exact", "replay")


def registered() -> dict[str, type]:
    """The classes of all functional names, except decoders that other tests have registered."""
    found: dict[str, type] = {}
    functions: dict[str, Any] = IterDataPipe.functions
    for name, function in functions.items():
        if hasattr(function, "__wrapped__"):
            found[name] = function.__wrapped__
        elif isinstance(function, partial):
            found[name] = function.args[0]
        else:
            assert isinstance(function.decoder, ExtensionDecoder)
    return found


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("wds_datapipes.")


def is_of_others(kind: type) -> bool:
    """Whether it was registered by a test of this project, or by other code."""
    return kind.__module__.partition(".")[0] not in ("torch", "torchdata", "wds_datapipes")


def test_every_registered_stage_is_swept() -> None:
    """Stages that cannot be built here, because a package or files are missing, are refused by their class alone."""
    unbuilt = {
        name: kind for name, kind in registered().items() if name not in AFTER_SAMPLES and not is_of_others(kind)
    }
    assert {name for name, kind in unbuilt.items() if is_ours(kind)} == ELSEWHERE | WRITING
    assert len(unbuilt) > 20
    assert len(registered()) > 110
    for name, kind in unbuilt.items():
        if name in ELSEWHERE or name == "trace_as_dataframe":  # it records requests, and is not a datapipe
            continue
        assert issubclass(kind, IterDataPipe | MapDataPipe), name
        # Without its end, which would shut down a service that never began.
        stage: Any = object.__new__(type(kind.__name__, (kind,), {"__del__": as_it_is, "__module__": kind.__module__}))
        sources = [each for each in inspect.signature(kind).parameters if "source" in each or "datapipe" in each]
        stage.__dict__[sources[0] if sources else "source_datapipe"] = split()
        with pytest.raises(StateError, match=kind.__name__.removesuffix("IterDataPipe")):
            check_state(stage)
