"""The table of a loading report, made by rich."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from rich.console import Console
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardReadingService
from wds_datapipes.loading.report import LoadingReport
from wds_datapipes.pipes.shards.shard_list import ShardList
from wds_datapipes.testing import build_shard


def shown(report: LoadingReport, width: int = 140) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(report)
    return console.export_text().splitlines()


def test_the_table_of_a_real_loader(tmp_path: Path) -> None:
    names = [build_shard(tmp_path / f"{name}.tar", [{"__key__": "0", "cls": name}]) for name in "abcd"]
    pipe = ShardList(names).sharding_filter().load_wds_shards().group_samples().wds_decode(on_error="skip")
    with DataLoader2(pipe, reading_service=ShardReadingService(2)) as loader:
        assert list(loader) == []
        report = loader.reading_service.report()
    lines = shown(report, width=80)
    assert max(map(len, lines)) <= 80
    assert "4 x wds_decode: DecodeError" in " ".join(line.strip() for line in lines)
    for worker, shard in zip(report.workers, ("c.tar", "d.tar"), strict=True):
        (row,) = [line for line in lines if worker.name in line]
        assert str(worker.pid) in row
        assert row.split()[-2:] == ["2", shard]
    for name in ("[red]a.tar", "a[bold]b.tar", ":smile:.tar"):  # which is no markup
        worker = dataclasses.replace(report.workers[0], shard=f"data/{name}")
        assert any(name in line for line in shown(LoadingReport(1, [worker])))
