"""The file that lists everything skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ErrorBudget, ShardList, ShardReadingService, read_quarantine
from wds_datapipes.counters import SkippedItem
from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError
from wds_datapipes.on_error.policy import write_quarantine
from wds_datapipes.testing import build_shard

ITEM = SkippedItem("wds_decode", "DecodeError", "a.tar", "k\u2028", "cls", "it is\nno number")


pytestmark = pytest.mark.usefixtures("folder")


def test_all_processes_write_everything_they_skip() -> None:
    for shard in range(4):
        labels = [{"__key__": f"{shard}-{n}", "cls": "x" if n % 3 == 0 else "1"} for n in range(60)]
        build_shard(f"{shard}.tar", labels)
    Path("4.tar").write_bytes(b"no archive")
    budget = ErrorBudget(quarantine=Path("bad.jsonl"), warn=False)
    pipe = ShardList("{0..4}.tar").sharding_filter().load_wds_shards(on_error=budget).group_samples()
    with DataLoader2(pipe.wds_decode(on_error=budget), reading_service=ShardReadingService(2)) as loader:
        assert len(list(loader)) == 160
    found = read_quarantine("bad.jsonl")
    assert len(found) == 81  # the ledger keeps the last twenty
    want = {("wds_decode", f"{shard}.tar", f"{shard}-{n}", "cls") for shard in range(4) for n in range(0, 60, 3)}
    assert {each[:1] + each[2:5] for each in found} == want | {("load_wds_shards", "4.tar", "", "")}


def test_items_round_trip() -> None:
    for _ in range(2):
        write_quarantine("bad.jsonl", ITEM)
    assert read_quarantine("bad.jsonl") == [ITEM, ITEM]


def test_an_unwritable_file_is_reported_with_the_item(full_disk: Any) -> None:
    with pytest.raises(
        MissingSidecarError, match=r"cannot be written to nowhere/bad\.jsonl: No such .* The item is wds_decode"
    ):
        write_quarantine("nowhere/bad.jsonl", ITEM)
    write_quarantine("bad.jsonl", ITEM)
    with (
        full_disk(os.path.getsize("bad.jsonl") + 5),
        pytest.raises(MissingSidecarError, match=r"the disk is full|File too large"),
    ):
        write_quarantine("bad.jsonl", ITEM)


@pytest.mark.parametrize(
    "text", ["[1]", json.dumps({**ITEM._asdict(), "more": 1}), json.dumps({"stage": "a"}), '{"stage": ', "\ud800"]
)
def test_another_file_is_refused(text: str) -> None:
    Path("bad.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CorruptSidecarError, match=r"bad\.jsonl.* is not a quarantine file"):
        read_quarantine("bad.jsonl")


def test_an_edited_file_may_begin_with_a_byte_order_mark() -> None:
    Path("bad.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ITEM._asdict()).encode())
    assert read_quarantine("bad.jsonl") == [ITEM]


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(MissingSidecarError, match=r"bad\.jsonl cannot be read: No such file"):
        read_quarantine("bad.jsonl")
