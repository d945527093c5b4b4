"""What webdataset's tests pin of lists of shards, tar archives and grouping, and measurements of them.

The numbers in the names are explained in `contract.md`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset
from drawn_archives import write_members
from error_facts import naming
from nginx_server import Nginx
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, first_dot
from wds_datapipes.errors import CorruptShardError, DuplicateKeyError, ShardOpenError, TruncatedShardError
from wds_datapipes.hints import IGNORE_ZEROS
from wds_datapipes.testing import build_shard

COUNT = 47

Samples = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def shard(folder: Path) -> None:
    """A small version of the shard that most of webdataset's tests read."""
    build_shard(
        "digits.tgz",
        [
            {"__key__": f"{n:03}", "cls": f"{n % 10}", "png": b"\x89PNG" * 300, "wnid": f"n{n:08}", "xml": "<a/>"}
            for n in range(COUNT)
        ],
    )


def theirs(urls: str | list[str], **options: Any) -> Samples:
    return list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False, **options))


def ours(urls: str | list[str], **options: Any) -> Samples:
    return list(ShardList(urls).load_wds_shards(**options).group_samples())


def fields(sample: dict[str, Any]) -> set[str]:
    return {name for name in sample if not name.startswith("__")}


# lists of shards


def test_02_braces_make_a_hundred_shards() -> None:
    pattern = "test-{000000..000099}.tar"
    assert len(ShardList(pattern)) == 100
    assert list(ShardList(pattern)) == [item["url"] for item in webdataset.SimpleShardList(pattern)]


def test_05_two_colons_join_lists() -> None:
    got = ours("digits.tgz::digits.tgz")
    assert len(got) == 2 * COUNT
    assert got == theirs("digits.tgz::digits.tgz")


def test_13_a_variable_in_a_pattern_is_one_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WDS_TESTDATA", str(tmp_path))
    pattern = "${TESTDATA}/{digits,more}.tgz"
    assert list(ShardList(pattern)) == [f"{tmp_path}/digits.tgz", f"{tmp_path}/more.tgz"]
    assert list(ShardList(pattern)) == [item["url"] for item in webdataset.SimpleShardList(pattern)]


# files of a shard


def is_png(name: str) -> bool:
    return name.endswith(".png")


def cls_to_txt(name: str) -> str:
    return name.replace(".cls", ".txt")


def test_03_files_that_are_not_selected_are_missing_from_each_sample() -> None:
    got = ours("digits.tgz", select_files=is_png)
    assert [fields(sample) for sample in got] == [{"png"}] * COUNT
    assert got == theirs("digits.tgz", select_files=is_png)


def test_04_renamed_files_are_fields_of_their_new_extension() -> None:
    got = ours("digits.tgz", rename_files=cls_to_txt)
    assert [fields(sample) for sample in got] == [{"png", "txt", "wnid", "xml"}] * COUNT
    assert got == theirs("digits.tgz", rename_files=cls_to_txt)


def test_measured_l_files_are_selected_by_their_new_names() -> None:
    def is_text(name: str) -> bool:
        return name.endswith(".txt")

    got = ours("digits.tgz", rename_files=cls_to_txt, select_files=is_text)
    assert [fields(sample) for sample in got] == [{"txt"}] * COUNT
    assert got == theirs("digits.tgz", rename_files=cls_to_txt, select_files=is_text)


def test_07_the_same_keys_in_ten_copies_of_a_shard_do_not_clash() -> None:
    assert len(theirs(["digits.tgz"] * 10)) == 10 * COUNT
    pipe = ShardList(["digits.tgz"] * 10).shuffle(buffer_size=3).load_wds_shards().group_samples()
    assert [sample["__key__"] for sample in pipe] == [f"{n:03}" for n in range(COUNT)] * 10


def test_measured_e_a_key_at_the_end_of_a_shard_and_in_the_next_is_two_samples() -> None:
    urls = [build_shard(f"{n}.tar", [{"__key__": "same", f"f{n}": b"1"}]) for n in range(2)]
    got = ours(urls)
    assert [fields(sample) for sample in got] == [{"f0"}, {"f1"}]
    assert got == theirs(urls)


def test_measured_a_names_are_split_at_the_first_dot_of_the_last_part() -> None:
    names = [
        "a.jpg", "dir.v1/a.b.jpg", "./a.jpg", "/abs/a.jpg", "../a.jpg", "a.", "a..jpg", "a b.c d", "a\nb.c",
        "a", ".hidden", ".a.b", "a.b/c", "x/", "..",
    ]  # fmt: skip
    split = webdataset.tariterators.base_plus_ext
    assert [first_dot(name) or (None, None) for name in names] == [split(name) for name in names]
    assert split("dir/._a.jpg") == ("dir/", "_a.jpg")
    assert first_dot("dir/._a.jpg") is None


def test_measured_b_metadata_files_of_the_shard_are_in_no_sample() -> None:
    names = [
        "__meta__", "__x.y__", "__meta__/x.json", "d/__meta__", "./__m__", "__a__.txt", "d/__m__.txt", "__b.txt",
        "____.txt", "__c__/d/e.txt", "____/f.txt", "___/g.txt",
    ]  # fmt: skip
    url = write_members("meta.tar", names)
    got = ours(url)
    assert [sample["__key__"] for sample in got] == ["__a__", "d/__m__", "__b", "____", "___/g"]
    assert got == theirs(url)


def test_measured_h_an_empty_file_is_a_field_of_no_bytes() -> None:
    url = build_shard("empty-field.tar", [{"__key__": "a", "txt": b"", "cls": b"1"}])
    got = ours(url)
    assert got[0]["txt"] == b""
    assert got == theirs(url)


def test_measured_i_links_and_folders_are_skipped() -> None:
    linked = []
    for name, kind in [("d", tarfile.DIRTYPE), ("a.sym", tarfile.SYMTYPE), ("a.hard", tarfile.LNKTYPE)]:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "a.txt"
        linked.append(info)
    url = write_members("links.tar", [linked[0], ("a.txt", b"1"), *linked[1:], ("a.cls", b"2")])
    got = ours(url)
    assert [fields(sample) for sample in got] == [{"txt", "cls"}]
    assert got == theirs(url)


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_measured_j_content_determines_the_compression_and_names_do_not(kind: str) -> None:
    samples: list[dict[str, str | bytes]] = [{"__key__": f"{n}", "cls": b"%d" % n} for n in range(3)]
    for name in ("plain.tar", "wrong.gz", "none"):
        Path(build_shard(f"x.tar.{kind}", samples)).rename(name)
        got = ours(name)
        assert len(got) == 3
        assert got == theirs(name)


def test_measured_k_no_archive_of_two_in_one_file_is_lost_silently() -> None:
    parts = [Path(build_shard(f"{n}.tar", [{"__key__": f"{n}", "cls": b"1"}])).read_bytes() for n in range(2)]
    Path("both.tar").write_bytes(b"".join(parts))
    assert [sample["__key__"] for sample in theirs("both.tar")] == ["0"]
    with pytest.raises(CorruptShardError, match="after the end marker") as caught:
        ours("both.tar")
    assert IGNORE_ZEROS in caught.value.hints
    assert [sample["__key__"] for sample in ours("both.tar", ignore_zeros=True)] == ["0", "1"]


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_measured_m_names_of_more_than_a_hundred_characters(tar_format: int) -> None:
    key = "long/" * 40 + "ä" * 60
    url = build_shard("long.tar", [{"__key__": key, "txt": b"1", "cls": b"2"}], tar_format=tar_format)
    got = ours(url)
    assert [sample["__key__"] for sample in got] == [key]
    assert got == theirs(url)


# samples


def test_measured_c_fields_that_differ_only_in_case_clash() -> None:
    url = write_members("case.tar", [("a.txt", b"1"), ("a.TXT", b"2")])
    with pytest.raises(ValueError, match="duplicate file name in tar file txt"):
        theirs(url)
    with pytest.raises(DuplicateKeyError, match=naming("case.tar", "'txt'", "'a'")):
        ours(url)


def test_measured_d_a_file_without_extension_ends_no_sample() -> None:
    url = write_members("readme.tar", [("a.txt", b"1"), ("README", b"?"), ("a.cls", b"2")])
    got = ours(url)
    assert [fields(sample) for sample in got] == [{"txt", "cls"}]
    assert got == theirs(url)


def test_measured_f_a_repeated_key_is_another_sample_and_warns() -> None:
    url = write_members("back.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.cls", b"3")])
    with pytest.warns(UserWarning, match=r"back\.tar.*'a'"):
        got = ours(url)
    assert [sample["__key__"] for sample in got] == ["a", "b", "a"]
    assert got == theirs(url)


# errors


def test_17_a_truncated_command_output_is_an_error_or_the_end() -> None:
    build_shard("digits.tar", [{"__key__": f"{n:03}", "txt": b"x" * 3000} for n in range(COUNT)])
    url = "pipe:dd if=digits.tar bs=512 count=95 2> /dev/null"
    with pytest.raises(tarfile.ReadError):
        theirs(url)
    with pytest.raises(TruncatedShardError, match=r"pipe:dd .* ends inside the member"):
        ours(url)
    stop = webdataset.ignore_and_stop
    got = ours(url, on_error=stop)
    # The name of the truncated file shows that it is no field of the sample before it.
    assert len(got) == 95 // 7
    assert got == theirs(url, handler=stop)


def test_measured_o_a_handler_that_stops_withholds_an_incomplete_sample() -> None:
    data = Path(build_shard("cut.tar", [{"__key__": f"{n}", "cls": b"1", "txt": b"x" * 2000} for n in range(3)]))
    data.write_bytes(data.read_bytes()[: 2 * 4096 + 1500])  # in the last file
    stop = webdataset.ignore_and_stop
    urls = ["cut.tar", build_shard("good.tar", [{"__key__": "2", "txt": b"1", "cls": b"2"}])]
    # A handler that stops ends the shard. Theirs yields a partial sample.
    whole = {"cls", "txt"}
    assert [fields(sample) for sample in theirs(urls, handler=stop)] == [whole, whole, {"cls"}, whole]
    for handler in (stop, webdataset.ignore_and_continue):
        got = ours(urls, on_error=handler)
        assert [sample["__key__"] for sample in got] == ["0", "1", "2"]
        assert all(fields(sample) == whole for sample in got)


def test_measured_g_an_empty_archive_is_valid_and_no_archive_is_an_error() -> None:
    good = build_shard("good.tar", [{"__key__": "a", "cls": b"1"}])
    empty = build_shard("empty.tar", [])
    assert ours([empty, good]) == theirs([empty, good]) != []
    Path("nothing.tar").write_bytes(b"")
    Path("garbage.tar").write_bytes(b"garbage!" * 1000)
    for url, error, text in [
        ("nothing.tar", TruncatedShardError, "empty"),
        ("garbage.tar", CorruptShardError, "garbage.tar"),
    ]:
        with pytest.raises(tarfile.ReadError):
            theirs(url)
        with pytest.raises(error, match=text):
            ours(url)
        got = ours([url, good], on_error=webdataset.ignore_and_continue)
        assert [sample["__key__"] for sample in got] == ["a"]
        assert got == theirs([url, good], handler=webdataset.ignore_and_continue)


def test_18_a_command_writes_the_shard() -> None:
    got = ours("pipe:cat digits.tgz")
    assert len(got) == COUNT
    assert got == theirs("pipe:cat digits.tgz")


def test_67_samples_of_local_shards_contain_the_path() -> None:
    path = Path("digits.tgz").absolute()
    for url in ("digits.tgz", f"file:{path}"):
        local = ours(url)
        assert {Path(sample["__local_path__"]).absolute() for sample in local} == {path}
        assert local == theirs(url)
    assert all("__local_path__" not in sample for sample in ours("pipe:cat digits.tgz"))


def test_71_a_missing_shard_is_an_os_error(nginx: Nginx) -> None:
    for read in (theirs, ours):
        with pytest.raises(OSError, match=r"none\.tar"):
            read("none.tar")
    with pytest.raises(ShardOpenError) as caught:
        ours(f"http://127.0.0.1:{nginx.http}/none.tar")
    assert isinstance(caught.value, OSError)


def test_34_a_loader_is_closed_at_the_end_of_a_block_and_files_without_one(nothing_left: None) -> None:
    with webdataset.WebDataset("digits.tgz", shardshuffle=False) as dataset:
        assert len(list(dataset)) == COUNT
    pipe = ShardList("digits.tgz").load_wds_shards().group_samples()
    assert not hasattr(pipe, "__enter__")
    with DataLoader2(pipe) as loader:
        assert next(iter(loader))["__key__"] == "000"
    samples = iter(pipe)
    assert next(samples)["__key__"] == "000"
