"""The graph of a pipeline: its stages in the two orders on which seeds depend."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper, ShardingFilter
from torchdata.dataloader2.graph import find_dps, list_dps, traverse_dps

from wds_datapipes import ShardList, StatefulShards
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.seeds import SeedGenerator
from wds_datapipes.testing import build_shard


def shards_of(urls: str) -> Any:
    return ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()


def shards(*, maps: int = 0) -> Any:
    pipe: Any = ShardList("{a,b}.tar").shuffle()
    for _ in range(maps):
        pipe = pipe.map(str)
    return pipe.sharding_filter().load_wds_shards().group_samples()


def forked() -> Any:
    first, second = shards().fork(2)
    return first.map(dict).zip(second)


PIPES: dict[str, Callable[[], Any]] = {
    "a chain": lambda: shards().shuffle_samples(3).batch(2),
    "a mixture": lambda: shards(maps=2).shuffle_samples(3).mix_samples(shards(), shards(maps=1)),
    "a mixture in a mixture": lambda: shards().mix_samples(shards(maps=1).mix_samples(shards())).with_epoch(9),
    "a fork": forked,
}


@pytest.mark.parametrize("case", PIPES)
def test_seeds_are_drawn_in_the_order_of_torchdata(case: str) -> None:
    pipe = PIPES[case]()
    graph = traverse_dps(pipe)
    assert [*map(id, PipelineGraph(pipe).nearest_first)] == [*map(id, list_dps(graph))]
    found = PipelineGraph(pipe)
    before, after = {*found.before_split}, {*map(id, found.after_split)}
    assert {*map(id, find_dps(graph, ShardingFilter))} <= before
    assert not before & after
    assert before | after == {*map(id, found.stages)}


def test_stages_are_listed_branch_by_branch() -> None:
    pipe = IterableWrapper("ab").map(str).mix_samples(IterableWrapper("cd").shuffle().filter(bool))
    names = [name_of(stage) for stage in PipelineGraph(pipe).stages]
    assert names == ["SampleMixer", "Mapper", "IterableWrapper", "Filter", "Shuffler", "IterableWrapper"]


def test_an_epoch_searches_the_stages_a_few_times_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline changes at three points; stages that may be read without a loader search those before them."""
    build_shard("a.tar", [{"__key__": f"{number}", "cls": "0"} for number in range(9)])
    data = StatefulShards(shards_of("a.tar").shuffle_samples(3).batch(2), seed=1)
    assert len(list(data)) == 5
    searched = []
    make = PipelineGraph.__init__

    def count(self: PipelineGraph, pipe: Any, sources: Any = None) -> None:
        searched.extend([pipe] if sources is None else [])
        make(self, pipe, sources)

    monkeypatch.setattr(PipelineGraph, "__init__", count)
    assert len(list(data)) == 5
    assert len(searched) <= 7


def test_a_copy_of_a_graph_has_the_stages_of_the_copied_pipeline() -> None:
    graph = PipelineGraph(PIPES["a mixture"]())
    assert graph.before_split
    copied = pickle.loads(pickle.dumps(graph))
    assert [*map(type, copied.stages)] == [*map(type, graph.stages)]
    assert not {*map(id, copied.stages)} & {*map(id, graph.stages)}
    assert {*copied.before_split} <= {*map(id, copied.stages)}
    assert all({*map(id, copied.sources_of(each))} <= {*map(id, copied.stages)} for each in copied.stages)


def test_an_epoch_makes_a_graph_only_where_the_pipeline_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, create = list[Any](), PipelineGraph.__init__

    def count(self: PipelineGraph, pipe: Any, sources: Any = None) -> None:
        if sources is None:  # otherwise, it is a part of a graph
            made.append(pipe)
        create(self, pipe, sources)

    monkeypatch.setattr(PipelineGraph, "__init__", count)

    def graphs(**options: Any) -> int:
        made.clear()
        EpochRun(pipe, EpochStart(SeedGenerator(1), **options))
        return len(made)

    pipe = PIPES["a chain"]()
    assert graphs() == 2  # at the beginning, and after the list was guarded
    assert graphs() == 3  # and after the guard of the previous epoch was removed
    assert graphs(iter_reset_fn=lambda pipe: pipe) == 4
    assert graphs(iter_reset_fn=lambda pipe: pipe, replay_reason="It has no position") == 4
