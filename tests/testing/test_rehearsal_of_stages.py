"""`check_resume` with stages that make several items from one, read sources in step, or keep items."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ShardList
from wds_datapipes.testing import build_shard, check_resume

SIZES = (5, 0, 7, 2)

Pipe = Any

#: Another process also imports it.
sys.path.insert(0, str(Path(__file__).parent))
functions: Any = importlib.import_module("takenapart")
sys.path.pop(0)


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    for shard, size in enumerate(SIZES):
        places = [(f"{shard}-{number}", str(number)) for number in range(size)]
        build_shard(f"{shard}.tar", [{"__key__": key, "cls": number} for key, number in places])
        build_shard(f"texts-{shard}.tar", [{"__key__": key, "txt": number} for key, number in places])


def gathered() -> Pipe:
    return ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def taken_apart() -> Pipe:
    pipe = gathered().add_columns(functions.texts_of).shuffle_samples(3)
    pipe = pipe.map(functions.some).unbatch_samples(collated=False).shuffle_samples(4)
    other = gathered().cache_samples("kept").compose(functions.doubled)
    pipe = pipe.mix_samples(other, stop="all").shuffle_samples(4)
    return pipe.batch(3).unbatch_samples(collated=False).batch(2)


def test_they_resume_in_a_new_interpreter() -> None:
    check_resume(taken_apart, cuts=4)
