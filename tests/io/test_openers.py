"""Openers other than commands: their errors; nothing stays open, and no secret is revealed."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from error_facts import naming
from readers import bytes_of

from wds_datapipes import ShardList, TarWriter, WriteOptions
from wds_datapipes.errors import MissingSidecarError, ShardOpenError, SpecError, StaleSidecarError, UnknownSchemeError
from wds_datapipes.hints import IN_PROCESS
from wds_datapipes.index import build_indexes, check_index, read_index, write_index
from wds_datapipes.io.openers import known_schemes, local_path, open_parts, open_url, register_opener, split_scheme
from wds_datapipes.io.remote.remote_file import open_ranges
from wds_datapipes.shards.patterns import expand_urls
from wds_datapipes.testing import build_shard

BODY = bytes(range(256)) * 4096
SECRET = "hunter2hunter2"


# Schemes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "scheme", "rest"),
    [
        ("a.tar", "", "a.tar"),
        ("a:b.tar", "", "a:b.tar"),
        ("run:7.tar", "", "run:7.tar"),
        ("C:/data/a.tar", "", "C:/data/a.tar"),
        ("C:\\data\\a.tar", "", "C:\\data\\a.tar"),
        ("c://a.tar", "", "c://a.tar"),
        ("dir/s3://a.tar", "", "dir/s3://a.tar"),
        ("-", "-", ""),
        ("file:a.tar", "file", "a.tar"),
        ("FILE:///a.tar", "file", "///a.tar"),
        ("pipe:cat a://b", "pipe", "cat a://b"),
        ("S3://bucket/a.tar", "s3", "//bucket/a.tar"),
        ("a+b.c-d://x", "a+b.c-d", "//x"),
    ],
)
def test_schemes_are_recognized(url: str, scheme: str, rest: str) -> None:
    assert split_scheme(url) == (scheme, rest)


@pytest.mark.usefixtures("openers")
def test_a_registered_scheme_is_opened_in_any_case_and_gets_the_options() -> None:
    seen = []

    def opener(url: str, /, **options: Any) -> io.BytesIO:
        seen.append((url, options))
        return io.BytesIO(b"data")

    register_opener("Mine", opener)
    assert bytes_of("mine:a") == bytes_of("MINE://b", timeout_s=3) == b"data"
    assert seen == [("mine:a", {}), ("MINE://b", {"timeout_s": 3})]
    assert "mine" in known_schemes()


@pytest.mark.usefixtures("openers")
def test_an_opener_is_replaced_only_on_request() -> None:
    def first(url: str, /, **options: Any) -> io.BytesIO:
        return io.BytesIO(b"first")

    def second(url: str, /, **options: Any) -> io.BytesIO:
        return io.BytesIO(b"second")

    register_opener("mine", first)
    register_opener("mine", first)  # as when its module is imported again
    with pytest.raises(ValueError, match=r"'mine' have an opener already. Pass replace=True"):
        register_opener("MINE", second)
    register_opener("mine", second, replace=True)
    assert bytes_of("mine:") == b"second"
    with pytest.raises(ValueError, match="'pipe' have an opener already"):
        register_opener("pipe", first)
    register_opener("pipe", first, replace=True)
    assert bytes_of("pipe:echo") == b"first"


@pytest.mark.parametrize("scheme", ["", "-", "s", "3s", "s3:", "s3://", "a b", "a_b"])
def test_an_invalid_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(ValueError, match="cannot be the scheme of a URL"):
        register_opener(scheme, lambda url, /, **options: io.BytesIO())


def test_the_error_of_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(UnknownSchemeError, match=r"'nope' of nope://x.*file, .*pipe.*memory.*register_opener\('nope'"):
        open_url("nope://x")


# Local files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a.tar", "a#b?c;d.tar", "%41.tar", "a b.tar", "a:b.tar", "run:1.tar", "ü\n.tar", "*.tar"]
)
def test_a_local_name_is_used_verbatim(folder: Path, name: str) -> None:
    (folder / name).write_bytes(BODY)
    assert bytes_of(name) == bytes_of(str(folder / name)) == BODY
    assert local_path(name) == name
    with open_url(name) as stream:
        assert stream.seekable()
        assert stream.seek(0, io.SEEK_END) == len(BODY)


def test_a_file_url_is_decoded(folder: Path) -> None:
    (folder / "a b%.tar").write_bytes(BODY)
    urls = ["file:a%20b%25.tar", f"file:{folder}/a%20b%25.tar", f"FILE://{folder}/a b%25.tar"]
    for url in [*urls, f"file://localhost{folder}/a%20b%25.tar"]:
        assert bytes_of(url) == BODY
        assert Path(local_path(url) or "").resolve() == (folder / "a b%.tar").resolve()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no/such.tar", r"There is no file 'no/such.tar'. Relative paths start from /"),
        ("/no/such.tar", r"There is no file '/no/such.tar'. Check the name"),
        ("file:/no/such.tar", r"There is no file 'file:/no/such.tar'"),
        ("/", r"'/' is a directory, not a shard. To let ShardList"),
        ("a\0b", r"cannot be opened: embedded null byte"),
        ("x" * 300, r"cannot be opened: File name too long"),
        ("/dev/null/x.tar", r"cannot be opened: Not a directory"),
        ("file://other/x.tar", r"on the host 'other', but file: URLs open only"),
    ],
)
def test_a_local_file_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(ShardOpenError, match=message):
        open_url(url)


# Standard input ---------------------------------------------------------------------------------------------------


def test_standard_input_is_read_once_and_a_worker_has_none(
    monkeypatch: pytest.MonkeyPatch, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BODY)))
    assert bytes_of("-") == BODY
    assert not sys.stdin.buffer.closed
    with pytest.raises(ShardOpenError, match=naming("can only be read once")):
        open_url("-")

    def work() -> None:
        with pytest.raises(ShardOpenError, match="worker processes have none") as caught:
            open_url("-")
        assert caught.value.hints == (IN_PROCESS,)

    assert forked(work) == 0


# File systems of fsspec -------------------------------------------------------------------------------------------


def test_a_file_system_of_fsspec(memory: Any) -> None:
    memory.pipe("/d/a b#?.tar", BODY)
    assert bytes_of("memory://d/a b#?.tar") == bytes_of("MEMORY://d/a b#?.tar", storage_options={}) == BODY
    with pytest.raises(ShardOpenError, match=r"memory://d/no.tar cannot be opened: there is no such file"):
        open_url("memory://d/no.tar")


def test_threads_read_ranges_of_one_file_at_the_same_time(memory: Any) -> None:
    memory.pipe("/d/x.tar", BODY)  # each opening returns the same object of this file system
    file = open_parts("memory://d/x.tar")
    assert file is not None

    def read_part(start: int) -> bytes:
        with file.part(start, start + 1000) as stream:
            return stream.read(300) + stream.read()

    starts = range(0, len(BODY) - 1000, 4001)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read_part, starts)) == [BODY[start : start + 1000] for start in starts]
    with file.part(7, -1) as one, file.part(0, 9) as other:
        assert [one.read(3), other.read(4), one.read(), other.read()] == [BODY[7:10], BODY[:4], BODY[10:], BODY[4:9]]
    file.close()


# S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(s3_store: Any) -> dict[str, Any]:
    """The storage options of an S3 server with one shard."""
    options: dict[str, Any] = s3_store.options()
    assert options["secret"] == SECRET
    fsspec.filesystem("s3", **options).pipe_file("bucket/d/a.tar", BODY)
    return options


def test_s3_is_read_and_its_errors_contain_no_secret(s3: dict[str, Any]) -> None:
    assert bytes_of("s3://bucket/d/a.tar", storage_options=s3) == BODY
    with pytest.raises(ShardOpenError, match=r"s3://bucket/d/no.tar cannot be opened: there is no such file"):
        open_url("s3://bucket/d/no.tar", storage_options=s3)
    other = {**s3, "secret": f"wrong{SECRET}"}
    with pytest.raises(ShardOpenError, match=r"d/a.tar cannot be opened: HTTP status 403, Forbidden \(Sig") as caught:
        open_url("s3://bucket/d/a.tar", storage_options=other)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.usefixtures("openers")
def test_an_opener_may_return_the_body_of_a_response_of_boto3(s3_store: Any, tmp_path: Path) -> None:
    import botocore.session

    options = s3_store.options()
    client = botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )
    register_opener(
        "boto", lambda url, /, **_: client.get_object(Bucket="bucket", Key=url.removeprefix("boto://"))["Body"]
    )
    content = Path(build_shard(tmp_path / "a.tar.gz", [{"__key__": "one", "txt": "1" * 100_000}])).read_bytes()
    client.put_object(Bucket="bucket", Key="a.tar.gz", Body=content)
    assert bytes_of("boto://a.tar.gz") == content
    (sample,) = ShardList("boto://a.tar.gz").load_wds_shards().group_samples()
    assert sample["txt"] == b"1" * 100_000
    client.close()


def test_s3_is_listed(s3: dict[str, Any]) -> None:
    for pattern in ("s3://bucket/d/*.tar", "s3://bucket/d/", "s3://bucket/d/**/a.tar"):
        assert expand_urls(pattern, variables={}, storage_options=s3) == ["s3://bucket/d/a.tar"]
    with pytest.raises(SpecError, match=r"No file matches s3://bucket/d/\*.tgz"):
        expand_urls("s3://bucket/d/*.tgz", variables={}, storage_options=s3)


def test_shards_on_s3_are_indexed_there(s3: dict[str, Any]) -> None:
    # rclone also sends the checksum of a whole object with parts of it, which S3 does not.
    s3 = {**s3, "config_kwargs": {"response_checksum_validation": "when_required"}}
    url = "s3://bucket/i/x.tar"

    def write(*keys: str) -> None:
        with TarWriter(url, options=WriteOptions(storage_options=s3)) as shard:
            for key in keys:
                shard.write({"__key__": key, "bin": bytes(5 << 20)})

    write("0", "1", "2")
    for is_new in (True, False):
        (result,) = build_indexes([url], storage_options=s3)
        assert (result.index_url, result.samples, result.is_new) == (f"{url}.wdsidx", 3, is_new)
    index = read_index(f"{url}.wdsidx", storage_options=s3)
    assert index.facts.etag
    check_index(index, url, depth="headers", storage_options=s3)
    stream = open_ranges(url, storage_options=s3)
    assert stream is not None
    stream.seek(index[2].offset)
    assert stream.read(5) == b"2.bin"
    write("a")
    with pytest.raises(StaleSidecarError, match=r"s3://bucket/i/x\.tar has changed since its index was built"):
        check_index(index, url, storage_options=s3)
    assert build_indexes([url], storage_options=s3)[0].is_new
    other = {**s3, "secret": f"wrong{SECRET}"}
    for use in (read_index, lambda place, **options: write_index(index, place, **options)):
        with pytest.raises(MissingSidecarError, match=r"x\.tar\.wdsidx cannot be (opened|written)") as refused:
            use(f"{url}.wdsidx", storage_options=other)
        assert SECRET not in "".join(traceback.format_exception(refused.value))
