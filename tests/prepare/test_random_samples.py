"""Samples drawn from a whole dataset."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes import TarWriter
from wds_datapipes.prepare.shard_contents import draw_samples
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard


def all_samples(urls: list[str], **options: Any) -> list[dict[str, Any]]:
    return list(group_samples(read_shards(urls), **options))


def fields(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: sample[name] for name in sample if name != "__local_path__"} for sample in samples]


def test_a_seed_draws_the_same_and_each_sample_has_the_same_chance(folder: Path) -> None:
    for shard, count in enumerate((1, 5, 30)):
        build_shard(f"u-{shard}.tar", [{"__key__": f"{shard}-{n}", "txt": "x"} for n in range(count)])
    urls = [f"u-{shard}.tar" for shard in range(3)]

    def drawn(seed: int) -> list[str]:
        return [sample["__key__"] for sample in draw_samples(urls, 6, seed=seed, num_workers=0).samples]

    assert drawn(1) == drawn(1)
    found = Counter(key for seed in range(60) for key in drawn(seed))
    assert found.total() == 360
    assert len(found) == 36
    assert max(found.values()) < 25


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_drawn_samples_are_those_of_reading(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], count: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    urls = []
    for shard, samples in enumerate(counts):
        urls.append(f"{folder}/{shard}.tar{'.gz' if shard % 2 else ''}")
        with TarWriter(urls[-1]) as writer:
            for n in range(samples):
                writer.write({"__key__": f"d/{shard}-{n}" + "k" * 60 * n, "a.b": bytes(700 * n), "txt": f"{n}"})
    drawn = draw_samples(urls, count, seed=seed, num_workers=0)
    there = fields(all_samples(urls))
    assert len(drawn.samples) == min(count, len(there))
    at = [there.index(sample) for sample in fields(drawn.samples)]
    assert at == sorted(set(at))
