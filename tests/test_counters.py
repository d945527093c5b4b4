"""The book of what a process reads and passes over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from wds_datapipes.counters import COUNTERS, LATEST, Counters, Skipped, SkippedItem
from wds_datapipes.errors import DecodeError, TruncatedShardError
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.shards.loading import ReadOptions, load_wds_shards
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Shard


@pytest.fixture
def book() -> Iterator[Counters]:
    """Return this process's book, empty; other tests have written into it."""
    COUNTERS.clear()
    yield COUNTERS
    COUNTERS.clear()


def item(stage: str, error: str, reason: str) -> SkippedItem:
    return SkippedItem(stage, error, "a.tar", "key", "field", reason)


def test_a_new_book_is_empty() -> None:
    book = Counters()
    assert (book.shard, book.entries, book.on_shard, book.skipped()) == ("", 0, None, Skipped())
    assert book.skipped().total == 0


def test_items_are_counted_by_stage_and_kind() -> None:
    book = Counters()
    items = [
        item("decode", "ValueError", "a"),
        item("group", "ValueError", "b"),
        item("decode", "KeyError", "c"),
        item("decode", "ValueError", "d"),
    ]
    for each in items:
        book.passed_over(each)
    skipped = book.skipped()
    assert skipped.counts == {"decode: ValueError": 2, "group: ValueError": 1, "decode: KeyError": 1}
    assert skipped.total == book.entries == 4
    assert skipped.latest == tuple(items)
    assert str(items[2]) == "decode: KeyError: c"


def test_only_the_latest_errors_are_kept_whole() -> None:
    book = Counters()
    for number in range(10_000):
        book.passed_over(item("decode", "ValueError", str(number)))
    skipped = book.skipped()
    assert skipped.counts == {"decode: ValueError": 10_000}
    assert [each.reason for each in skipped.latest] == [str(number) for number in range(10_000 - LATEST, 10_000)]


def test_what_was_read_from_the_book_does_not_change() -> None:
    book = Counters()
    book.passed_over(item("decode", "ValueError", "a"))
    before = book.skipped()
    book.passed_over(item("decode", "ValueError", "b"))
    assert before == Skipped({"decode: ValueError": 1}, (item("decode", "ValueError", "a"),))


def test_each_shard_is_told_to_whoever_asks() -> None:
    book, told = Counters(), list[str]()
    book.opened("a.tar")
    assert book.shard == "a.tar"
    book.on_shard = told.append
    for shard in ("b.tar", "c.tar", "c.tar"):
        book.opened(shard)
        assert book.shard == shard
    assert told == ["b.tar", "c.tar", "c.tar"]


def test_a_cleared_book_tells_nobody() -> None:
    book, told = Counters(), list[str]()
    book.on_shard = told.append
    book.passed_over(item("decode", "ValueError", "a"))
    book.clear()
    book.opened("a.tar")
    assert told == []
    assert (book.entries, book.skipped()) == (0, Skipped())


# who writes into it


@pytest.mark.filterwarnings("ignore:a_stage skipped")
def test_every_policy_that_goes_on_is_in_the_book(book: Counters) -> None:
    answers = iter([True, False])
    for on_error in ("skip", "warn", lambda _: next(answers)):
        policy = ErrorPolicy(on_error, "a_stage")
        policy.goes_on(TruncatedShardError("x.tar ends"))
    assert book.skipped().counts == {"a_stage: TruncatedShardError": 3}
    assert not policy.goes_on(TruncatedShardError("x.tar ends"))  # the stage ends, which must not be in silence
    assert book.entries == 4
    with pytest.raises(TruncatedShardError):
        ErrorPolicy("raise", "a_stage").goes_on(TruncatedShardError("x.tar ends"))
    assert book.entries == 4


def test_an_entry_tells_the_shard_the_key_and_the_field(book: Counters) -> None:
    policy = ErrorPolicy("skip", "a_stage")
    policy.goes_on(
        DecodeError("bad"), {"__url__": "s3://me:secret@host/a.tar", "__key__": "k", "cls": b""}, field="cls"
    )
    policy.goes_on(TruncatedShardError("cut"), url="b.tar")
    policy.goes_on(KeyError("txt"), {"txt": 1})
    assert book.skipped().latest == (
        SkippedItem("a_stage", "DecodeError", "s3://***@host/a.tar", "k", "cls", "bad"),
        SkippedItem("a_stage", "TruncatedShardError", "b.tar", "", "", "cut"),
        SkippedItem("a_stage", "KeyError", "", "", "", "'txt'"),
    )


def test_the_book_knows_the_shard_that_is_read(book: Counters, tmp_path: Path) -> None:
    names = [build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "txt": name}]) for name in "abc"]
    os.truncate(names[1], 512)
    told: list[str] = []
    book.on_shard = told.append
    read = []
    for shard, name, _, _ in load_wds_shards([*names, str(tmp_path / "missing.tar")], ReadOptions(on_error="skip")):
        read.append(name)
        assert Shard(book.shard) == shard
    assert read == ["a.txt", "c.txt"]
    assert told == [*names, str(tmp_path / "missing.tar")]
    assert book.skipped().counts == {
        "load_wds_shards: TruncatedShardError": 1,
        "load_wds_shards: ShardOpenError": 1,
    }


def test_the_book_holds_no_credentials(book: Counters) -> None:
    address = "unknown://ada:secret@host/a.tar?token=secret"
    with pytest.raises(Exception, match="unknown"):
        list(load_wds_shards([address]))
    assert book.shard == "unknown://***@host/a.tar?token=***"
