"""DALI's own reader, on the CPU, with the indexes that are written here, and with those of its own tool.

This needs the packages of the dependency group ``dali``; `nox -s "peers(dali)"` has them.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

from wds_datapipes import ShardList
from wds_datapipes.index import write_dali_index
from wds_datapipes.tools.interop.dali_index import dali_index_url

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
FIELDS = ["jpg", "seg.png", "cls"]
#: Names that fit into a ustar header, and names that do not.
KEYS = {"short": "{}", "in prefix": "d" * 90 + "/{:060}", "long": "d" * 90 + "/{:0120}", "not ASCII": "é漢{}"}
#: Each member has a PAX header if its time has a fraction.
TIMES = {"": 1, ", time with a fraction": 1.5}
COUNT = 7

Samples = list[tuple[bytes, ...]]


def shard(path: Path, tar_format: str, keys: str, mtime: float = 1) -> str:
    with tarfile.open(path, "w", format=FORMATS[tar_format], encoding="utf-8") as tar:
        for number, field in product(range(COUNT), FIELDS):
            data = f"{field} of {number}".encode() * (1 + number * 97)
            member = tarfile.TarInfo(f"{KEYS[keys].format(number)}.{field}")
            member.size, member.mtime = len(data), mtime
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def by_dali(url: str, index: str | None, count: int = COUNT) -> Samples:
    """The samples of one epoch of DALI's reader."""

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)  # type: ignore[untyped-decorator]  # it has no types
    def pipeline() -> Any:
        options = {"index_paths": [index]} if index else {}
        return tuple(fn.readers.webdataset(paths=[url], ext=FIELDS, missing_component_behavior="error", **options))

    running = pipeline()
    running.build()
    return [tuple(np.asarray(output[0]).tobytes() for output in running.run()) for _ in range(count)]


def by_us(url: str) -> Samples:
    samples = ShardList([url]).load_wds_shards().group_samples()
    return [tuple(sample[field] for field in FIELDS) for sample in samples]


ARCHIVES = [
    (tar_format, keys, time)
    for tar_format, keys, time in product(FORMATS, KEYS, TIMES)
    if not (tar_format == "ustar" and keys == "long") and (tar_format == "pax" or not time)
]


def index_by_its_tool(url: str) -> str:
    place = url.replace(".tar", ".wds2idx")
    # In other locales, non-ASCII names are printed with escapes.
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "wds2idx", url, place]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return place


def our_index(url: str) -> str:
    write_dali_index(url)
    return dali_index_url(url)


@pytest.mark.parametrize(("tar_format", "keys", "time"), ARCHIVES)
def test_dali_reads_what_we_read(tmp_path: Path, tar_format: str, keys: str, time: str) -> None:
    """Its own tool is wrong about long names of GNU tar, and earlier versions were wrong about PAX headers."""
    url = shard(tmp_path / "x.tar", tar_format, keys, TIMES[time])
    expected = by_us(url)
    assert len(expected) == COUNT
    ours, theirs = our_index(url), index_by_its_tool(url)
    assert by_dali(url, ours) == expected
    is_right = by_dali(url, theirs) == expected
    assert is_right is (Path(theirs).read_bytes() == Path(ours).read_bytes())
    assert is_right is not (tar_format == "gnu" and keys in ("in prefix", "long"))
