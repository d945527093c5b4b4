"""The findings of fuzzing, each with the smallest input that reproduces it."""

from __future__ import annotations

import io
import json
import os
import struct
import wave
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from error_facts import naming
from state_targets import loader, packed, states

from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.codecs.media import AudioDecoder
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import CacheError, CorruptSidecarError, EncodeError, ReadLimitError, SpecError, StateError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.remote.retry import retry_after
from wds_datapipes.loading.checkpoint.format import STATE, VERSION, WorkerState, checkpoints_in, state_of, with_checksum
from wds_datapipes.on_error.policy import read_quarantine
from wds_datapipes.samples.caching import END, FRAME, MAGIC, open_samples
from wds_datapipes.shard_cache.entry import Entry
from wds_datapipes.shards.mixture_spec import read_mixture
from wds_datapipes.shards.patterns import expand_braces
from wds_datapipes.shards.plain_yaml import parse_plain_yaml
from wds_datapipes.types import Instance
from wds_datapipes.writing.journal import ShardJournal
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

NESTED = b"[" * 100_000


def test_no_picture_starts_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow passes PostScript drawings to Ghostscript, under any field name."""
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ValueError, match="not in an image format"):
        ImageDecoder("rgb8").decode(drawing)
    assert not (tmp_path / "started").exists()


def test_few_bytes_do_not_make_a_huge_picture() -> None:
    with pytest.raises(ReadLimitError, match=naming("24 bytes", "22000 x 9000", 198000000, "image_pixels")):
        ImageDecoder("rgb8").decode(b"P6 22000 9000 255\n".ljust(24, b"\0"))


def test_no_film_names_files_of_this_host(folder: Path) -> None:
    with wave.open("secret.wav", "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(struct.pack("<800h", *range(800)))
    assert AudioDecoder().decode(Path("secret.wav").read_bytes())[1] == 8000
    for name in (b"secret.wav", b"'file:secret.wav'"):
        with pytest.raises(ValueError, match="FFmpeg cannot decode it"):
            AudioDecoder().decode(b"ffconcat version 1.0\nfile " + name + b"\n")


@pytest.mark.parametrize("text", ["a: 2001-99-99", "!!float x: 1", "!!int ''", "[" * 1000, "&a [*a]"])
def test_a_specification_that_is_not_yaml_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        read_mixture(str(path), expand_braces)


def test_a_too_deeply_nested_specification_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(NESTED)
    with pytest.raises(SpecError, match="is not YAML with plain values"):
        read_mixture(str(path), expand_braces)


@pytest.mark.parametrize("text", ["[" * 5000, "- " * 5000, "{a: " * 5000, "? " * 5000, '{"a": [' * 2500])
def test_nested_yaml_is_refused_before_all_of_it_is_read(text: str) -> None:
    import yaml

    read = iter(text)  # as far as the parser has asked
    stream = SimpleNamespace(read=lambda size: "".join(islice(read, 64)))
    with pytest.raises(ValueError, match=r"nested more than 32 deep:\n +in .*line 1, column"):
        parse_plain_yaml(yaml, stream)
    assert len(list(read)) > len(text) // 2
    assert parse_plain_yaml(yaml, f"{'[' * 31}{']' * 31}")


def test_aliases_that_could_expand_beyond_memory_are_refused() -> None:
    import yaml

    laughs = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'ha'}]\n" for n in range(12))
    merged = "".join(f"- &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}], k{n}: 1}}\n" for n in range(1, 12))
    for text in (laughs, f"- &m0 {{k: 1}}\n{merged}", "&a [*a]", "{&a k: *a}"):
        with pytest.raises(ValueError, match="aliases are not supported"):
            parse_plain_yaml(yaml, text)
    assert parse_plain_yaml(yaml, "- &s [a, b]\n- {<<: {x: 1}, y: 2}") == [["a", "b"], {"x": 1, "y": 2}]


@pytest.mark.parametrize(
    "pattern", ["{0..999999999}.tar", "{a{0..9999}{0..9999}{0..9999},b}", "{0..3" * 100, "{" * 5000]
)
def test_a_pattern_expands_to_a_bounded_number_of_shards(pattern: str) -> None:
    with pytest.raises(SpecError):
        expand_braces(pattern)


def test_an_epoch_has_a_bounded_number_of_shards() -> None:
    for taken in (2**31 - 1, 1e300):
        with pytest.raises(SpecError, match="shards in an epoch; the limit is 10,000,000"):
            read_mixture({"datasets": [{"shards": "{0..3}.tar", "resample": taken}]}, expand_braces)


@pytest.mark.parametrize(
    "line",
    [
        b"7",
        b"\xff",
        NESTED,
        b"1" * 5000,
        b'{"number": "0", "url": "a", "samples": 1, "bytes": 2, "sha256": "c", "input_samples": 3, "input_keys": "d"}',
    ],
)
def test_a_damaged_line_of_a_journal_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    ShardJournal(str(path), {}).close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(StateError, match="Line 2 of the journal"):
        ShardJournal(str(path), {})
    path.write_bytes(NESTED + b"\n")
    with pytest.raises(StateError, match="is not a journal"):
        ShardJournal(str(path), {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("number", each) for each in ("0", None, -1, 1 << 64)),
        *(("url", each) for each in (7, None)),
        *(("bytes", each) for each in (-5, 1.5, "2")),
        *(("sha256", None), ("input_samples", "3"), ("input_samples", -3), ("input_keys", 5), ("input_keys", [])),
    ],
)
def test_a_forged_line_of_a_journal_is_named(folder: Path, name: str, value: object) -> None:
    """Its checksum is right."""
    with ShardWriter("a-%d.tar", maxcount=1, resume="journal") as writer:
        for number in range(3):
            writer.write({"__key__": f"{number}", "txt": "a"})
    head, *lines = Path("journal").read_bytes().splitlines(keepends=True)
    row = json.loads(lines[1])
    checksum = int(json.loads(lines[0])["crc32"], 16)
    text = json.dumps({**row, name: value} | {"crc32": ""}).encode().removesuffix(b', "crc32": ""}')
    forged = b'%b, "crc32": "%08x"}\n' % (text, crc32(text, checksum))
    Path("journal").write_bytes(head + lines[0] + forged)
    with pytest.raises(StateError, match=naming("'journal'", "Line 3", name, "first 2 lines")):
        ShardWriter("a-%d.tar", maxcount=1, resume="journal")


@pytest.mark.parametrize(
    "text", [NESTED, b'{"stage": 1, "error": "", "url": "", "key": "", "field": "", "reason": ""}']
)
def test_a_quarantine_list_contains_texts(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "passed-over.jsonl"
    path.write_bytes(text)
    with pytest.raises(CorruptSidecarError, match="line 1"):
        read_quarantine(path)


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        b'{"format": "wds-datapipes copy", "version": 1, "url": "a", "bytes": 1e999, "sha256": "", "mtime_ns": 1}',
    ],
)
def test_the_facts_of_a_copy_may_be_damaged(tmp_path: Path, text: bytes) -> None:
    entry = Entry.of(tmp_path, "a.tar")
    entry.facts_path.write_bytes(text)
    assert entry.facts() is None


def test_a_file_of_samples_without_stages_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(MAGIC + FRAME.pack(0, crc32(MAGIC)) + FRAME.pack(END, crc32(MAGIC)))
    with pytest.raises(CacheError, match=f"is damaged: at byte {len(MAGIC)}"):
        open_samples(str(path), [])


@pytest.mark.parametrize("word", ["auth", "secret", "token", "://a:", "a-", "?auth", "x"])
def test_credentials_are_hidden_in_a_time_in_proportion_to_the_text(word: str) -> None:
    """Quadratic time takes hours, which the time limit of this test detects."""
    redact(f"?{word * (60_000 // len(word))}")


@pytest.mark.parametrize("text", ["nan", "1e999", "-inf", "Mon, 99 Foo", "Fri, 31 Dec 9999 23:59:59 -2359"])
def test_no_server_can_request_an_endless_wait(text: str) -> None:
    class Busy(Exception):
        headers = {"Retry-After": text}  # noqa: RUF012  as a library has it

    waits = retry_after(Busy())
    assert waits is None or 0 <= waits < 1e12


@pytest.mark.parametrize(("key", "field"), [("__a__", "b__"), ("__x", "y.z__")])
def test_a_sample_is_not_written_under_a_name_that_describes_the_shard(key: str, field: str) -> None:
    with TarWriter(io.BytesIO()) as writer:
        with pytest.raises(EncodeError, match="two underscores"):
            writer.write({"__key__": key, field: b"x"})
        writer.write({"__key__": key, "txt": b"x"})


def gone_on(state: Any) -> list[Any]:
    own = loader()
    own.load_state_dict(state)
    return list(own)


def test_an_unchanged_state_resumes() -> None:
    assert len(gone_on(json.loads(states()[1]))) == 26


def head(*numbers: int, more: bytes = bytes(500)) -> str:
    """Return packed positions whose header contains these numbers."""
    return packed(struct.pack("<3q", *numbers) + more)


#: Texts that are not packed positions.
PACKED: tuple[str, ...]
PACKED = ("", "%", "AAAA", head(0, 3, 1), head(-1, 3, 1), head(1 << 62, 3, 1), head(20, 2, 1), head(20, 1 << 40, 1))
PACKED += (head(20, 3, 512), head(20, 4, 1, more=b"\xff" * 2000), packed(b"\x01"), "gzip"[:3])


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": Epoch(number="1")},  # type: ignore[arg-type]
        {"epoch": Epoch(first=1 << 70)},
        {"instance": Instance(ranks=10**12, workers=0)},
        {"stages": [1]},
        {"parts": []},
        {"parts": ["{"]},
        {"parts": ["5"]},
        {"parts": ['[{"next": 7}, {}]']},
        {"parts": ['[{"next": [0, 0, ""]}, {"draws": {}}]']},
        {"parts": [json.dumps([{"next": [0, 0, ""]}, {"waiting": [[0, 0, 1024]] * 2}])]},
        {"parts": ['[{"next": [0, 512, ""]}, {"waiting": [[0, 1024, 512]]}]']},
        *({"parts": [f'[{{"next": [0, 0, ""]}}, {{"waiting": "{text}"}}]']} for text in PACKED),
        {"instance": Instance(workers=2), "parts": ['[{"next": 7}, {}]']},
        {"parts": ['[{"next": [0, 8, ""], "share": {"pieces": [], "instances": 0, "instance": 0, "since": 0}}, {}]']},
    ],
)
def test_a_state_with_a_value_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    (saved,) = checkpoints_in(json.loads(states()[1]))
    parts = [*map(WorkerState, change.get("parts", [part.text for part in saved.parts]))]
    with pytest.raises(StateError):
        gone_on(state_of([replace(saved, **{**change, "parts": parts})]))


@pytest.mark.parametrize(
    "state",
    [
        NESTED,
        {STATE: with_checksum('{"parts":3}')},
        {STATE: with_checksum("[]")},
        {STATE: "[" * 100_000},
        {STATE: {"version": VERSION}},
        {"dataset_state": json.loads(states()[1])},
        {"_snapshot": {"_worker_snapshots": {}, "_last_yielded_worker_id": 0}, "_steps_since_snapshot": 0},
    ],
)
def test_an_incomplete_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        loader().load_state_dict(state)
