"""Record shards are read back as they were written, and what cannot be is refused."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ShardList, ShardWriter
from wds_datapipes.errors import EncodeError, SpecError
from wds_datapipes.writing import RecordWriter, ShardInfo

pytestmark = pytest.mark.usefixtures("nothing_left", "folder")

ENDINGS = pytest.mark.parametrize("ending", ["jsonl", "msgpack.zst", "cbors.xz"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), TEXT
)


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        values, lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXT, each, max_size=3), max_leaves=6
    )


def samples_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    fields = st.dictionaries(TEXT.filter(lambda name: not name.startswith("__")), nested(values), max_size=4)
    keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    pairs = st.lists(st.tuples(keys, fields), min_size=1, max_size=6, unique_by=lambda pair: pair[0])
    return pairs.map(lambda found: [{"__key__": key, **fields} for key, fields in found])


def read(*urls: str) -> list[dict[str, Any]]:
    samples = ShardList(list(urls)).load_wds_records()
    return [{name: sample[name] for name in sample if name not in ("__url__", "__local_path__")} for sample in samples]


def some(count: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{number:03d}", "number": number, "text": "x" * number} for number in range(count)]


@ENDINGS
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reading_is_the_reverse_of_writing(ending: str, data: st.DataObject) -> None:
    samples = data.draw(samples_of(PLAIN if ending.startswith("jsonl") else PLAIN | st.binary(max_size=8)))
    with RecordWriter(f"a.{ending}", digest=True) as shard:
        for sample in samples:
            shard.write({**sample, "__url__": "elsewhere"})
    found = read(f"a.{ending}")
    assert found == samples
    assert [list(sample) for sample in found] == [list(sample) for sample in samples]
    written = Path(f"a.{ending}").read_bytes()
    assert shard.info == ShardInfo(f"a.{ending}", len(samples), len(written), hashlib.sha256(written).hexdigest())


@ENDINGS
def test_the_pattern_tells_the_format_of_numbered_shards(ending: str) -> None:
    with ShardWriter(f"a-%03d.{ending}", maxcount=4) as writer:
        for sample in some(10):
            writer.write(sample)
    assert [(shard.url, shard.samples) for shard in writer.shards] == [
        (f"a-00{number}.{ending}", count) for number, count in enumerate((4, 4, 2))
    ]
    assert read(f"a-{{000..002}}.{ending}") == some(10)


def test_shards_have_at_most_the_requested_size() -> None:
    with ShardWriter("a-%03d.jsonl", maxsize=100) as writer:
        for sample in some(10):
            writer.write(sample)
    assert all(shard.bytes <= 100 for shard in writer.shards)
    assert len(writer.shards) > 3
    assert read("a-*.jsonl") == some(10)


def test_the_stage_writes_records_too() -> None:
    shards = list(IterableWrapper(some(5)).write_wds_shards("a-%d.cbors.gz", maxcount=3))
    assert [shard.samples for shard in shards] == [3, 2]
    shards = list(IterableWrapper(some(5)).write_wds_shards("b-%d.data", format="msgpack"))
    assert [sample["number"] for sample in ShardList("b-0.data").load_wds_records(format="msgpack")] == [*range(5)]


def test_the_format_can_be_tar_whatever_the_name() -> None:
    with ShardWriter("a-%d.mp", format="tar") as writer:
        writer.write({"__key__": "a", "txt": "text"})
    (sample,) = ShardList("a-0.mp").load_wds_shards().group_samples()
    assert sample["txt"] == b"text"


@pytest.mark.parametrize(
    ("ending", "value", "text"),
    [
        ("jsonl", b"1", "Field 'x' of sample 'a' is a bytes, which JSON lines cannot hold.*write msgpack or CBOR"),
        ("jsonl", float("nan"), "Field 'x' .* the float nan, which JSON lines cannot hold"),
        ("jsonl", np.zeros(2), "Field 'x' .* float64 and shape .2,., which JSON lines cannot hold.*Convert it first"),
        ("msgpack", np.zeros(2), "msgpack records cannot hold.*Convert it first"),
        ("msgpack", 2**64, "the int 18446744073709551616, which msgpack records cannot hold"),
        ("cbors", object(), "a object, which CBOR records cannot hold"),
    ],
)
def test_a_value_that_a_format_does_not_support_is_refused(ending: str, value: Any, text: str) -> None:
    with RecordWriter(f"a.{ending}") as shard:
        shard.write({"__key__": "b", "x": 1})
        with pytest.raises(EncodeError, match=text):
            shard.write({"__key__": "a", "y": 1, "x": value})
    assert read(f"a.{ending}") == [{"__key__": "b", "x": 1}]


def test_samples_that_would_be_read_back_differently_are_refused() -> None:
    with RecordWriter("a.jsonl") as shard:
        shard.write({"__key__": "a", "x": 1})
        refused: list[tuple[Any, str]] = [
            ({"__key__": "a", "x": 2}, "The key 'a' was already written"),
            ({"__key__": "", "x": 2}, "__key__ must be a str that is not empty"),
            ({"__key__": 7, "x": 2}, "__key__ must be a str"),
            ({"x": 2}, "A sample must be a dict with __key__"),
            ({"__key__": "b", 3: 2}, "Field names must be str, but 3 is the int 3"),
        ]
        for sample, text in refused:
            with pytest.raises(EncodeError, match=text):
                shard.write(sample)
    assert read("a.jsonl") == [{"__key__": "a", "x": 1}]


def test_a_function_encodes_values_and_metadata_is_written_on_request() -> None:
    def encode(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "day": sample["day"].isoformat()}

    with RecordWriter("a.jsonl", encoder=encode, keep_meta=True) as shard:
        shard.write({"__key__": "a", "__origin__": "here", "day": datetime.date(2024, 2, 29)})
    assert json.loads(Path("a.jsonl").read_text()) == {"__key__": "a", "__origin__": "here", "day": "2024-02-29"}


def test_options_of_tar_shards_are_refused_for_records() -> None:
    tar_options: tuple[dict[str, Any], ...] = ({"index": True}, {"mtime": 7}, {"user": "me"})
    for options in tar_options:
        with pytest.raises(ValueError, match=r'belong to tar shards.*format="tar"'):
            ShardWriter("a-%d.jsonl", **options)
    with pytest.raises(ValueError, match="encoder must be a function of a sample for JSON lines"):
        ShardWriter("a-%d.jsonl", encoder={"jpg": {"quality": 90}})
    with pytest.raises(ValueError, match="format must be None, 'tar' or one of 'jsonl'"):
        ShardWriter("a-%d.jsonl", format="json")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="does not tell its record format"):
        RecordWriter(io.BytesIO())
