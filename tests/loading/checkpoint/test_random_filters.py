"""Pipelines whose runs differ: a run resumes after the sources of the delivered items, not after a number of items."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.testing import build_shard

Pipe = IterDataPipe[Any]
SHARDS, SAMPLES, BUFFER = 4, 150, 40
CUT = 150


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard in range(SHARDS):
        samples = [{"__key__": f"{shard}-{number:03}", "cls": str(number)} for number in range(SAMPLES)]
        build_shard(f"{shard}.tar", samples)


def depends_on_run(sample: dict[str, Any]) -> bool:
    """Whether the sample depends on the run: here, all odd samples of the first run."""
    return int(sample["cls"]) % 2 == 1 and Path("unlucky").exists()


def is_kept(sample: dict[str, Any]) -> bool:
    return not depends_on_run(sample)


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    if depends_on_run(sample):
        raise OSError("the store is away for a moment")
    return sample


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def source() -> Any:
    return ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def filtered() -> Pipe:
    return source().shuffle_samples(BUFFER).filter(is_kept).map(key_of)  # type: ignore[no-any-return]


def skipping() -> Pipe:
    return source().shuffle_samples(BUFFER).map_samples(decoded, on_error="skip").map(key_of)  # type: ignore[no-any-return]


def in_a_stream() -> Pipe:
    """All stages that draw are inside one that restarts its source. The rest of the epoch is that of the first pass."""
    return filtered().with_epoch(400)  # type: ignore[no-any-return]


def mixed() -> Pipe:
    first = ShardList("{0..1}.tar").sharding_filter().load_wds_shards().group_samples().shuffle_samples(BUFFER)
    second = ShardList("{2..3}.tar").sharding_filter().load_wds_shards().group_samples()
    return first.filter(is_kept).mix_samples(second.filter(is_kept), stop="all").map(key_of)  # type: ignore[no-any-return]


PIPELINES = [filtered, skipping, in_a_stream, mixed]


def with_service(make: Callable[[], Pipe], workers: int) -> tuple[Any, Callable[[], Any], Callable[[Any], None]]:
    loader = DataLoader2(make(), reading_service=ShardReadingService(workers))
    loader.seed(5)
    service = loader.reading_service

    def epoch() -> Any:
        yield from loader
        loader.shutdown()

    return epoch(), lambda: loader.reading_service.state_dict(), service.load_state_dict


def with_tracked(make: Callable[[], Pipe], workers: int) -> tuple[Any, Callable[[], Any], Callable[[Any], None]]:
    data = StatefulShards(make(), seed=5)

    def epoch() -> Any:
        yield from data.tracked(DataLoader(data, batch_size=None, num_workers=workers))

    return epoch(), data.state_dict, data.load_state_dict


@pytest.mark.parametrize("build", PIPELINES)
@pytest.mark.parametrize("make_loader", [with_service, with_tracked])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_yields_everything_after_the_last_delivered_sample(
    build: Callable[[], Pipe], make_loader: Any, workers: int
) -> None:
    whole = list(make_loader(build, workers)[0])
    Path("unlucky").touch()
    items, save, _ = make_loader(build, workers)
    came = list(itertools.islice(items, CUT))
    state = json.loads(json.dumps(save()))
    items.close()
    Path("unlucky").unlink()
    items, _, load = make_loader(build, workers)
    load(state)
    found = list(items)
    behind = whole.index(came[-1]) + 1 if build is not mixed else None
    assert len(set(came + found)) == len(came + found)
    assert all(int(key[-1]) % 2 for key in {*whole} - {*came, *found})
    if behind is not None:
        assert found[: len(whole) - behind] == whole[behind:]
