"""ShardWriter: full shards, and resuming a conversion after an interruption."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes import ShardList, ShardWriter, WriteOptions
from wds_datapipes.errors import EncodeError, ShardWriteError, StateError
from wds_datapipes.index import check_index, index_url, read_index
from wds_datapipes.writing import Instance, ShardInfo

COUNT = 23


pytestmark = pytest.mark.usefixtures("folder")

Forked = Callable[[Callable[[], object]], "int | None"]


def samples(count: int = COUNT) -> list[dict[str, Any]]:
    rng = Random(0)
    return [
        {"__key__": f"{number:03d}", "txt": f"sample {number}", "bin": rng.randbytes(rng.randrange(3000))}
        for number in range(count)
    ]


def convert(source: Iterable[dict[str, Any]], pattern: str = "s-%03d.tar", **options: Any) -> list[ShardInfo]:
    with ShardWriter(pattern, **{"maxcount": 4, **options}) as writer:
        for sample in source:
            writer.write(sample)
    return writer.shards


def files() -> list[str]:
    """Return all names except those of locks, which belong to active or killed writers."""
    return sorted(name for name in os.listdir() if not name.endswith(".lock"))


def clear() -> None:
    for name in files():
        os.unlink(name)


def shards() -> dict[str, bytes]:
    return {name: Path(name).read_bytes() for name in files() if name.endswith((".tar", ".tgz"))}


def read() -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for sample in ShardList("*.tar").load_wds_shards().group_samples():
        found.setdefault(sample["__url__"], []).append(sample["__key__"])
    return list(found.items())


# When a shard is full


def test_no_shard_is_written_without_samples_nor_an_empty_one_at_the_end() -> None:
    assert convert([]) == []
    assert files() == []
    assert len(convert(samples(8))) == 2
    assert files() == ["s-000.tar", "s-001.tar"]


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 60_000), st.integers(1, 9))
def test_only_a_shard_of_a_single_sample_is_larger_than_maxsize(maxsize: int, maxcount: int) -> None:
    clear()
    infos = convert(samples(), maxsize=maxsize, maxcount=maxcount)
    assert [key for _, keys in read() for key in keys] == [sample["__key__"] for sample in samples()]
    for before, info in zip([None, *infos], infos, strict=False):
        assert info.samples <= maxcount
        assert info.bytes <= maxsize or info.samples == 1
        assert before is None or before.samples == maxcount or before.bytes + 1024 > maxsize - 5000


def test_numbers_start_at_the_given_one_and_take_steps() -> None:
    infos = convert(samples(9), start_shard=5, share=Instance(workers=3))
    assert [info.url for info in infos] == ["s-005.tar", "s-008.tar", "s-011.tar"]


def test_streams_of_an_opener_are_closed() -> None:
    opened: dict[str, Any] = {}

    class Kept(io.BytesIO):
        def close(self) -> None:
            self.kept = self.getvalue()
            super().close()

    def opener(name: str) -> Any:
        return opened.setdefault(name, Kept())

    infos = convert(samples(5), "s-%d.tgz", opener=opener)
    assert [info.url for info in infos] == list(opened) == ["s-0.tgz", "s-1.tgz"]
    assert all(stream.closed and stream.kept.startswith(b"\x1f\x8b") for stream in opened.values())
    assert files() == []


@pytest.mark.parametrize("verbose", [True, False])
def test_each_shard_is_logged_on_request(verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "wds_datapipes"):
        convert(samples(5), verbose=verbose)
    size = os.path.getsize("s-001.tar")
    assert caplog.messages[1:] == ([f"Wrote s-001.tar: 1 sample, {size} bytes"] if verbose else [])


def test_keys_are_checked_within_a_shard() -> None:
    with ShardWriter("s-%d.tar", maxcount=2) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        with pytest.raises(EncodeError, match=r"'a' was already written to 's-0\.tar'"):
            writer.write({"__key__": "a", "txt": "2"})
        with pytest.raises(
            EncodeError, match=r"'a\.b' cannot be written: .* such as 'a-b'; to keep it, pass .*=last_dot"
        ):
            writer.write({"__key__": "a.b", "txt": "2"})
        with pytest.raises(EncodeError):
            writer.write({"__key__": "b", "cls": None})
        writer.write({"__key__": "b", "txt": "2"})
        writer.write({"__key__": "a", "txt": "3"})  # in another shard
    assert read() == [("s-0.tar", ["a", "b"]), ("s-1.tar", ["a"])]


def test_an_index_is_written_next_to_each_shard() -> None:
    convert(samples(5), options=WriteOptions(index=True), resume=True)
    for name in ("s-000.tar", "s-001.tar"):
        check_index(read_index(index_url(name)), name)
    with pytest.raises(ValueError, match="index=True needs file names"):
        ShardWriter("s-%d.tar", options=WriteOptions(index=True), opener=open)  # type: ignore[arg-type]  # it is refused
    with pytest.raises(StateError, match="index=True"):
        convert(samples(5), resume=True)


# Interruptions


def test_a_broken_writer_accepts_no_more_samples() -> None:
    def full(name: str) -> Any:
        return open("/dev/full", "wb", buffering=0)

    writer = ShardWriter("s-%d.tar", opener=full)
    writer.write(samples(1)[0])
    with pytest.raises(OSError, match="No space left"):
        writer.write({"__key__": "large", "bin": bytes(1 << 20)})
    with pytest.raises(ValueError, match=r"the writer of 's-%d\.tar' is closed"):
        writer.write(samples(1)[0])
    writer.close()
    assert writer.shards == []


# Resuming


def whole(**options: Any) -> dict[str, bytes]:
    """The shards of an uninterrupted run."""
    convert(samples(), **options)
    wanted = shards()
    clear()
    return wanted


OPTIONS: list[dict[str, Any]] = [
    {},
    {"maxsize": 9000},
    {"options": WriteOptions(compress="gz")},
    {"share": Instance(0, 2, 1, 3)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "".join(options))
def test_a_conversion_resumes_after_any_sample(options: dict[str, Any]) -> None:
    wanted = whole(**options)
    for cut in range(0, COUNT + 1, 5 if options else 2):
        clear()
        writer = ShardWriter("s-%03d.tar", maxcount=4, resume=True, **options)
        for sample in samples()[:cut]:
            writer.write(sample)
        writer.discard()
        before = len(writer.shards)
        assert [info.samples for info in convert(samples(), resume=True, **options)][:before] == [
            info.samples for info in writer.shards
        ]
        assert shards() == wanted


def die_at(call: int, **options: Any) -> None:
    """Write, and get killed right before or after a certain system call that makes a change durable."""
    left = [call]

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            die()
            result = function(*arguments, **keywords)
            die()
            return result

        return run

    def die() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync, os.write = deadly(os.fsync), deadly(os.write)
    Path.replace = deadly(Path.replace)  # type: ignore[method-assign]  # in a process of its own
    convert(samples(11), resume=True, **options)


def test_a_conversion_killed_at_any_step_resumes(forked: Forked) -> None:
    convert(samples(11))
    wanted = shards()
    for call in range(0, 100, 3):  # before or after a system call
        clear()
        ended = forked(partial(die_at, call))
        there = shards()
        assert there == {name: wanted[name] for name in there}  # each of them complete
        convert(samples(11), resume=True)
        assert shards() == wanted
        assert files() == [*wanted, "s-shards.tar.journal"]  # and no temporary file
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert call > 20


def test_the_caller_may_start_after_the_finished_samples() -> None:
    wanted = whole()
    convert(samples()[:10], resume=True, maxcount=4)
    os.unlink("s-002.tar")  # the last one, which was not full
    with ShardWriter("s-%03d.tar", maxcount=4, resume=True) as writer:
        done = writer.skip_finished()
        assert done == 8
        for sample in samples()[done:]:
            writer.write(sample)
    assert shards() == wanted
    assert [info.url for info in writer.shards] == list(wanted)


def test_the_start_can_be_set_only_before_the_first_sample() -> None:
    convert(samples()[:10], resume=True)
    with ShardWriter("s-%03d.tar", maxcount=4, resume=True) as writer:
        writer.write(samples()[0])
        with pytest.raises(ValueError, match="must be called before the first sample"):
            writer.skip_finished()
        for sample in samples()[1:10]:
            writer.write(sample)
    assert len(writer.shards) == 3


def test_finished_samples_are_skipped_without_being_encoded() -> None:
    convert(samples()[:8], resume=True)
    encoded = []

    def encode(value: str) -> bytes:
        encoded.append(value)
        return value.encode()

    convert(samples(), resume=True, options=WriteOptions(encoder={"txt": encode}))
    assert encoded == [sample["txt"] for sample in samples()[8:]]


def test_refused_samples_count_as_given() -> None:
    def given() -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(samples()):
            yield sample if number % 3 else {**sample, "cls": None}

    def write(writer: ShardWriter, source: Iterable[dict[str, Any]]) -> None:
        for sample in source:
            with contextlib.suppress(EncodeError):
                writer.write(sample)

    with ShardWriter("s-%03d.tar", maxcount=4) as writer:
        write(writer, given())
    wanted = shards()
    for cut in range(0, COUNT, 5):
        clear()
        writer = ShardWriter("s-%03d.tar", maxcount=4, resume=True)
        write(writer, list(given())[:cut])
        writer.discard()
        with ShardWriter("s-%03d.tar", maxcount=4, resume=True) as writer:
            write(writer, given())
        assert shards() == wanted


def test_different_samples_are_noticed() -> None:
    convert(samples()[:8], resume=True)
    with pytest.raises(StateError, match=naming("'s-000.tar'", "keys")):
        convert(reversed(samples()), resume=True)
    with pytest.raises(StateError, match=naming("'s-001.tar'", "fewer samples")):
        convert(samples()[:5], resume=True)
    before = shards()
    convert(samples()[:8], resume=True)
    assert shards() == before


@pytest.mark.parametrize(
    ("name", "change"),
    [("maxcount", {"maxcount": 5}), ("maxsize", {"maxsize": 9e9}), ("mtime", {"options": WriteOptions(mtime=1)})],
)
def test_another_conversion_is_noticed(name: str, change: dict[str, Any]) -> None:
    convert(samples()[:8], resume=True)
    with pytest.raises(StateError, match=f"belongs to a conversion with {name}=.*delete the journal"):
        convert(samples(), resume=True, **change)


@pytest.mark.parametrize("text", ["my notes", "my notes\nand others"])
def test_another_file_stays_as_it_is(text: str) -> None:
    Path("notes").write_text(text)
    with pytest.raises(StateError, match=naming("'notes'", "first line")):
        convert(samples(), resume="notes")
    assert Path("notes").read_text() == text


def damaged(data: bytes) -> Iterator[bytes]:
    """Yield a journal with one byte changed, removed or inserted, with lines removed or reversed, or truncated."""
    for at in range(0, len(data), 8):
        other = b"%d" % ((data[at] + 1) % 10) if chr(data[at]).isdigit() else bytes([data[at] ^ 0x80])
        for middle in (other, b"", (b"\n", b"\r")[at // 8 % 2] + data[at : at + 1]):
            yield data[:at] + middle + data[at + 1 :]
    for end in range(0, len(data), 37):
        yield data[:end]
    lines = data.splitlines(keepends=True)
    for number in range(len(lines)):
        yield b"".join(lines[:number] + lines[number + 1 :])
        yield b"".join(lines[:number] + lines[number:][::-1])


def test_a_damaged_journal_is_an_error_or_changes_no_shard() -> None:
    """A wrong line must not hide a missing shard."""
    convert(samples(3), "s-%d.tar", maxcount=1, resume=True)
    wanted = shards()
    journal = Path("s-shards.tar.journal")
    outcomes = []
    for number, data in enumerate(damaged(journal.read_bytes())):
        journal.write_bytes(data)
        if number % 4:
            Path("s-1.tar").unlink(missing_ok=True)
        elif not os.path.exists("s-1.tar"):
            Path("s-1.tar").write_bytes(wanted["s-1.tar"])
        try:
            convert(samples(3), "s-%d.tar", maxcount=1, resume=True)
        except StateError as error:
            assert re.search(r"(Line \d of the journal|The file) 's-shards\.tar\.journal' ", str(error))  # noqa: PT017
            assert journal.read_bytes() == data
            outcomes.append("error")
        else:
            assert shards() == wanted
            outcomes.append("resumed")
    assert outcomes.count("error") > 120
    assert outcomes.count("resumed") > 10


def test_the_error_of_a_damaged_line_states_which_lines_to_keep() -> None:
    wanted = whole()
    convert(samples(), resume=True)
    journal = Path("s-shards.tar.journal")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], lines[3].replace(b"002.tar", b"001.tar"), *lines[4:]]))
    os.unlink("s-002.tar")
    with pytest.raises(StateError, match=naming("'s-shards.tar.journal'", "Line 4", "checksum", "head -n 3")):
        convert(samples(), resume=True)
    journal.write_bytes(b"".join(lines[:3]))
    convert(samples(), resume=True)
    assert shards() == wanted


def test_the_damaged_journal_of_another_writer_is_named() -> None:
    convert(samples(4), resume=True, share=Instance(workers=2))
    other: dict[str, Any] = {"resume": True, "share": Instance(worker=1, workers=2)}
    journal = Path("s-shards.tar-0-of-2.journal")
    data = journal.read_bytes()
    journal.write_bytes(data.replace(b"2 workers", b"3 workers"))
    with pytest.raises(StateError, match=r"Line 1 of the journal 's-shards\.tar-0-of-2\.journal'.* Delete it; the"):
        convert(samples(4), **other)
    journal.unlink()
    journal.mkdir()
    with pytest.raises(ShardWriteError, match=r"'s-shards\.tar-0-of-2\.journal' cannot be read: Is a directory"):
        convert(samples(4), **other)


@pytest.mark.usefixtures("nothing_left")
def test_a_dropped_writer_holds_no_journal() -> None:
    writers = [ShardWriter("s-%03d.tar", resume=True)]
    writers.clear()
    ShardWriter("s-%03d.tar", resume=True).close()


def test_two_conversions_cannot_share_a_journal() -> None:
    writer = ShardWriter("s-%03d.tar", resume=True)
    with pytest.raises(StateError, match=naming("another process")):
        ShardWriter("s-%03d.tar", resume=True)
    writer.close()
    ShardWriter("s-%03d.tar", resume=True).close()


@pytest.mark.parametrize("change", [os.unlink, lambda name: os.truncate(name, 1000)])
def test_a_missing_or_shorter_shard_is_written_again(change: Callable[[str], None]) -> None:
    wanted = whole()
    convert(samples(), resume=True)
    change("s-002.tar")
    convert(samples(), resume=True)
    assert shards() == wanted
    lines = Path("s-shards.tar.journal").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines[1:]] == list(range(6))


def test_shards_moved_away_by_post_are_not_missed() -> None:
    os.mkdir("sent")

    def send(name: str) -> None:
        os.rename(name, f"sent/{name}")

    convert(samples()[:8], resume=True, post=send)
    convert(samples(), resume=True, post=send)
    assert sorted(os.listdir("sent")) == [f"s-{number:03d}.tar" for number in range(6)]


def test_a_journal_of_shards_in_a_store_is_a_local_file() -> None:
    import fsspec  # type: ignore[import-untyped]  # it carries no types

    store = fsspec.filesystem("memory")
    store.store.clear()
    with pytest.raises(ValueError, match="a journal must be a local file"):
        ShardWriter("memory://d/s-%d.tar", resume=True)
    options: dict[str, Any] = {"resume": "here.journal"}
    convert(samples()[:8], "memory://d/s-%d.tar", **options)
    store.rm("/d/s-1.tar")
    infos = convert(samples(), "memory://d/s-%d.tar", **options)
    assert sorted(store.store) == [f"/d/s-{number}.tar" for number in range(6)]
    assert [info.bytes for info in infos] == [len(store.cat(f"/d/s-{number}.tar")) for number in range(6)]
    store.store.clear()


def test_an_unwritable_journal_is_reported() -> None:
    with pytest.raises(ShardWriteError, match=r"journal 'none/s\.journal' cannot be opened: No such file"):
        ShardWriter("s-%d.tar", resume="none/s.journal")


def write_and_wait(is_past: Any) -> None:
    """Write shards, and wait past the first shards of another process."""
    writer = ShardWriter("s-%03d.tar", maxcount=1, verbose=False)
    for number in range(3):
        writer.write({"__key__": f"a{number}", "txt": "x"})
    is_past.set()
    signal.pause()


@pytest.mark.parametrize("resume", [False, True])
def test_two_processes_never_mix_their_shards(resume: bool) -> None:
    forks = multiprocessing.get_context("fork")
    is_past = forks.Event()
    other = forks.Process(target=write_and_wait, args=(is_past,))
    other.start()
    assert is_past.wait(600)
    text = r"Another writer is writing the shards 's-%03d\.tar'.*Wait until it has finished, or choose"
    with ShardWriter("s-%03d.tar", resume=resume) as writer, pytest.raises(StateError, match=text):
        writer.write({"__key__": "b0", "txt": "y"})
    other.kill()
    other.join()
    other.close()
    convert([{"__key__": f"b{number}", "txt": "y"} for number in range(3)], maxcount=1)
    assert read() == [(f"s-00{number}.tar", [f"b{number}"]) for number in range(3)]
    assert not [name for name in os.listdir() if name.endswith((".lock", ".part"))]
