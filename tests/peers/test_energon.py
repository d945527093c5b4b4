"""Megatron Energon loads datasets written here, and its own tool writes the same indexes.

This needs the packages of the dependency group ``energon``; `nox -s "peers(energon)"` has them.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import SqliteITarEntryReader
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from wds_datapipes import ShardList
from wds_datapipes.index import read_energon_dataset, read_energon_index, write_energon_dataset

#: Of Energon's loader, on a machine without an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
COUNT = 5


@edataclass
class Text(Sample):  # type: ignore[misc]  # it has no types
    """A text and its class."""

    txt: str
    cls: str


@stateless  # type: ignore[untyped-decorator]  # the same
def cook(sample: dict[str, Any]) -> Text:
    return Text(**basic_sample_keys(sample), txt=sample["txt"], cls=sample["cls"])


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]  # the same
    cookers = [Cooker(cook)]  # noqa: RUF012  it is asked for as a class attribute

    def batch(self, samples: Any) -> Any:
        return samples

    def encode_sample(self, sample: Text) -> Text:
        return sample


@pytest.fixture(params=["ustar", "gnu", "pax"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two shards, whose names are so long that the format has headers for them; one of them in a folder."""
    folder = tmp_path / "set"
    (folder / "more").mkdir(parents=True)
    for name in ("a", "more/b"):
        with tarfile.open(folder / f"{name}.tar", "w", format=FORMATS[request.param]) as tar:
            for number in range(COUNT):
                key = f"{'k' * (20 if request.param == 'ustar' else 120)}{name[-1]}{number}"
                for field, data in (("txt", f"text {name} {number}" * (1 + number * 99)), ("cls", f"{number}")):
                    member = tarfile.TarInfo(f"{key}.{field}")
                    member.size, member.mtime = len(data), 1.5 if request.param == "pax" else 1
                    tar.addfile(member, io.BytesIO(data.encode()))
    return folder


def shards(dataset: Path) -> list[str]:
    return [str(dataset / "a.tar"), str(dataset / "more/b.tar")]


def test_energon_loads_what_we_read(dataset: Path) -> None:
    written = write_energon_dataset(dataset, {"train": shards(dataset)})
    assert written.counts == {"a.tar": COUNT, "more/b.tar": COUNT}
    loaded = get_train_dataset(
        dataset,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        parallel_shard_iters=1,
        task_encoder=Encoder(),
    )
    samples = iter(get_loader(loaded))
    found = {(sample.__key__, sample.txt, str(sample.cls)) for sample in (next(samples) for _ in range(2 * COUNT))}
    ours = ShardList(shards(dataset)).load_wds_shards().group_samples().wds_decode()
    assert len(found) == 2 * COUNT
    assert {(key.rpartition("/")[2], txt, cls) for key, txt, cls in found} == {
        (sample["__key__"], sample["txt"], str(sample["cls"])) for sample in ours
    }


def test_energon_finds_samples_by_keys_that_we_write(dataset: Path) -> None:
    write_energon_dataset(dataset, {"train": shards(dataset)})
    reader, parts = (SqliteITarEntryReader(EPath(dataset), key_is_full_entryname=full) for full in (False, True))
    for sample in ShardList(shards(dataset)).load_wds_shards().group_samples():
        found = reader[sample["__key__"]]
        assert (found["txt"], found["cls"]) == (sample["txt"], sample["cls"])
        assert parts[f"{sample['__key__']}.cls"][0] == sample["cls"]
    assert len(reader) == 2 * COUNT
    reader.close()
    parts.close()


def tables(dataset: Path) -> dict[str, list[Any]]:
    """The contents of the tables of index.sqlite."""
    with contextlib.closing(sqlite3.connect(dataset / ".nv-meta/index.sqlite")) as database:
        return {name: sorted(database.execute(f"SELECT * FROM {name}")) for name in ("samples", "sample_parts")}


def test_its_own_tool_writes_the_same_indexes(dataset: Path) -> None:
    written = write_energon_dataset(dataset, {"train": shards(dataset)})
    ours = {path.name: path.read_bytes() for path in dataset.rglob("*.idx")}
    keys = tables(dataset)
    assert [len(rows) for rows in keys.values()] == [2 * COUNT, 4 * COUNT]
    shutil.rmtree(dataset / ".nv-meta")
    for path in dataset.rglob("*.idx"):
        path.unlink()
    WebdatasetPreparator.prepare_dataset(
        dataset, list(written.counts), split_parts_ratio=[("train", 1.0)], workers=1, shuffle_seed=None
    )
    assert {path.name: path.read_bytes() for path in dataset.rglob("*.idx")} == ours
    assert tables(dataset) == keys
    assert json.loads((dataset / ".nv-meta/.info.json").read_text())["shard_counts"] == written.counts
    read = read_energon_dataset(dataset)
    assert list(read.counts) == read.splits["train"] == shards(dataset)
    for url in read.counts:
        assert len(read_energon_index(f"{url}.idx", url)) == read.counts[url]
