"""Counters of the items that a pipeline reads and skips."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.counters import LATEST, Counters, Skipped, SkippedItem
from wds_datapipes.errors import DecodeError, TruncatedShardError
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy
from wds_datapipes.shards.loading import TarOptions, load_wds_shards
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Shard


def item(stage: str, error: str, reason: str) -> SkippedItem:
    return SkippedItem(stage, error, "a.tar", "key", "field", reason)


def test_only_the_latest_errors_are_kept_whole() -> None:
    counters = Counters()
    for number in range(10_000):
        counters.count_skipped(item("decode", "ValueError", str(number)))
    skipped = counters.skipped()
    assert skipped.counts == {"decode: ValueError": 10_000}
    assert [each.reason for each in skipped.latest] == [str(number) for number in range(10_000 - LATEST, 10_000)]


def test_a_copy_starts_at_zero() -> None:
    counters, opened = Counters(), list[str]()
    counters.on_shard = opened.append
    counters.count_skipped(item("decode", "ValueError", "a"))
    counters.count("retries/s3://bucket")
    for copied in (copy.deepcopy(counters), pickle.loads(pickle.dumps(counters))):
        copied.record_shard("a.tar")
        assert opened == []
        assert (copied.entries, copied.figures(), copied.skipped()) == (0, {}, Skipped())


# the process that writes to it


def test_an_entry_contains_the_shard_the_key_and_the_field() -> None:
    counters = Counters()
    policy = ErrorPolicy(CountedErrors("skip", counters), "a_stage")
    policy.handle(DecodeError("bad"), {"__url__": "s3://me:secret@host/a.tar", "__key__": "k", "cls": b""}, field="cls")
    policy.handle(TruncatedShardError("cut"), url="b.tar")
    policy.handle(KeyError("txt"), {"txt": 1})
    assert counters.skipped().latest == (
        SkippedItem("a_stage", "DecodeError", "s3://***@host/a.tar", "k", "cls", "bad"),
        SkippedItem("a_stage", "TruncatedShardError", "b.tar", "", "", "cut"),
        SkippedItem("a_stage", "KeyError", "", "", "", "'txt'"),
    )


def test_the_book_knows_the_current_shard(tmp_path: Path) -> None:
    counters = Counters()
    names = [build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "txt": name}]) for name in "abc"]
    os.truncate(names[1], 512)
    opened: list[str] = []
    counters.on_shard = opened.append
    read = []
    for shard, name, _, _ in load_wds_shards(
        [*names, str(tmp_path / "missing.tar")], TarOptions(on_error=CountedErrors("skip", counters))
    ):
        read.append(name)
        assert Shard(counters.shard) == shard
    assert read == ["a.txt", "c.txt"]
    assert opened == [*names, str(tmp_path / "missing.tar")]
    assert counters.skipped().counts == {
        "load_wds_shards: TruncatedShardError": 1,
        "load_wds_shards: ShardOpenError": 1,
    }


def test_each_pipeline_counts_separately() -> None:
    def numbers(*texts: str) -> Any:
        samples = [{"__key__": text, "cls": text.encode()} for text in texts]
        return IterableWrapper(samples).wds_decode(on_error="skip").to_tuple("cls", on_error="skip")

    pipes = [numbers("1", "x", "2"), numbers("y", "3", "z", "4")]
    assert list(zip(*pipes, strict=True)) == [((1,), (3,)), ((2,), (4,))]
    assert [dict(count_skipped(pipe).counts) for pipe in pipes] == [
        {"wds_decode: DecodeError": 1},
        {"wds_decode: DecodeError": 2},
    ]
    assert [each.key for each in count_skipped(pipes[1]).latest] == ["y", "z"]
    copied = copy.deepcopy(pipes[0])
    assert count_skipped(copied).total == 0
    assert len(list(pipes[0])) == 2
    assert (count_skipped(pipes[0]).total, count_skipped(copied).total) == (2, 0)
