"""Reading record shards as samples: formats, keys, faults, limits and policies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard
from error_facts import naming
from faults import Fault, fault_proxy
from nginx_server import Nginx
from record_files import ENCODERS, write_records

from wds_datapipes import ErrorBudget, ReadLimits, ShardList
from wds_datapipes.errors import (
    ChangedShardError,
    CorruptShardError,
    DecodeError,
    ErrorBudgetError,
    MissingFieldError,
    ReadLimitError,
    ShardError,
    ShardReadError,
    SpecError,
    TruncatedShardError,
)
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.shards import records

pytestmark = pytest.mark.usefixtures("nothing_left", "folder")

FORMATS = pytest.mark.parametrize("ending", ENCODERS)
SAMPLES = [
    {"__key__": f"{number:03d}", "n": number, "text": "é" * number, "tokens": [1] * number} for number in range(9)
]


def read(*urls: str, **options: Any) -> list[dict[str, Any]]:
    """Return the samples without their source."""
    samples = ShardList(list(urls)).load_wds_records(**options)
    return [{name: sample[name] for name in sample if name not in ("__url__", "__local_path__")} for sample in samples]


def offsets(ending: str, records: list[Any]) -> list[int]:
    """Return the offsets of the records and of the end."""
    sizes = [len(ENCODERS[ending](record)) for record in records]
    return [sum(sizes[:count]) for count in range(len(sizes) + 1)]


# What is read -------------------------------------------------------------------------------------------------------


@FORMATS
def test_samples_have_the_metadata_of_tar_samples_and_their_fields_in_order(ending: str) -> None:
    write_records(f"a.{ending}", SAMPLES)
    (first, *_) = ShardList(f"a.{ending}").load_wds_records()
    assert list(first) == ["__key__", "__url__", "__local_path__", "n", "text", "tokens"]
    assert (first["__url__"], first["__local_path__"]) == (f"a.{ending}", f"a.{ending}")
    assert read(f"a.{ending}") == SAMPLES


@FORMATS
def test_compressed_shards_are_read_and_an_empty_one_is_an_error(ending: str) -> None:
    Path(f"a.{ending}.zst").write_bytes(zstandard.compress(Path(write_records(f"b.{ending}", SAMPLES)).read_bytes()))
    assert read(f"a.{ending}.zst") == SAMPLES
    assert read(f"pipe:cat a.{ending}.zst", format=ending.removesuffix("s")) == SAMPLES
    Path(f"a.{ending}").write_bytes(b"")
    with pytest.raises(TruncatedShardError, match=f"a.{ending} is empty"):
        read(f"a.{ending}")


@FORMATS
def test_records_larger_than_the_buffer_and_at_its_edges_are_whole(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write_records(f"a.{ending}", SAMPLES))
    for size in (1, 2, 7, 31, 64, path.stat().st_size):
        monkeypatch.setattr(records, "FILL_BYTES", size)
        assert read(f"a.{ending}") == SAMPLES


def test_the_format_can_be_named_and_must_be_known() -> None:
    write_records("a.data", SAMPLES, "cbors")
    with pytest.raises(SpecError, match=r'a.data does not indicate its record format.*Pass format="jsonl"'):
        read("a.data", on_error="skip")
    assert read("a.data", format="cbor") == SAMPLES
    with pytest.raises(ValueError, match=naming("format", "'jsonl', 'msgpack', 'cbor'", "'json'")):
        read("a.data", format="json")


def test_the_key_is_a_field_or_the_offset() -> None:
    records = [{"id": 7, "url": "x"}, {"id": -8, "url": "y"}]
    write_records("a.jsonl", records)
    assert [sample["__key__"] for sample in read("a.jsonl", key="id")] == ["7", "-8"]
    assert [sample["__key__"] for sample in read("a.jsonl", key="url")] == ["x", "y"]
    assert [sample["__key__"] for sample in read("a.jsonl")] == ["000000000000", "000000000022"]
    with pytest.raises(MissingFieldError, match=r"a.jsonl: record 0 \(byte 0\) has no field 'name' .* 'id', 'url'"):
        read("a.jsonl", key="name")
    with pytest.raises(DecodeError, match=r"has the key 1.5 in the field 'id'"):
        read(write_records("b.jsonl", [{"id": 1.5}]), key="id")


@FORMATS
def test_records_that_are_lists_get_names(ending: str) -> None:
    """As the CBOR files of webdataset's manual."""
    write_records(f"a.{ending}", [(number / 2, str(number)) for number in range(3)])
    found = read(f"a.{ending}", fields=["x", "label"])
    assert [(sample["x"], sample["label"]) for sample in found] == [(0.0, "0"), (0.5, "1"), (1.0, "2")]
    with pytest.raises(DecodeError, match=r"record 0 \(byte 0\) is a list of 2 values.*Pass fields="):
        read(f"a.{ending}")
    with pytest.raises(DecodeError, match=naming("2 values", "fields=", "1 name")):
        read(f"a.{ending}", fields=["x"])


# Faults -------------------------------------------------------------------------------------------------------------


@FORMATS
def test_a_shard_cut_anywhere_inside_a_record_is_an_error(ending: str) -> None:
    samples = SAMPLES[:4]
    data = Path(write_records("whole", samples, ending)).read_bytes()
    starts = offsets(ending, samples)
    for cut in range(1, len(data)):
        Path(f"a.{ending}").write_bytes(data[:cut])
        whole = sum(end <= cut for end in starts[1:])
        is_between = cut in starts or (ending == "jsonl" and cut + 1 in starts)  # the last line break may be missing
        if is_between:
            assert read(f"a.{ending}") == samples[: max(whole, starts.index(cut if cut in starts else cut + 1))]
            continue
        with pytest.raises(TruncatedShardError, match=rf"record {whole} \(byte {starts[whole]}\) is incomplete"):
            read(f"a.{ending}")
        assert read(f"a.{ending}", on_error="skip") == samples[:whole]


@FORMATS
def test_a_truncated_compressed_shard_is_an_error_even_between_records(ending: str) -> None:
    data = gzip.compress(Path(write_records(f"a.{ending}", SAMPLES)).read_bytes())
    Path(f"a.{ending}").write_bytes(data[:-4])
    with pytest.raises(TruncatedShardError, match=r"gzip data .* end too early"):
        read(f"a.{ending}")
    assert read(f"a.{ending}", on_error="skip") == SAMPLES


@pytest.mark.parametrize("ending", ["msgpack", "cbors"])
def test_bytes_of_another_format_end_the_shard(ending: str) -> None:
    data = Path(write_records(f"a.{ending}", SAMPLES[:3])).read_bytes()
    for garbage in (bytes(1000), b"<html>", b"\xff\xc1\xff"):
        Path(f"a.{ending}").write_bytes(data + garbage)
        # The first byte may be a length larger than the rest.
        message = rf"record 3 \(byte {len(data)}\).* (not hold|incomplete)"
        with pytest.raises((CorruptShardError, TruncatedShardError), match=message):
            read(f"a.{ending}")
        assert read(f"a.{ending}", on_error="skip") == SAMPLES[:3]


def test_a_bad_value_is_skipped_alone_if_its_end_is_known() -> None:
    bad = msgpack.packb({"text": "x"})[:-1] + b"\xff"
    Path("a.msgpack").write_bytes(msgpack.packb(SAMPLES[0]) + bad + msgpack.packb({3: 4}) + msgpack.packb(SAMPLES[1]))
    assert read("a.msgpack", on_error="skip") == SAMPLES[:2]
    with pytest.raises(DecodeError, match=r"record 1 \(byte \d+\) cannot be decoded: .*utf-8"):
        read("a.msgpack")


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_byte_order_mark_is_no_part_of_a_line(end: bytes) -> None:
    lines = [MARK + b'{"n": 1}', b'{"n": 2}', MARK + b'{"n": 3}', MARK, MARK + b'{"n": ', MARK + b'{"n": 4}' + end]
    Path("a.jsonl").write_bytes(b"\n".join(lines))
    assert [(sample["__key__"], sample["n"]) for sample in read("a.jsonl", on_error="skip")] == [
        (f"{len(b''.join(lines[:number])) + number:012d}", n) for number, n in ((0, 1), (1, 2), (2, 3), (5, 4))
    ]
    Path("a.jsonl").write_bytes(MARK + b'{"n": 1}\n' + MARK + b'{"n": ')
    with pytest.raises(TruncatedShardError):
        read("a.jsonl")


def test_a_bad_line_is_skipped_alone_and_empty_ones_do_not_matter() -> None:
    bad = [b"[1]\r\n \n", b"7\n", b"null\n", b"{]\n", b'{"a": "\xff"}\n', b'{"__key__": []}']
    good = [json.dumps(sample).encode() + b"\n" for sample in SAMPLES[:6]]
    Path("a.jsonl").write_bytes(b"".join(map(b"".join, zip(good, bad, strict=True))))
    assert read("a.jsonl", on_error="skip") == SAMPLES[:6]
    with pytest.raises(DecodeError, match=r"a.jsonl: record 1 \(byte \d+\) is a list of 1 value,"):
        read("a.jsonl")
    budget = ErrorBudget(max_errors=5, warn=False)
    with pytest.raises(ErrorBudgetError, match=r"skipped 6 of 12 items \(6 x DecodeError"):
        read("a.jsonl", on_error=budget)
    with pytest.warns(UserWarning, match="load_wds_records skipped") as caught:
        read("a.jsonl", on_error="warn")
    assert len(caught) == 2  # the first error, and the count
    assert read("a.jsonl", on_error=lambda error: False) == SAMPLES[:1]


@pytest.mark.parametrize(
    ("ending", "header"),
    [
        *[("msgpack", bytes.fromhex(header)) for header in ("c6fffffff0", "dbfffffff0", "ddfffffff0", "dffffffff0")],
        *[("cbors", bytes.fromhex(kind + "00000fffffffffff")) for kind in ("5b", "7b", "9b", "bb")],
    ],
)
def test_a_length_that_lies_allocates_nothing(ending: str, header: bytes, tracing: Any) -> None:
    map_of_one = {"msgpack": b"\x81\xa1a", "cbors": b"\xa1\x61a"}[ending]
    Path(f"a.{ending}").write_bytes(ENCODERS[ending](SAMPLES[0]) + map_of_one + header + bytes(100))
    read(write_records(f"b.{ending}", SAMPLES))  # imports the package
    tracing.start()
    with pytest.raises(ShardError, match=r"record 1 \(byte"):
        read(f"a.{ending}")
    assert tracing.get_traced_memory()[1] < 8 << 20
    assert read(f"a.{ending}", on_error="skip") == SAMPLES[:1]


@FORMATS
def test_records_that_are_too_large_are_an_error(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FILL_BYTES", 64)
    write_records(f"a.{ending}", [SAMPLES[0], {"__key__": "b", "text": "x" * 1000}, SAMPLES[1]])
    for most in (100, 900):
        with pytest.raises(ReadLimitError, match=rf"record 1 \(byte \d+\) has \d+ bytes.*limit is member_bytes={most}"):
            read(f"a.{ending}", limits=ReadLimits(member_bytes=most))
    assert len(read(f"a.{ending}", limits=ReadLimits(member_bytes=2000))) == 3


@pytest.mark.parametrize(("ending", "list_of_one"), [("jsonl", b"["), ("msgpack", b"\x91"), ("cbors", b"\x81")])
def test_deep_nesting_is_an_error(ending: str, list_of_one: bytes) -> None:
    Path(f"a.{ending}").write_bytes(list_of_one * 200_000 + b"\n")
    with pytest.raises(ReadLimitError, match=r"record 0 \(byte 0\) nests its values too deeply"):
        read(f"a.{ending}")


@FORMATS
def test_a_failed_command_is_an_error_after_all_records(ending: str) -> None:
    write_records(f"a.{ending}", SAMPLES)
    name = ending.removesuffix("s")
    with pytest.raises(ShardReadError, match="exit"):
        read(f"pipe:cat a.{ending}; exit 3", format=name)
    assert read(f"pipe:cat a.{ending}; exit 3", f"a.{ending}", format=name, on_error="skip") == 2 * SAMPLES


# States -------------------------------------------------------------------------------------------------------------


def resumed(make: Callable[[], Any], count: int) -> list[Any]:
    """Read some samples, save the state, and read the rest in another pipeline."""
    pipe, again = make(), make()
    items = iter(pipe)
    for _ in range(count):
        next(items)
    load_state(again, json.loads(json.dumps(save_state(pipe))))
    items.close()
    return [sample["__key__"] for sample in again]


@FORMATS
def test_a_shard_with_bad_records_resumes_after_them(ending: str) -> None:
    records = [record for sample in SAMPLES[:4] for record in (sample, [1])]
    write_records(f"a.{ending}", records)

    def make() -> Any:
        return ShardList(f"a.{ending}").load_wds_records(on_error="skip").shuffle_samples(1)

    assert [resumed(make, count) for count in (1, 2, 3)] == [["001", "002", "003"], ["002", "003"], ["003"]]


@FORMATS
def test_a_state_does_not_fit_a_shard_that_has_changed(ending: str) -> None:
    write_records(f"a.{ending}", SAMPLES)
    pipe = ShardList(f"a.{ending}").load_wds_records()
    items = iter(pipe)
    next(items)
    state = save_state(pipe)
    items.close()
    others = [{**sample, "__key__": f"x{number:02d}"} for number, sample in enumerate(SAMPLES)]
    for changed in (others, SAMPLES[:1], [SAMPLES[0], [1]]):
        write_records(f"a.{ending}", changed)
        load_state(pipe, state)
        with pytest.raises(ChangedShardError, match="has changed since the state was saved"):
            list(pipe)


# Remote shards ------------------------------------------------------------------------------------------------------


@FORMATS
def test_remote_shards_survive_broken_connections_and_resume_by_range(ending: str, nginx: Nginx) -> None:
    samples = [{**sample, "text": "x" * 5000} for sample in SAMPLES]
    name = f"records-{ending}.{ending}"
    (nginx.files / name).write_bytes(b"".join(map(ENCODERS[ending], samples)))
    with fault_proxy(("127.0.0.1", nginx.http)) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/{name}"

        def make() -> Any:
            return ShardList(url).load_wds_records(read_ahead=0)

        proxy.faults[:] = [Fault(at=12_345, how="reset")]
        assert read(url) == samples
        proxy.asked.clear()
        assert resumed(make, 6) == [sample["__key__"] for sample in samples[6:]]
        starts = offsets(ending, samples)
        assert any(f"bytes={starts[6]}-" in str(asked) for asked in proxy.asked)
