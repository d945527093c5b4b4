"""The option ``--limit`` of commands that read shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.testing import build_shard

COMMANDS = [
    ("cat", "big.tar", "-o", "out.tar"),
    ("split", "big.tar", "-o", "out-%d.tar"),
    ("sort", "big.tar", "-o", "out.tar"),
    ("shuffle", "big.tar", "-o", "out.tar"),
    ("map", "-c", "true", "big.tar", "-o", "out/", "--workers", "1"),
    ("verify", "big.tar", "--workers", "1"),
    ("index", "big.tar", "--workers", "1"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_limit_applies_to_each_shard(program: Any, command: tuple[str, ...]) -> None:
    build_shard("big.tar", [{"__key__": "a", "txt": "x" * 3000}])
    done = program(*command, "--limit", "member_bytes=2kB")
    assert done.code == 1
    advice = "If the shard is valid, use --limit member_bytes=... with more, or with none for no limit"
    told = f"has the member 'a.txt' (header at byte 0) of 3000 bytes, and the limit is member_bytes=2000. {advice}"
    assert told in done.out + done.err
    assert not Path("out.tar").exists()
    done = program(*command, "--limit", "member_bytes=2kB", "--limit", "expansion=none", "--limit", "member_bytes=3000")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("text", ["member_bytes", "=3", "size=3", "member_bytes=", "member_bytes=x", "expansion=0.5"])
def test_invalid_limits_are_refused(program: Any, text: str) -> None:
    done = program("verify", "a.tar", "--limit", text)
    assert done.code == 2
    assert "--limit" in done.err


def test_indexes_of_other_programs_accept_no_limit(program: Any) -> None:
    build_shard("a.tar", [{"__key__": "a", "txt": "x"}])
    done = program("index", "a.tar", "--to", "dali", "--limit", "headers=3")
    assert (done.code, "--limit cannot be used with --to" in done.err) == (2, True)
