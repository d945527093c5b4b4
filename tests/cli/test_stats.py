"""The command ``stats``."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.prepare.stats import Sizes
from wds_datapipes.testing import build_shard


def test_sums_sizes_and_a_histogram(program: Any, shards: list[str]) -> None:
    build_shard("b.tar", [{"__key__": "x", "txt": b""}])
    done = program("stats", *shards, "b.tar", "--workers", "2")
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        "4 shards of 41.0 kB, 13 samples, from 1 to 4 in a shard",
        "",
        "         count    total  smallest   median     mean  largest",
        "shards       4  41.0 kB   10.2 kB  10.2 kB  10.2 kB  10.2 kB",
        "samples     13  1.82 kB       0 B    103 B    140 B    303 B",
        "jpg         12  1.81 kB       0 B    151 B    151 B    302 B",
        "cls         12     12 B       1 B      1 B      1 B      1 B",
        "txt          1      0 B       0 B      0 B      0 B      0 B",
        "",
        "Samples by size",
        "from 0 B    1  #############",
        "from 1 B    1  #############",
        "from 2 B    2  ###########################",
        "from 64 B   3  ########################################",
        "from 128 B  3  ########################################",
        "from 256 B  3  ########################################",
    ]


def test_facts_are_json(program: Any, shards: list[str]) -> None:
    facts = json.loads(program("stats", *shards, "--json").out)
    assert facts["samples"]["number"] == 12
    assert facts["fields"]["cls"] == {
        "number": 12,
        "total": 12,
        "smallest": 1,
        "median": 1.0,
        "mean": 1.0,
        "largest": 1,
    }
    assert sum(facts["histogram"].values()) == 12
    assert facts["faults"] == []


def test_unreadable_shards_are_reported(program: Any, shards: list[str]) -> None:
    Path("a-1.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    done = program("stats", *shards)
    assert done.code == 1
    assert done.lines[0].startswith("3 shards of more than 20.5 kB, 9 samples")
    assert program("stats", "a-1.tar").lines[0].startswith("1 shard of unknown size, 1 sample")
    assert done.err.startswith("Error: a-1.tar ends at byte 4000 ")
    assert json.loads(program("stats", *shards, "--json").out)["faults"][0]["kind"] == "TruncatedShardError"


def test_a_missing_shard_is_a_usage_error(program: Any, shards: list[str]) -> None:
    done = program("stats", "none.tar")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Error: There is no file 'none.tar'")
    done = program("stats", "a-0.tar", "none.tar")
    assert done.code == 2
    assert "4 samples" in done.lines[0]


def test_names_cannot_write_to_the_terminal(program: Any, folder: Path) -> None:
    build_shard("evil.tar", [{"__key__": "a", "\x1b[31m": "x"}])
    assert "\x1b" not in program("stats", "evil.tar").out


@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_sizes_are_those_of_the_standard_library(sizes: list[int]) -> None:
    found = Sizes.of(sizes)
    assert (found.number, found.total) == (len(sizes), sum(sizes))
    assert (found.smallest, found.largest) == (min(sizes), max(sizes))
    assert found.median == statistics.median(sizes)
    assert abs(found.mean - statistics.fmean(sizes)) <= 1e-9 * max(sizes)


def test_classes_are_counted(program: Any, shards: list[str]) -> None:
    build_shard("b.tar", [{"__key__": "x", "cls": "3\n"}, {"__key__": "y", "txt": "no class"}])
    done = program("stats", *shards, "b.tar", "--label", "cls", "--workers", "2")
    assert (done.code, done.err) == (0, "")
    assert done.lines[done.lines.index("Samples by class: 4 classes in cls") :] == [
        "Samples by class: 4 classes in cls",
        "3  4  ########################################",
        "0  3  ##############################",
        "1  3  ##############################",
        "2  3  ##############################",
        "1 sample without a class",
    ]
    facts = json.loads(program("stats", *shards, "b.tar", "--label", "cls", "--json").out)
    assert facts["classes"] == {"3": 4, "0": 3, "1": 3, "2": 3}


def test_many_classes_are_shown_in_part(program: Any, folder: Path) -> None:
    build_shard("many.tar", [{"__key__": f"{n}-{copy}", "cls": f"{n}"} for n in range(30) for copy in range(30 - n)])
    lines = program("stats", "many.tar", "--label", "cls").lines
    shown = [line.split()[0] for line in lines[lines.index("Samples by class: 30 classes in cls") + 1 :]]
    assert shown == [*map(str, range(10)), "...", *map(str, range(20, 30))]


def test_classes_of_a_stream_are_refused(program: Any, shards: list[str]) -> None:
    os.mkfifo("fifo.tar")
    for name in ("-", "fifo.tar"):
        done = program("stats", name, "--label", "cls")
        assert done.code == 2
        assert f"--label reads shards twice, so '{name}' must be a file" in done.err


def test_classes_before_a_fault_are_counted(program: Any, folder: Path) -> None:
    whole = Path(build_shard("cut.tar", [{"__key__": f"{n}", "cls": "7"} for n in range(10)])).read_bytes()
    Path("cut.tar").write_bytes(whole[: len(whole) // 2])
    done = program("stats", "cut.tar", "--label", "cls", "--json")
    facts = json.loads(done.out)
    assert done.code == 1
    assert facts["classes"] == {"7": facts["samples"]["number"]}
    assert facts["samples"]["number"] > 1
