"""What webdataset's tests pin of orders, epochs, ranks, workers and mixtures.

The numbers in the names are explained in `contract.md`.
"""

from __future__ import annotations

import inspect
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import pytest
import webdataset
import yaml
from data_parallel_pipelines import open_service
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from wds_datapipes import DatasetSpec, DirectoryShards, ShardList
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes import ShardResampler
from wds_datapipes.testing import build_shard

COUNT = 47
TEN = "{0..9}"

Pipe = IterDataPipe[Any]


@pytest.fixture(autouse=True)
def shard(folder: Path) -> None:
    """A small version of the shard that most of webdataset's tests read."""
    build_shard("digits.tar", [{"__key__": f"{n:03}", "cls": f"{n}"} for n in range(COUNT)])


def theirs(urls: str | list[str] = "digits.tar", **options: Any) -> Any:
    return webdataset.WebDataset(urls, **{"shardshuffle": False, **options})


def ours(urls: str | list[str] = "digits.tar") -> Pipe:
    pipe: Pipe = ShardList(urls).sharding_filter().load_wds_shards().group_samples()
    return pipe


def urls_of(items: Iterable[dict[str, str]]) -> list[str]:
    return [item["url"] for item in items]


def epochs(pipe: Pipe, seed: int, count: int, workers: int = 0) -> list[list[Any]]:
    """The items of some epochs, as a loader with a seed yields them."""
    with open_service(pipe, workers, seed=seed) as loader:
        return [list(loader) for _ in range(count)]


# the order of shards


def test_10_the_seed_of_a_loader_gives_each_epoch_its_order() -> None:
    shards = webdataset.SimpleShardList(TEN)
    shards.seed = 17
    assert urls_of(shards) == urls_of(shards)
    assert urls_of(shards)[0] == "7"
    first, second = epochs(ShardList(TEN).shuffle(), 17, 2)
    assert sorted(first) == sorted(second) == list(ShardList(TEN))
    assert first != second
    assert epochs(ShardList(TEN).shuffle(), 17, 2) == [first, second]


def test_37_the_same_seed_reads_shards_in_the_same_order() -> None:
    urls = [build_shard(f"{n}.tar", [{"__key__": f"{n}", "cls": "1"}]) for n in range(10)]
    options = {"shardshuffle": 10, "seed": 0}
    assert list(theirs(urls, **options)) == list(theirs(urls, **options))
    pipes = [ShardList(urls).shuffle().load_wds_shards().group_samples().to_tuple("__url__") for _ in range(2)]
    first, second = epochs(pipes[0], 0, 2)
    assert epochs(pipes[1], 0, 2) == [first, second]
    assert first != second  # theirs has one order for all epochs
    assert sorted(first) == sorted(second) == [(url,) for url in urls]


def test_64_two_pipelines_of_one_seed_shuffle_alike_and_epochs_differ() -> None:
    stages = [webdataset.detshuffle(100, seed=5) for _ in range(2)]
    runs = [[list(stage.run(iter(range(100)))) for _ in range(2)] for stage in stages]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    ours = [epochs(IterableWrapper(range(100)).shuffle_samples(100), 5, 2) for _ in range(2)]
    assert ours[0] == ours[1]
    assert ours[0][0] != ours[0][1]
    assert all(sorted(epoch) == list(range(100)) for epoch in ours[0])


# shards with replacement


def test_08_ten_drawn_shards_have_as_many_samples() -> None:
    for n in range(3):
        build_shard(f"{n}.tar", [{"__key__": f"{k}", "cls": "1"} for k in range(COUNT)])
    pipe = ShardList("{0..2}.tar").resample_wds_shards(10).load_wds_shards().group_samples()
    their_pipe = webdataset.DataPipeline(
        webdataset.SimpleShardList("{0..2}.tar"), webdataset.resampled(10), webdataset.tarfile_to_samples()
    )
    for _ in range(2):
        assert len(list(pipe)) == len(list(their_pipe)) == 10 * COUNT


def test_14_drawn_shards_never_end() -> None:
    pipe = ShardList("digits.tar").resample_wds_shards().load_wds_shards().group_samples()
    their_pipe = theirs(resampled=True)
    got = list(islice(iter(pipe), 100))
    assert [sample["cls"] for sample in got] == [b"%d" % (n % COUNT) for n in range(100)]
    assert got == list(islice(iter(their_pipe), 100))


def test_38_every_pass_draws_differently_unless_a_loader_has_a_seed() -> None:
    def draw() -> Pipe:
        return ShardResampler(ShardList(TEN), 50)

    pipe = draw()
    passes = [list(pipe), list(pipe), list(draw())]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    resampled = webdataset.ResampledShards(TEN, nshards=50)
    assert urls_of(resampled) != urls_of(resampled)
    assert epochs(draw(), 3, 2) == epochs(draw(), 3, 2)
    assert epochs(draw(), 3, 2) != epochs(draw(), 4, 2)


def test_62_options_of_drawing_are_named() -> None:
    their_options = list(inspect.signature(webdataset.ResampledShards).parameters)
    assert their_options[:6] == ["urls", "nshards", "seed", "worker_seed", "deterministic", "max_urls"]
    pipe = ShardList(TEN)
    assert len(list(ShardResampler(pipe, 5, seed=1))) == len(list(pipe.resample_wds_shards(5))) == 5
    with pytest.raises(TypeError, match="positional"):
        ShardResampler(pipe, 5, 1)  # type: ignore[call-arg]  # what is tested


def test_39_a_mixture_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {
        "prefix": "s3://",
        "buckets": ["bucket"],
        "datasets": [
            {"name": "all", "shards": ["a-{0..2}.tar"]},
            {"name": "some", "shards": ["b-{0..9}.tar"], "choose": 4},
            {"buckets": "other", "shards": ["c-{0..1}.tar"], "resample": 7},
        ],
    }
    Path("spec.yaml").write_text(yaml.safe_dump(spec))
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")  # without it, webdataset 1.0.2 refuses every specification
    for urls in (list(DatasetSpec("spec.yaml")), urls_of(webdataset.MultiShardSample("spec.yaml"))):
        counts = Counter(url.split("-")[0] for url in urls)
        assert counts == {"s3://bucket/a": 3, "s3://bucket/b": 4, "s3://other/c": 7}
        assert len({url for url in urls if "/b-" in url}) == 4
    assert list(DatasetSpec(spec))[:3] == [f"s3://bucket/a-{n}.tar" for n in range(3)]


# ranks and workers


def test_09_without_ranks_and_workers_a_split_changes_nothing() -> None:
    stages = (webdataset.split_by_node, webdataset.split_by_worker)
    want = urls_of(webdataset.DataPipeline(webdataset.SimpleShardList(TEN), *stages))
    assert list(ShardList(TEN).sharding_filter()) == want == list(ShardList(TEN))


def test_measured_n_ranks_and_workers_come_only_from_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "WORKER": "1", "NUM_WORKERS": "2"}.items():
        monkeypatch.setenv(name, value)
    stages = (webdataset.split_by_node, webdataset.split_by_worker)
    assert urls_of(webdataset.DataPipeline(webdataset.SimpleShardList(TEN), *stages)) == ["4"]
    assert len(list(ShardList(TEN).sharding_filter())) == 10
    parts = {}
    for rank, worker in product(range(3), range(2)):
        pipe = ShardList(TEN).sharding_filter()
        apply_sharding(pipe, 3, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        apply_sharding(pipe, 2, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
        parts[rank, worker] = list(pipe)
    assert parts[1, 1] == ["3", "9"]  # the fourth of the six processes that split the data
    assert sorted(url for part in parts.values() for url in part) == list(ShardList(TEN))


def test_measured_p_without_a_split_every_worker_yields_all() -> None:
    pipe = ShardList("digits.tar").load_wds_shards().group_samples().to_tuple("cls")
    want = Counter({(b"%d" % n,): 3 for n in range(COUNT)})
    their_pipe = theirs(workersplitter=None).to_tuple("cls")
    assert Counter(epochs(pipe, 0, 1, workers=3)[0]) == want
    assert Counter(map(tuple, DataLoader(pipe, batch_size=None, num_workers=3))) == want
    assert Counter(map(tuple, DataLoader(their_pipe, batch_size=None, num_workers=3))) == want


def test_40_workers_without_a_shard_yield_nothing() -> None:
    their_pipe = theirs(empty_check=False).decode().to_tuple("cls")
    batches = list(DataLoader(ours().wds_decode().to_tuple("cls"), batch_size=3, num_workers=4))
    assert len(batches) == 16
    assert repr(batches) == repr(list(DataLoader(their_pipe, batch_size=3, num_workers=4)))
    batched = ours().wds_decode().to_tuple("cls").batch(3).collate()
    assert repr(batches) == repr(epochs(batched, 0, 1, workers=4)[0])


def test_41_a_last_batch_that_is_not_full_can_be_dropped() -> None:
    pipe = ours().wds_decode().to_tuple("cls")
    their_loader = webdataset.WebLoader(theirs().decode().to_tuple("cls"), batch_size=3, num_workers=1, drop_last=True)
    assert len(list(their_loader.unbatched())) == 45
    assert sum(len(batch) for (batch,) in DataLoader(pipe, batch_size=3, num_workers=1, drop_last=True)) == 45
    assert len(list(pipe.batch(3, drop_last=True).collate().unbatch_samples())) == 45


def test_42_batches_of_two_epochs() -> None:
    pipe = ours().wds_decode().to_tuple("cls")
    their_loader = webdataset.WebLoader(theirs().decode().to_tuple("cls"), batch_size=3, num_workers=1)
    assert len(list(their_loader.repeat(2))) == 32
    batched = pipe.batch(3).collate()
    assert [len(epoch) for epoch in epochs(batched, 0, 2, workers=1)] == [16, 16]
    assert len(list(batched.cycle(2))) == 32


def test_43_more_workers_than_shards_are_no_error() -> None:
    with pytest.raises(ValueError, match="fewer shards than workers"):
        list(DataLoader(theirs().to_tuple("cls"), batch_size=None, num_workers=2))
    pipe = ours().to_tuple("cls")
    want = [(b"%d" % n,) for n in range(COUNT)]
    assert epochs(pipe, 0, 1, workers=2) == [want]
    assert [tuple(item) for item in DataLoader(pipe, batch_size=None, num_workers=2)] == want
    with pytest.raises(EmptySourceError, match="fewer shards than workers or ranks"):
        epochs(ours().non_empty(), 0, 1, workers=2)


# epochs and lengths


def test_31_an_epoch_of_a_number_of_items_continues_where_the_last_one_ended() -> None:
    keys = [f"{n:03}" for n in range(COUNT)]
    their_pipe, pipe = theirs().with_epoch(193), ours().with_epoch(193)
    assert [sample["__key__"] for _ in range(3) for sample in their_pipe] == (keys * 5)[:193] * 3
    assert [sample["__key__"] for _ in range(3) for sample in pipe] == (keys * 20)[: 3 * 193]

    assert len(list(ours().cycle(2))) == len(list(theirs().repeat(nepochs=2))) == 2 * COUNT
    assert len(list(ours().batch(2).with_epoch(20))) == len(list(theirs().repeat(nbatches=20))) == 20
    assert len(list(theirs().batched(2, collation_fn=None).with_epoch(20))) == 20


@pytest.mark.filterwarnings("ignore:.with_length:UserWarning")  # theirs warns of its own stage
def test_32_a_length_is_declared_and_otherwise_there_is_none() -> None:
    for pipe in (ours(), theirs()):
        with pytest.raises(TypeError):
            len(pipe)
    assert len(ours().with_length(1793)) == len(theirs().with_length(1793)) == 1793
    assert len(list(ours().with_length(1793))) == len(list(theirs().with_length(1793))) == COUNT
    assert len(pickle.loads(pickle.dumps(ours().with_length(5)))) == 5


def test_72_repeating_a_number_of_times_of_batches_or_of_samples() -> None:
    source = [([1, 2], ["a", "b"])] * 3  # batches of two
    assert len(list(IterableWrapper(source).cycle(7))) == len(list(webdataset.repeatedly(source, nepochs=7))) == 21
    assert len(list(IterableWrapper(source).with_epoch(10))) == len(list(webdataset.repeatedly(source, nbatches=10)))
    assert len(list(webdataset.repeatedly(source, nsamples=10))) == 5
    assert len(list(IterableWrapper(source).unbatch_samples().with_epoch(10).batch(2))) == 5


# shards that are added during reading

SHARDS = [f"file{n}.tar" for n in range(5)]


def fill(folder: str) -> Path:
    path = Path(folder)
    path.mkdir()
    for age, name in enumerate(SHARDS):
        (path / name).write_bytes(b"")
        os.utime(path / name, (1000 + age, 1000 + age))
    return path


def name_of(url: str) -> str:
    """The original name of a shard that webdataset has renamed or that we have moved to the claims."""
    return re.sub(r"\._\d+_$|^[0-9a-f]{8}-", "", Path(url).name)


def taken(urls: Iterable[str], folder: Path) -> Iterator[str]:
    """The names of the shards; after the first, one is added and another removed."""
    for number, url in enumerate(urls):
        if number == 0:
            (folder / "late.tar").write_bytes(b"")
            (folder / SHARDS[3]).unlink()
        yield name_of(url)


def test_63_shards_are_taken_from_a_directory_by_age_and_deleted_kept_or_returned() -> None:
    want = [*SHARDS[:3], SHARDS[4], "late.tar"]
    after: Literal["delete", "keep"]
    for mode, after in (("unlink", "delete"), ("keep", "keep")):
        folder = fill(f"their-{mode}")
        listed = webdataset.shardlists.DirectoryShardList(f"{folder}/", "*.tar", poll=None, mode=mode, select="oldest")
        assert list(taken((item["url"] for item in listed), folder)) == want
        assert len(list(folder.iterdir())) == len(list(folder.glob("*.tar._done_"))) == (5 if mode == "keep" else 0)
        folder = fill(f"our-{mode}")
        assert list(taken(DirectoryShards(folder, after=after, timeout_s=0), folder)) == want
        assert list(folder.glob("*.tar")) == []
        assert sorted(path.name for path in folder.glob("done/*")) == (sorted(want) if mode == "keep" else [])

    folder = fill("their-return")
    listed = webdataset.shardlists.DirectoryShardList(f"{folder}/", "*.tar", poll=None)
    assert {Path(item["url"]).name.split("._")[0] for item in islice(listed, 100)} == set(SHARDS)
    folder = fill("our-return")
    oldest = DirectoryShards(folder, after="return")
    assert [name_of(url) for url in islice(oldest, 12)] == (SHARDS * 3)[:12]
    assert sorted(path.name for path in folder.glob("*.tar")) == SHARDS

    folder = fill("their-lost")
    (folder / SHARDS[0]).rename(folder / f"{SHARDS[0]}._99999999_")
    listed = webdataset.shardlists.DirectoryShardList(f"{folder}/", "*.tar", poll=None, mode="unlink")
    assert len(list(listed)) == 4  # it deletes the shard that the other reader had not finished
    assert list(folder.iterdir()) == []


# several sources


def test_65_sources_in_turn_or_drawn() -> None:
    def wrapped(*lists: list[int]) -> Pipe:
        first, *others = map(IterableWrapper, lists)
        mixed: Pipe = first.mix_samples(*others)
        return mixed

    assert len(list(wrapped([1] * 5, [2] * 5))) == len(list(mixed_by_them([1] * 5, [2] * 5))) == 10
    assert list(wrapped([1] * 4, [2], [3] * 2)) == list(mixed_by_them([1] * 4, [2], [3] * 2)) == [1, 2, 3, 1]

    three = ([2, 2], [1], [3, 3, 3])
    first, *others = map(IterableWrapper, three)
    longest = list(first.mix_samples(*others, stop="all"))
    assert longest == list(mixed_by_them(*three, longest=True)) == [2, 1, 3, 2, 3, 3]
    first, *others = map(IterableWrapper, three)
    drawn = first.mix_samples(*others, stop="all", weights=[1, 2, 3])
    their_drawn = webdataset.RandomMix(three, probs=[1, 2, 3], longest=True)
    assert Counter(drawn) == Counter(their_drawn) == Counter(longest)
    assert Counter(drawn.shuffle_samples(3)) == Counter(longest)


def mixed_by_them(*lists: list[int], longest: bool = False) -> Iterator[int]:
    yield from webdataset.RoundRobin(lists, longest=longest)
