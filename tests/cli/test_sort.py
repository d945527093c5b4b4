"""The command ``sort``; what it shares with ``shuffle`` is tested there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard


def read(*urls: str) -> list[dict[str, Any]]:
    samples = group_samples(read_shards(urls))
    return [{f: v for f, v in sample.items() if f == "__key__" or f[:2] != "__"} for sample in samples]


def keys(*urls: str) -> list[str]:
    return [sample["__key__"] for sample in read(*urls)]


@given(
    st.lists(st.tuples(st.integers(-3, 12), st.integers(0, 400)), min_size=1, max_size=25),
    st.booleans(),
    st.booleans(),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each writes its own files
def test_it_sorts_as_python_does(program: Any, values: list[tuple[int, int]], numeric: bool, reverse: bool) -> None:
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"{number:03d}", "cls": f"{value}", "bin": bytes([number]) * size}
        for number, (value, size) in enumerate(values)
    ]
    build_shard("x.tar", samples[:10])
    build_shard("y.tar", samples[10:])
    arguments = [*["--numeric"][: int(numeric)], *["--reverse"][: int(reverse)]]
    assert program("sort", "x.tar", "y.tar", "-o", "o.tar", "--by", "cls", *arguments).code == 0
    before = read("x.tar", "y.tar")
    assert read("o.tar") == sorted(
        before, key=lambda sample: int(sample["cls"]) if numeric else sample["cls"], reverse=reverse
    )


@pytest.fixture
def values(folder: Path) -> str:
    """Write samples a to e, of which d lacks the field, and e has an empty one."""
    return build_shard(
        "v.tar",
        [
            {"__key__": "c", "json": '{"size": {"w": 10}}', "txt": "10"},
            {"__key__": "d", "txt": "1e1"},
            {"__key__": "a", "json": '{"size": {"w": 9.5}}', "txt": "9"},
            {"__key__": "e", "json": '{"size": null}', "txt": "-3"},
            {"__key__": "b", "json": '{"size": {"w": 9}}', "txt": "10"},
        ],
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "abcde"),
        ("--reverse", "edcba"),
        ("--by txt", "ecbda"),
        ("--by txt --numeric", "eacdb"),
        ("--by txt --numeric --reverse", "cdbae"),
        ("--by json/size/w --missing last", "bacde"),
        ("--by json/size/w --missing first", "debac"),
        ("--by json/size/w --missing last --reverse", "cabde"),
        ("--by json/size/w --missing first --reverse", "decab"),
    ],
)
def test_samples_are_sorted_as_requested(program: Any, values: str, arguments: str, expected: str) -> None:
    done = program("sort", values, "-o", "o.tar", *arguments.split())
    assert (done.code, done.err) == (0, "")
    assert keys("o.tar") == list(expected)
    assert sorted(read("o.tar"), key=str) == sorted(read(values), key=str)


def test_a_sample_without_a_value_is_named(program: Any, values: str) -> None:
    done = program("sort", values, "--by", "json/size/w")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "Error: The sample 'd' of v.tar has no 'json/size/w' to sort by. It has txt. To keep "
        "it, use --missing first, or --missing last\n"
    )
    done = program("sort", values, "--by", "json/size/w", "--skip-bad", "--json", "-o", "o.tar")
    assert [skipped["kind"] for skipped in json.loads(done.out)["skipped"]] == ["MissingFieldError"] * 2
    assert keys("o.tar") == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--by json --numeric --missing last", 1, "is not a number"),
        ("--by txt/a", 1, "cannot be sorted by"),
        ("--by /a", 2, "--by: samples are sorted by 'key'"),
        ("--missing middle", 2, "--missing"),
    ],
)
def test_unsortable_samples_leave_nothing(program: Any, values: str, arguments: str, code: int, message: str) -> None:
    if arguments == "--by txt/a":
        message = "has no 'txt/a' to sort by"
    done = program("sort", values, *arguments.split())
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert [path.name for path in Path().iterdir()] == [values]


def test_names_of_shards_begin_with_the_command(program: Any, values: str) -> None:
    done = program("sort", values, "--maxcount", "3")
    assert [line.partition(":")[0] for line in done.lines] == ["sort-000000.tar", "sort-000001.tar"]
    assert keys("sort-000000.tar", "sort-000001.tar") == list("abcde")
