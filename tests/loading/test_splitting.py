"""The split of the data among ranks and workers, and the warnings if it is not split, or split twice."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from error_facts import naming
from numbered_shards import write_numbered
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info, graph_settings
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from users_stages import OwnSplit

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.loading.splitting import split_by_rank, split_by_worker
from wds_datapipes.pipes.split_advice import advice_for_split, log_idle_processes
from wds_datapipes.types import Instance


class TestInstances:
    """torch's ``DataLoader`` numbers the first worker of every rank, then the second of every rank."""

    @pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (3, 1), (4, 3)])
    def test_shards_are_split_as_by_torch(self, ranks: int, workers: int) -> None:
        shards = 13
        owned = {}
        for rank in range(ranks):
            for worker in range(workers):
                pipe: Any = IterableWrapper(range(shards)).sharding_filter()
                graph_settings.apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
                pipe = split_by_worker(pipe, Instance(worker=worker, workers=workers))
                owned[rank, worker] = list(pipe)
                torchs: Any = IterableWrapper(range(shards)).sharding_filter()
                graph_settings.apply_sharding(torchs, ranks * workers, worker * ranks + rank)
                assert owned[rank, worker] == list(torchs)
                assert len(pipe) == len(torchs)
        of_ranks = [sum(len(owned[rank, worker]) for worker in range(workers)) for rank in range(ranks)]
        assert max(of_ranks) - min(of_ranks) <= 1
        assert sorted(itertools.chain(*owned.values())) == list(range(shards))

    @pytest.mark.parametrize(("ranks", "workers"), [(2, 1), (3, 2)])
    def test_a_stage_that_does_not_distinguish_splits_keeps_its_rank(self, ranks: int, workers: int) -> None:
        found = []
        for rank, worker in itertools.product(range(ranks), range(workers)):
            instance = Instance(rank, ranks, worker, workers)
            pipe = split_by_rank(OwnSplit(IterableWrapper(range(13))), instance)
            found.append(list(split_by_worker(pipe, instance)))
        assert sorted(itertools.chain(*found)) == list(range(13))
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.fixture
def urls(tmp_path: Path) -> str:
    return write_numbered(tmp_path, [5] * 4)


def samples(shards: Any) -> Any:
    return shards.load_wds_shards().group_samples().to_tuple("__key__")


def messages_of(loader: Any) -> list[str]:
    """Read an epoch, and return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    return [str(each.message) for each in caught]


def by_service(pipe: Any, workers: int, **options: Any) -> list[str]:
    with DataLoader2(pipe, reading_service=ShardReadingService(workers, **options)) as loader:
        return messages_of(loader)


def by_tracked_loader(pipe: Any, workers: int) -> list[str]:
    data = StatefulShards(pipe)
    return messages_of(data.tracked(DataLoader(data, batch_size=None, num_workers=workers)))


def by_torchs_loader(pipe: Any, workers: int) -> list[str]:
    loader = DataLoader(pipe, batch_size=None, num_workers=workers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(loader)
    except UserWarning as error:  # in a worker, whose warnings do not reach this process
        return [str(error).partition("UserWarning: ")[2]]
    return []


def by_torchdatas_service(pipe: Any, workers: int, **options: Any) -> list[str]:
    service = MultiProcessingReadingService(workers, **options) if workers else InProcessReadingService()
    with DataLoader2(pipe, reading_service=service) as loader:
        return messages_of(itertools.chain(loader, loader))


READERS = [by_service, by_tracked_loader, by_torchs_loader, by_torchdatas_service]


def keep(pipe: Any, _: Any) -> Any:
    return pipe


def keep_all(pipe: Any, *_: Any) -> Any:
    return pipe


class OwnShards(IterDataPipe[str]):
    """Lists the shards of its worker."""

    def __init__(self, urls: str) -> None:
        self.urls = list(ShardList(urls))

    def __iter__(self) -> Iterator[str]:
        info = get_worker_info()
        yield from self.urls if info is None else self.urls[info.id :: info.num_workers]


class TestWithoutASplit:
    @pytest.mark.parametrize("read", READERS)
    def test_each_loader_says_which_line_is_missing(self, read: Callable[..., list[str]], urls: str) -> None:
        (message,) = read(samples(ShardList(urls).shuffle()), 2)
        assert message.startswith(
            "2 workers read all of ShardList, because no stage splits it: each sample is yielded 2 times"
        )
        assert "Put .sharding_filter() after the list of shards" in message

    @pytest.mark.parametrize("read", READERS)
    def test_one_reader_needs_no_split(self, read: Callable[..., list[str]], urls: str) -> None:
        assert read(samples(ShardList(urls)), 1) == []

    def test_one_source_of_a_mixture_is_enough(self, urls: str) -> None:
        pipe = samples(ShardList(urls).sharding_filter()).mix_samples(samples(ShardList(urls)), stop="all")
        (message,) = by_torchs_loader(pipe, 2)
        assert "2 workers read all of ShardList" in message

    def test_only_the_service_dispatches(self, urls: str) -> None:
        source: Any = samples(ShardList(urls))
        pipe = source.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
        assert by_service(pipe, 2) == []
        (message,) = by_torchs_loader(pipe, 2)
        assert message.startswith("2 workers read all of ShardList, because no stage splits it")

    @pytest.mark.parametrize(
        "make",
        [
            lambda urls: samples(ShardList(urls).sharding_filter()),
            lambda urls: samples(ShardList(urls).resample_wds_shards(3)),
            lambda urls: samples(ShardList(urls)).with_epoch(4),
            lambda urls: samples(ShardList(urls)).sharding_filter(),
        ],
    )
    @pytest.mark.parametrize("read", [by_service, by_torchs_loader])
    def test_intended_reading_of_everything_does_not_warn(
        self, read: Callable[..., list[str]], make: Callable[[str], Any], urls: str
    ) -> None:
        assert read(make(urls), 2) == []

    def test_a_user_function_may_split(self, urls: str) -> None:
        assert by_service(samples(ShardList(urls)), 2, worker_init_fn=keep) == []
        assert by_torchdatas_service(samples(ShardList(urls)), 2, worker_reset_fn=keep_all) == []

    def test_a_users_source_may_split(self, urls: str) -> None:
        assert by_torchs_loader(samples(OwnShards(urls)), 2) == []

    def test_indexed_samples_split_themselves(self, urls: str) -> None:
        assert by_torchs_loader(IndexedSamples(urls, global_batch_size=2).to_tuple("__key__"), 2) == []


class TestIdleProcesses:
    @pytest.mark.parametrize("kind", ["service", "StatefulShards", "tracked", "DataLoader"])
    def test_fewer_shards_than_workers_are_logged_once(self, kind: str, urls: str, tmp_path: Path) -> None:
        pipe = samples(ShardList(urls).shuffle().sharding_filter())
        handler = logging.FileHandler(tmp_path / "log", delay=True)  # workers write to it, too
        logger = logging.getLogger("wds_datapipes")
        logger.addHandler(handler)
        try:
            if kind == "service":
                with DataLoader2(pipe, reading_service=ShardReadingService(6)) as service:
                    assert sorted(service) == sorted(service)
            else:
                is_plain = kind == "DataLoader"
                data: Any = pipe if is_plain else StatefulShards(pipe)
                loader = DataLoader(data, batch_size=None, num_workers=6, persistent_workers=is_plain)
                for _ in range(2):
                    list(data.tracked(loader) if kind == "tracked" else loader)
        finally:
            logger.removeHandler(handler)
            handler.close()
        (line,) = (tmp_path / "log").read_text().splitlines()
        assert line.startswith(".sharding_filter() splits 4 shards between 6 processes, which leaves 2 of them without")

    @pytest.mark.parametrize(
        ("read", "ranks", "idle"),
        [
            (lambda urls: samples(ShardList(urls).sharding_filter()), 1, None),
            (lambda urls: samples(ShardList(urls).sharding_filter()), 4, "between 8 processes, which leaves 4 "),
            (lambda urls: samples(IterableWrapper([urls]).map(str).sharding_filter()), 1, " 1 shard .* leaves 1 "),
            (lambda urls: samples(ShardList(urls).sharding_filter()).with_epoch(9), 4, None),
            (lambda urls: samples(ShardList(urls)).with_length(3).sharding_filter(), 4, None),
            (lambda urls: samples(ShardList(urls)).sharding_filter(), 4, None),
            (lambda urls: IterableWrapper([0]).sharding_filter(), 4, None),
            (lambda urls: IndexedSamples(urls), 16, None),
        ],
    )
    def test_only_shards_that_are_split_once_are_counted(
        self, read: Any, ranks: int, idle: str | None, urls: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        log_idle_processes(read(urls), workers=2, ranks=ranks)
        assert len(caplog.messages) == (idle is not None)
        if idle is not None:
            assert re.search(idle, caplog.text)


class TestRanks:
    def test_a_service_splits_between_all_ranks_unless_told_otherwise(
        self, urls: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("wds_datapipes.loading.service.service.ranks_of_run", lambda: 2)
        pipe = samples(ShardList(urls).sharding_filter())
        assert ShardReadingService().group_of(pipe).is_split
        assert not ShardReadingService(distributed=False).group_of(pipe).is_split
        assert ShardReadingService(distributed=(1, 3)).group_of(pipe).rank == Instance(1, 3)
        graph_settings.apply_sharding(pipe, 2, 1, SHARDING_PRIORITIES.DISTRIBUTED)  # by the program itself
        assert not ShardReadingService().group_of(pipe).is_split

    def test_ranks_and_workers_are_counted(self) -> None:
        advice = advice_for_split(IterableWrapper(range(3)), workers=3, ranks=2)
        assert advice.startswith(
            "2 ranks and 3 workers read all of IterableWrapper, because no stage splits it: each sample is yielded 6"
        )

    @pytest.mark.parametrize("kind", ["service", "StatefulShards"])
    def test_torchrun_without_a_process_group_warns(
        self, kind: str, urls: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("WORLD_SIZE", "2")
        pipe = samples(ShardList(urls).sharding_filter())
        service = ShardReadingService()
        loader: Any = StatefulShards(pipe) if kind == "StatefulShards" else DataLoader2(pipe, reading_service=service)
        with pytest.warns(UserWarning, match=naming("2 ranks", "torchrun")):
            list(loader)

    def test_stateful_shards_created_too_early_are_refused(self, urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = StatefulShards(samples(ShardList(urls).sharding_filter()))
        monkeypatch.setattr("wds_datapipes.loading.stateful_dataset.dataset.ranks_of_run", lambda: 2)
        with pytest.raises(RuntimeError, match="created before init_process_group was called"):
            list(data)


class IterableDatasetShard(IterableDataset[Any]):
    """Splits another dataset, as the class of that name in accelerate and transformers does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.dataset):
            if number % 2 == 0:
                yield item


class Wrapped(IterableDataset[str]):
    """Reads a pipeline that torch does not see, and yields its warnings."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __iter__(self) -> Iterator[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(self.pipe)
        yield from (str(warning.message) for warning in caught)


class TestAHiddenPipeline:
    def test_a_split_that_no_loader_finds_warns(self, urls: str) -> None:
        data = Wrapped(samples(ShardList(urls).sharding_filter()))
        (text,) = DataLoader(data, batch_size=None, num_workers=2)
        assert "Each of 2 workers reads all shards" in text
        assert "is a Wrapped" in text

    def test_splitting_the_items_of_a_rank_warns(self, urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
        shard = IterableDatasetShard(samples(ShardList(urls).sharding_filter()))
        assert len(list(shard)) == 10
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        with pytest.warns(UserWarning, match=r"Each of 2 ranks reads all shards.*accelerator\.prepare"):
            list(shard)
        list(samples(ShardList(urls).sharding_filter()))  # each rank has its own list


class TestASecondSplit:
    @pytest.fixture
    def data(self, urls: str) -> Any:
        data = StatefulShards(samples(ShardList(urls).sharding_filter()))
        data.epochs.state.rank = Instance(ranks=2)  # as after init_process_group
        return data

    def test_a_wrapper_that_splits_is_refused(self, data: Any) -> None:
        with pytest.raises(RuntimeError, match=r"would split this share again.*accelerator\.prepare"):
            list(IterableDatasetShard(data))

    def test_a_loader_of_accelerate_is_refused(self, data: Any) -> None:
        names = {"__name__": "accelerate.data_loader", "data": data}
        with pytest.raises(RuntimeError, match="would split this share again"):
            exec("data.set_epoch(0)", names)

    def test_a_single_rank_may_use_any_wrapper(self, data: Any) -> None:
        data.epochs.state.rank = Instance()
        assert len(list(IterableDatasetShard(data))) == 10
