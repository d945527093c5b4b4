"""The display of samples, and the log of their positions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.samples.sample_log import PositionLog, log_samples
from wds_datapipes.shards.held_samples import ItemCounter
from wds_datapipes.types import Instance


def logged(items: Any, to: Any = "stdout", **options: Any) -> Iterator[Any]:
    settings = {"first": 3, "every": None, "positions": None, "instance": Instance(rank=1, worker=2)}
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
    assert titles == [f"log_samples: item {number} of worker 2, rank 1" for number in shown]


def test_a_record_of_a_sample(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    sample = {"__key__": "k", "__url__": "https://user:secret@host/x.tar?token=hunter2", "jpg": b"abc"}
    items = [sample, ("é" * 10**6, np.zeros((10, 20, 3), np.uint8), torch.zeros(3, device="meta"), Hostile()), 3]
    list(logged(items, "stderr"))
    text = capsys.readouterr().err
    assert "    jpg: bytes of 3: b'abc'\n" in text
    assert f"    [0]: str of 1,000,000: '{'é' * 56}...\n" in text
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


def test_a_position_takes_eight_bytes_and_hides_credentials(tmp_path: Path) -> None:
    urls, path = ["a\udc80.tar", "https://me:hunter2@host/b.tar", "a\udc80.tar"], tmp_path / "log/1.positions"
    with PositionLog(path, 0) as log:
        for number, url in enumerate(urls):
            log.append(url, 512 * number)
    assert path.stat().st_size == 24
    assert path.with_suffix(".shards").read_bytes() == b"a\x80.tar\0https://***@host/b.tar\0"
    with PositionLog(path, 2) as log:
        log.append("a\udc80.tar", (1 << 40) - 1)
    positions = np.fromfile(path, "<u8")
    assert (positions >> 40).tolist() == [0, 1, 0]
    assert (positions % (1 << 40)).tolist() == [0, 512, (1 << 40) - 1]


def test_a_full_disk_is_an_error_and_the_log_is_continued_after_it(tmp_path: Path, full_disk: Any) -> None:
    path = tmp_path / "1.positions"
    with PositionLog(path, 0) as log:
        log.append("a.tar", 0)
        with full_disk(10), pytest.raises(MissingSidecarError, match=r"1\.positions' cannot be written: No space left"):
            log.append("long.tar", 0)
    with PositionLog(path, 1) as log:
        log.append("long.tar", 512)
    assert path.with_suffix(".shards").read_bytes() == b"a.tar\0long.tar\0"
    assert np.fromfile(path, "<u8").tolist() == [0, (1 << 40) + 512]
