"""The display of samples, and the list of their keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.samples.sample_log import log_samples
from wds_datapipes.shards.position import ItemCounter
from wds_datapipes.testing import build_shard


def logged(items: Any, to: Any = "stdout", **options: Any) -> Iterator[Any]:
    settings = {"first": 3, "every": None, "name": "log", "width": 40, "key_log": None, "rank": 1, "worker": 2}
    return log_samples(items, to, counter=ItemCounter(), **{**settings, **options})


class Hostile:
    """Cannot be displayed in any way."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    __repr__ = __str__ = None  # type: ignore[assignment]  # that is what is hostile about it


@pytest.mark.parametrize(("first", "every", "shown"), [(0, None, []), (0, 4, [3, 7]), (2, 5, [0, 1, 4, 9])])
def test_which_samples_are_shown(
    first: int, every: int | None, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    items = [{"__key__": str(number)} for number in range(10)]
    passed = list(logged(items, first=first, every=every))
    assert all(one is other for one, other in zip(passed, items, strict=True)), "they pass through unchanged"
    titles = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert titles == [f"log: item {number} of worker 2, rank 1" for number in shown]


def test_a_record_of_a_sample(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    sample = {"__key__": "k", "__url__": "https://user:secret@host/x.tar?token=hunter2", "jpg": b"abc"}
    items = [sample, ("é" * 10**6, np.zeros((10, 20, 3), np.uint8), torch.zeros(3, device="meta"), Hostile()), 3]
    list(logged(items, "stderr"))
    text = capsys.readouterr().err
    assert "    jpg: bytes of 3: b'abc'\n" in text
    assert f"    [0]: str of 1,000,000: '{'é' * 36}...\n" in text
    assert "    [1]: ndarray uint8 (10, 20, 3)\n" in text
    assert "    [2]: Tensor torch.float32 (3,)\n" in text
    assert "    [3]: Hostile, which cannot be shown: RuntimeError\n" in text
    assert "    int: 3\n" in text
    assert "secret" not in text
    assert "hunter2" not in text
    logger = logging.getLogger("wds_datapipes.test")
    list(logged([sample], logger))
    assert caplog.records == []
    with caplog.at_level("INFO", logger=logger.name):
        list(logged([sample], logger))
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() + "\n" == text[: len(record.getMessage()) + 1]


def test_each_line_of_the_key_log_is_a_sample(tmp_path: Path) -> None:
    keys = {"a\tb": r"a\tb", "c\\n": r"c\\n", "\r\n": r"\r\n", "é": "é", "a\ud800": r"a\ud800"}
    for _ in range(2):  # it is appended to
        list(logged([{"__key__": key, "__url__": "a.tar"} for key in keys], first=0, key_log=str(tmp_path / "keys")))
    lines = [f"{number}\t2\t1\t{key}\ta.tar\n" for number, key in enumerate(keys.values())]
    assert (tmp_path / "keys").read_bytes().decode() == "".join(lines * 2)


@pytest.mark.parametrize("place", ["none/keys", "file/keys", "."])
def test_an_unwritable_file_is_named(place: str, folder: Path) -> None:
    Path("file").touch()
    with pytest.raises(MissingSidecarError, match=rf"key log '{place}' cannot be written: (No|Not|Is) .*Name a"):
        list(logged([1], first=0, key_log=place))
    with pytest.raises(MissingSidecarError, match="key log '/dev/full' cannot be written: No space left on device"):
        list(logged([1], first=0, key_log="/dev/full"))


@pytest.mark.parametrize("workers", [0, 3])
def test_several_processes_write_whole_lines_to_one_file(tmp_path: Path, workers: int) -> None:
    for shard in range(3):
        samples = [{"__key__": f"{shard}-{n}" + "x" * (n % 90), "cls": "1"} for n in range(200)]
        build_shard(tmp_path / f"{shard}.tar", samples)
    pipe = ShardList(f"{tmp_path}/{{0..2}}.tar").sharding_filter().load_wds_shards().group_samples()
    pipe = pipe.log_samples(first=0, key_log=tmp_path / "keys")
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        keys = [sample["__key__"] for sample in loader]
    rows = [line.split("\t") for line in (tmp_path / "keys").read_text().splitlines()]
    assert sorted(key for _, _, _, key, _ in rows) == sorted(keys)
    for worker in range(max(workers, 1)):
        mine = [row for row in rows if row[1] == str(worker)]
        shards = [shard for shard in range(3) if shard % max(workers, 1) == worker]
        assert [int(row[0]) for row in mine] == list(range(200 * len(shards)))
        assert {row[4] for row in mine} == {f"{tmp_path}/{shard}.tar" for shard in shards}
    assert {row[2] for row in rows} == {"0"}
