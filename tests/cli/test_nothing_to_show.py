"""Commands that find nothing report it, and names that are not those of shards are refused."""

from __future__ import annotations

from typing import Any

import pytest

from wds_datapipes.testing import build_shard


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("ls none.tar", 0, "Note: there is no sample in 1 shard"),
        ("ls none.tar other.tar --json", 0, "Note: there is no sample in 2 shards"),
        ("cat none.tar -o x.tar", 0, "Note: there is no sample to write in 1 shard"),
        ("cat a.tar --slice 5:6 -o x-%d.tar", 0, "Note: there is no sample to write in 1 shard"),
        ("split none.tar -o x-%d.tar", 0, "Note: there is no sample to write in 1 shard"),
        ("shuffle none.tar -o x-%d.tar", 0, "Note: there is no sample to write in 1 shard"),
        ("sort none.tar --by key -o x-%d.tar", 0, "Note: there is no sample to write in 1 shard"),
        ("verify none.tar", 0, ""),
        ("ls -s none.tar", 0, ""),
        ("ls a.tar", 0, ""),
        ("cat a.tar -o x.tar", 0, ""),
    ],
)
def test_an_empty_result_is_reported_on_standard_error(arguments: str, code: int, said: str, program: Any) -> None:
    for name in ("none.tar", "other.tar"):
        build_shard(name, [])
    build_shard("a.tar", [{"__key__": "a", "txt": b"x"}])
    done = program(*arguments.split())
    assert (done.code, done.err.strip()) == (code, said)


@pytest.mark.parametrize("target", ["x.zip", "x-%d.7z", "S3.TAR.LZ4"])
def test_a_name_of_another_kind_of_file_is_refused(target: str, program: Any) -> None:
    build_shard("a.tar", [{"__key__": "a", "txt": b"x"}])
    done = program("cat", "a.tar", "-o", target)
    assert (done.code, done.out) == (2, "")
    assert f"Error: '{target}' is not the name of a shard, which is a tar archive" in done.err
