"""Shuffling a list of shards permutes the whole list, of any length, in every loader."""

from __future__ import annotations

import io
import itertools
import sys
import tarfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from data_parallel_pipelines import open_service
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Shuffler
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

from wds_datapipes import DatasetSpec, ShardList, ShardReadingService, StatefulShards, merge_states, register_opener
from wds_datapipes.errors import ChangedShardError
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.state.shard_order import ShardOrder, guard_listings, remove_listings

Pipe = IterDataPipe[Any]
#: More than the 10,000 items that torch's shuffle buffers.
SHARDS = 12_000
PATTERN = f"{{00000..{SHARDS - 1}}}.tar"


def numbers(urls: Any) -> list[int]:
    return [int(url.rpartition("/")[2].removesuffix(".tar")) for url in urls]


def is_whole(order: list[int]) -> bool:
    """Whether an order is a permutation in which each part spans the whole list."""
    count = len(order)
    assert sorted(order) == list(range(count))
    mean_move = sum(abs(place - number) for place, number in enumerate(order)) / count / count
    tenth = order[: count // 10]
    return 0.32 < mean_move < 0.345 and min(tenth) < count // 100 and max(tenth) > count - count // 100


def flat(items: Any) -> Iterator[Any]:
    for item in items:
        yield from item if isinstance(item, list) else [item]


@pytest.mark.parametrize("kind", ["DataLoader", "service", "torchdata's service", "StatefulShards"])
def test_every_epoch_permutes_the_whole_list(kind: str) -> None:
    pipe: Pipe = ShardList(PATTERN).shuffle().sharding_filter().batch(100)
    if "service" in kind:
        service = ShardReadingService(2) if kind == "service" else MultiProcessingReadingService(num_workers=2)
        with DataLoader2(pipe, reading_service=service) as loader:
            orders = [numbers(flat(loader)) for _ in range(2)]
    else:
        data: Any = pipe if kind == "DataLoader" else StatefulShards(pipe, seed=1)
        orders = [numbers(flat(DataLoader(data, batch_size=None, num_workers=2))) for _ in range(2)]
    assert all(map(is_whole, orders))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "pipeline", [lambda urls: urls.sharding_filter().load_wds_shards(), lambda urls: urls.load_wds_records()]
)
def test_a_list_that_is_read_is_permuted_whatever_it_comes_from(pipeline: Any, folder: Path) -> None:
    urls = IterableWrapper([f"{number:05}.tar" for number in range(SHARDS)])
    spec = DatasetSpec({"datasets": [{"shards": PATTERN}]})
    for source in (urls, spec, ShardList(PATTERN).filter(bool).sharding_filter().cache_wds_shards("copies")):
        reader = pipeline(source.shuffle())
        [shuffled] = [stage for stage in graph_of(reader).stages if name_of(stage) == "Shuffler"]
        assert is_whole(numbers(shuffled))


def shuffled_by_lanes(urls: ShardList) -> Pipe:
    return urls.shuffle(lanes=8)


def shuffled_twice(urls: ShardList) -> Pipe:
    pipe: Pipe = urls.shuffle().shuffle().load_wds_shards().source  # both shuffle the whole list
    return pipe


@pytest.mark.parametrize("shuffle", [ShardList.shuffle, shuffled_by_lanes, shuffled_twice, iter])
def test_a_share_of_a_long_list_is_what_iterating_yields(shuffle: Any) -> None:
    """In 40 ms, including the digest of the list, a worker of 4,096 finds its 244 of a million shards."""
    urls = ShardList(PATTERN)
    list_of: Any = urls if shuffle is iter else shuffle(urls)
    for stage in (each for each in graph_of(list_of).stages if each is not urls):
        stage.set_seed(7)
    whole = list(list_of)
    for count, first in ((1, 0), (7, 3), (4096, 5), (SHARDS + 1, SHARDS)):
        pipe = list_of.sharding_filter()
        pipe.apply_sharding(count, first)
        for stage in (each for each in graph_of(list_of).stages if each is not urls):
            stage.set_seed(7)
        guard_listings(pipe, 0)
        listing = pipe.source_datapipe
        found = [(url, *listing.seen) for url in pipe]
        assert [(url, number) for url, number, _, last in found if url == last] == [
            (whole[place], place + 1) for place in range(first, SHARDS, count)
        ]
        assert listing.whole[::2] == [SHARDS, whole[-1]]
        remove_listings(pipe)
        assert pipe.source_datapipe is list_of


def test_a_long_list_resumes_from_the_digest_of_its_urls_too() -> None:
    """Earlier releases saved it like this."""
    urls = ShardList(PATTERN)
    saved = [ShardOrder(source) for source in (urls, IterableWrapper(urls.urls))]
    for listing in saved:
        assert len([*itertools.islice(listing, 9000)]) == 9000
    assert saved[0].seen[::2] == saved[1].seen[::2]
    assert saved[0].seen != saved[1].seen
    for listing in saved:
        later, changed = ShardOrder(ShardList(PATTERN)), ShardOrder(ShardList([*urls.urls[1:], urls.urls[0]]))
        later.expect(listing.seen)
        assert list(later) == urls.urls
        changed.expect(listing.seen)
        with pytest.raises(ChangedShardError, match=r"began with 9,000 items, up to 08999.tar, .* up to 09000.tar"):
            list(changed)


def test_a_share_of_a_long_list_takes_no_calls_for_the_shards_of_others() -> None:
    pipe: Any = ShardList(PATTERN).shuffle().sharding_filter()
    pipe.apply_sharding(4096, 5)
    guard_listings(pipe, 0)
    listing = pipe.source_datapipe
    list(pipe)  # the first pass computes the digest of the list
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        own = list(pipe)
    finally:
        sys.setprofile(None)
    assert len(own) == 3
    assert calls < SHARDS / 50
    assert listing.seen[0] == SHARDS


@pytest.mark.parametrize("name", ["{}.tar", "http://user:secret@host/{}.tar?token={}", 7])
def test_the_digest_of_a_list_does_not_depend_on_when_it_is_asked_for(name: Any) -> None:
    items = [name.format(number, number) if isinstance(name, str) else name + number for number in range(SHARDS)]
    items[5] = {"__url__": "a.tar"} if items[5] == 12 else items[5]
    listings = [ShardOrder(IterableWrapper(items)) for _ in range(3)]
    every, some, last = (
        [listing.seen for number, _ in enumerate(listing) if number % step == 0]
        for listing, step in zip(listings, (1, 997, SHARDS), strict=True)
    )
    assert every[::997] == some
    assert every[:1] == last
    assert [listing.whole for listing in listings] == [every[-1]] * 3
    assert "secret" not in repr(every)
    assert len({digest for _, digest, _ in every}) == SHARDS


class Samples(IterDataPipe[Any]):
    """Yields objects, and tracks those that are still referenced."""

    def __init__(self) -> None:
        self.held = weakref.WeakSet[Any]()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(100):
            sample: Any = type("Sample", (), {})()
            self.held.add(sample)
            yield sample


def test_the_digest_of_samples_keeps_none_of_them() -> None:
    samples = Samples()
    listing = ShardOrder(samples)
    assert max(len(samples.held) for _ in listing) < 4
    assert listing.seen[0] == 100


def spread(order: list[int]) -> int:
    """Return the maximum distance by which an item moves forward, which a buffer limits."""
    return max(number - place for place, number in enumerate(order))


@pytest.mark.parametrize("size", [1, 6000])
def test_a_given_buffer_size_is_respected(size: int) -> None:
    pipe = ShardList(PATTERN).shuffle(buffer_size=size)
    pipe.sharding_filter().load_wds_shards()
    order = numbers(pipe)
    assert sorted(order) == list(range(SHARDS))
    assert size // 2 <= spread(order) + 1 <= size


def test_shorter_lists_keep_the_order_of_torch() -> None:
    for count in (1, 500, 10_000):
        urls = [f"{number}.tar" for number in range(count)]
        ours, torchs = ShardList(urls).shuffle(), IterableWrapper(urls).shuffle()
        assert list(ours.set_seed(3)) == list(torchs.set_seed(3))


def test_shuffling_can_be_disabled() -> None:
    loader = DataLoader(ShardList(PATTERN).shuffle().sharding_filter(), batch_size=None, shuffle=False)
    assert numbers(loader) == list(range(SHARDS))


class Endless(IterDataPipe[str]):
    """Yields URLs forever."""

    def __iter__(self) -> Iterator[str]:
        yield from map("{}.tar".format, itertools.count())


@pytest.mark.parametrize(
    "urls",
    [
        lambda: ShardList("{0..6}.tar").cycle().filter(bool).with_length(20_000),
        lambda: ShardList("{0..6}.tar").resample_wds_shards(),
        lambda: IterableWrapper(Endless(), deepcopy=False),
    ],
)
def test_an_endless_list_is_shuffled_in_a_buffer(urls: Any) -> None:
    pipe = urls().shuffle()
    pipe.load_wds_shards()
    assert type(pipe) is Shuffler
    assert next(iter(pipe)).endswith(".tar")


def test_other_shuffles_remain_those_of_torch() -> None:
    samples = ShardList("{0..6}.tar").load_wds_shards().group_samples().shuffle()
    named = samples.map(str).shuffle()
    named.load_wds_shards()
    for pipe in (samples, named, IterableWrapper(range(SHARDS)).shuffle().sharding_filter().source_datapipe):
        assert type(pipe) is Shuffler
        assert pipe.buffer_size == 10_000


def open_tiny(url: str, /, **_: object) -> BinaryIO:
    name, written = url.rpartition("/")[2].removesuffix(".tar"), io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        member = tarfile.TarInfo(f"{name}.cls")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"1"))
    written.seek(0)
    return written


def test_a_long_list_resumes_exactly_and_elastically() -> None:
    count = 10_500
    register_opener("tiny", open_tiny, replace=True)

    def loader_of(workers: int, state: Any = None) -> Any:
        urls = ShardList(f"tiny://{{00000..{count - 1}}}.tar").shuffle().sharding_filter()
        return open_service(urls.load_wds_shards().group_samples().to_tuple("__key__"), workers, state)

    with loader_of(2) as loader:
        items = iter(loader)
        begun = [key for (key,) in (next(items) for _ in range(10_200))]
        state = loader.state_dict()
        rest = [key for (key,) in items]
    assert is_whole(list(map(int, begun + rest)))
    assert len(repr(state)) < 3000
    with loader_of(2, state) as loader:
        assert [key for (key,) in loader] == rest
    with loader_of(3, merge_states([state])) as loader:
        assert sorted(key for (key,) in loader) == sorted(rest)
