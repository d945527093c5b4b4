"""What webdataset's tests pin of writing, with its writer and with ours.

The numbers in the names are explained in `contract.md`.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from readers import keys_in

from wds_datapipes import ShardList, ShardWriter, TarWriter, WriteOptions
from wds_datapipes.errors import EncodeError, ShardWriteError, UnsafeInputError

IMAGE = np.random.default_rng(0).random((8, 6, 3)).astype(np.float32)


def theirs(url: str, sample: dict[str, Any], **options: Any) -> None:
    with webdataset.TarWriter(url, **options) as writer:
        writer.write(sample)


def ours(url: str, sample: dict[str, Any], **options: Any) -> None:
    with TarWriter(url, WriteOptions(**options)) as writer:
        writer.write(sample)


def read(url: str, *decoders: str, **options: Any) -> dict[str, Any]:
    [sample] = ShardList(url).load_wds_shards().group_samples().wds_decode(*decoders, **options)
    return {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}


def read_by_them(url: str, *decoders: str) -> dict[str, Any]:
    [sample] = webdataset.WebDataset(url, shardshuffle=False).decode(*decoders)
    return {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}


def test_55_a_sample_of_all_kinds_of_fields_is_read_back() -> None:
    sample = {
        "__key__": "s", "txt": "grüße", "cls": 3, "json": {"a": [1, "x"]}, "mp": {"b": 2}, "npy": np.arange(4.0),
        "ppm": IMAGE, "jpg": IMAGE, "png": IMAGE,
    }  # fmt: skip
    ours("ours.tar", sample)
    theirs("theirs.tar", sample)
    found, expected = read("ours.tar", "rgb8"), read("theirs.tar", "rgb8")
    assert list(found) == list(sample)
    assert list(expected) == ["__key__", *sorted(set(sample) - {"__key__"})]
    for field in ("__key__", "txt", "cls", "json", "mp"):
        assert found[field] == expected[field] == sample[field]
    np.testing.assert_array_equal(found["npy"], expected["npy"])
    for field in ("png", "ppm"):  # theirs are up to one level darker
        np.testing.assert_array_equal(found[field], np.rint(IMAGE * 255))
        assert np.abs(found[field].astype(int) - expected[field]).max() == 1
    by_them = read_by_them("ours.tar", "rgb8")
    assert by_them.keys() == found.keys()
    np.testing.assert_array_equal(by_them["png"], found["png"])
    for field, value in {"cls": None, "json": {1, 2}}.items():
        with pytest.raises(EncodeError):
            ours("ours.tar", {"__key__": "s", field: value})
    theirs("theirs.tar", {"__key__": "s", "cls": None})
    with tarfile.open("theirs.tar") as tar:
        assert tar.extractfile("s.cls").read() == b"None"  # type: ignore[union-attr]  # it is there


def test_56_a_name_that_ends_in_tgz_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {"__key__": "s", "txt": "a" * 1000}
    for write in (ours, theirs):
        write("s.tgz", sample)
        write("s.tar", sample)
        assert Path("s.tgz").read_bytes().startswith(b"\x1f\x8b")
        assert Path("s.tar").read_bytes().startswith(b"s.txt" if write is ours else b"././@PaxHeader")
        assert read("s.tgz") == read("s.tar") == read_by_them("s.tgz") == sample
    now = time.time()
    for write in (ours, theirs):
        write("s.tgz", sample)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now + 10)  # gzip stores seconds
            write("later.tgz", sample)
        assert (Path("later.tgz").read_bytes() == Path("s.tgz").read_bytes()) == (write is ours)


def test_57_pth_and_pyd_fields_are_read_back() -> None:
    sample = {"__key__": "s", "pth": ["abc"], "pyd": {"x": 0}}
    ours("ours.tar", sample, allow_pickle=True)
    theirs("theirs.tar", sample)
    for url in ("ours.tar", "theirs.tar"):
        assert read(url, allow_pickle=True) == read_by_them(url) == sample
    with pytest.raises(UnsafeInputError):
        ours("ours.tar", sample)


def test_58_a_single_array_in_ten_is_read_back_as_a_list_of_one() -> None:
    sample = {"__key__": "s", "ten": np.zeros((3, 3)), "tb": [np.ones(1), np.ones(2)]}
    for write in (ours, theirs):
        write("s.tar", sample)
        for found in (read("s.tar"), read_by_them("s.tar")):
            [array] = found["ten"]
            np.testing.assert_array_equal(array, np.zeros((3, 3)))
            assert [len(array) for array in found["tb"]] == [1, 2]


def test_59_txt_gz_is_compressed_and_read_back() -> None:
    text = "a" * 1001
    for write in (ours, theirs):
        write("s.tar", {"__key__": "s", "txt.gz": text})
        assert read("s.tar")["txt.gz"] == read_by_them("s.tar")["txt.gz"] == text
        with tarfile.open("s.tar") as tar:
            assert tar.getmember("s.txt.gz").size < 100


def test_60_a_command_gets_the_shard() -> None:
    for write in (ours, theirs):
        write("pipe:cat > s.tar", {"__key__": "s", "txt": "a"})
        assert read("s.tar")["txt"] == "a"
    with pytest.raises(ShardWriteError, match="status 3"):
        ours("pipe:cat > s.tar; exit 3", {"__key__": "s", "txt": "a"})


def test_61_a_new_shard_starts_after_maxcount_and_post_is_called() -> None:
    make: Any
    settings: Any
    writers = [("ours", ShardWriter, {"options": WriteOptions(encoder=False)})]
    for name, make, settings in (*writers, ("theirs", webdataset.ShardWriter, {"encoder": False})):
        called: list[str] = []
        with make(f"{name}-%02d.tar", maxcount=5, post=called.append, verbose=0, **settings) as writer:
            for number in range(50):
                writer.write({"__key__": str(number), "txt": b"hello\n"})
        assert called == [f"{name}-{number:02d}.tar" for number in range(10)]
        assert [keys_in(url) for url in called] == [[str(5 * n + i) for i in range(5)] for n in range(10)]
    # Without a sample
    webdataset.ShardWriter("theirs-none-%d.tar", verbose=0).close()
    ShardWriter("ours-none-%d.tar").close()
    assert os.path.exists("theirs-none-0.tar")
    assert not os.path.exists("ours-none-0.tar")


def test_70_files_and_pipes_are_written_and_read_back() -> None:
    for write in (ours, theirs):
        write("file.tar", {"__key__": "s", "txt": "a"})
        write("pipe:gzip > pipe.out", {"__key__": "s", "txt": "a"})
        assert read("file.tar") == read("pipe:zcat pipe.out") == {"__key__": "s", "txt": "a"}
        assert subprocess.run(["tar", "tf", "pipe.out"], capture_output=True, check=True).stdout == b"s.txt\n"
