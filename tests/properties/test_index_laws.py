"""An index of any archive agrees with the archive, and a written index is read back unchanged."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_archives import recipes, written
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes import TarWriter, WriteOptions, first_dot, last_dot
from wds_datapipes.errors import CorruptSidecarError, DuplicateKeyError
from wds_datapipes.index import IndexOptions, ShardIndex, build_index, check_index
from wds_datapipes.index.format.index_columns import COLUMNS
from wds_datapipes.index.format.index_file import index_bytes, index_url, parse_index, read_index, write_index
from wds_datapipes.samples.grouping import OnDuplicate, group_samples
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.shards.loading import TarOptions, read_shards
from wds_datapipes.tar.headers import EndMarker

KEYS = st.sampled_from(
    ["a", "b", "dir/a", "dir.v2/a", "é漢", "k" * 98, "k" * 160, "d" * 90 + "/" + "k" * 40, "", "x/", "__m__"]
)
FIELDS = st.sampled_from(["txt", "TXT", "seg.png", "cls", "", "__url__", "__key__", "f" * 60])
NAMES = st.one_of(
    st.builds("{}.{}".format, KEYS, FIELDS),
    st.sampled_from(["README", "__meta__/classes.json", "__index__.json", "dir/.hidden.png", "..", "a..b"]),
)
RECIPES = recipes(NAMES, 16)
RULES = st.sampled_from([first_dot, last_dot])


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all examples of a property."""
    return tmp_path_factory.mktemp("shards") / "x.tar"


Fields = dict[str, bytes]


def by_reading(shard: Path, end_marker: EndMarker = "required", **rules: Any) -> Iterator[tuple[str, Fields]]:
    for sample in group_samples(
        read_shards([shard], TarOptions(end_marker=end_marker)), on_repeated_key="ignore", **rules
    ):
        meta = ("__key__", "__url__", "__local_path__")
        yield sample["__key__"], {field: data for field, data in sample.items() if field not in meta}


def by_index(index: ShardIndex, archive: bytes) -> Iterator[tuple[str, Fields]]:
    for sample in index:
        yield (sample.key, {entry.field: archive[entry.offset : entry.offset + entry.size] for entry in sample.entries})


@given(
    recipe=RECIPES,
    key_rule=RULES,
    lowercase=st.booleans(),
    on_duplicate=st.sampled_from(["raise", "first", "last"]),
    digest=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_an_index_agrees_with_reading(
    shard: Path, recipe: Any, key_rule: KeyRule, lowercase: bool, on_duplicate: OnDuplicate, digest: bool
) -> None:
    archive = written(recipe)
    shard.write_bytes(archive)
    rules: dict[str, Any] = {"key_rule": key_rule, "lowercase": lowercase, "on_duplicate": on_duplicate}
    try:
        expected = list(by_reading(shard, **rules))
    except DuplicateKeyError:
        with pytest.raises(DuplicateKeyError, match=r"x\.tar holds the field .* twice"):
            build_index(shard, IndexOptions(digest=digest, **rules), on_repeated_key="ignore")
        return
    index = build_index(shard, IndexOptions(digest=digest, **rules), on_repeated_key="ignore")
    assert list(by_index(index, archive)) == expected
    assert [list(fields) for _, fields in by_index(index, archive)] == [list(fields) for _, fields in expected]
    assert index.keys == [key for key, _ in expected]
    for sample in index:
        # The bytes between a sample's start and its end are an archive that contains it.
        part = archive[sample.offset : sample.end] + bytes(1024)
        with tarfile.open(fileobj=io.BytesIO(part), encoding="utf-8") as tar:
            inside = {member.offset_data + sample.offset: (member.name, member.size) for member in tar}
        for entry in sample.entries:
            name, size = inside[entry.offset]
            assert (name.lower(), size) == (f"{sample.key}.{entry.field}".lower(), entry.size)
    assert archive[index.end :].strip(b"\0") == b""
    check_index(index, shard, depth="bytes")
    assert parse_index(index_bytes(index), name="x") == index
    assert index_bytes(parse_index(index_bytes(index), name="x")) == index_bytes(index)
    assert pickle.loads(pickle.dumps(index)) == index


@given(
    samples=st.lists(
        st.tuples(
            st.sampled_from(["a", "dir/b", "é漢", "k" * 98, "k" * 160, "d" * 90 + "/" + "k" * 40]),
            st.dictionaries(st.sampled_from(["txt", "tif", "seg.png", "f" * 60]), st.binary(max_size=1100), min_size=1),
        ),
        max_size=6,
        unique_by=lambda sample: sample[0],
    ),
    suffix=st.sampled_from(["", ".gz"]),
)
@settings(deadline=None, max_examples=40)
def test_a_writer_knows_the_index_of_its_shard(shard: Path, samples: list[tuple[str, Fields]], suffix: str) -> None:
    place = f"{shard}{suffix}"
    with TarWriter(place, options=WriteOptions(encoder=False, digest=True, index=True)) as writer:
        for key, fields in samples:
            writer.write({"__key__": key, **fields})
    found = build_index(place, options=IndexOptions(digest=True))
    index = read_index(index_url(place))
    assert index.has_same_layout(found)
    assert vars(index.facts) == {**vars(found.facts), "mtime_ns": None, "origin": None}
    check_index(index, place, depth="bytes")


# The contents of an index file


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ShardIndex:
    shard = tmp_path_factory.mktemp("index") / "x.tar"
    members = [(f"{key}.{field}", tarfile.REGTYPE, 5) for key in "abc" for field in ("txt", "cls")]
    shard.write_bytes(written(("ustar", members)))
    return build_index(shard, options=IndexOptions(digest=True))


def test_damage_of_any_byte_truncation_and_extra_bytes_are_noticed(index: ShardIndex) -> None:
    content = index_bytes(index)
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(len(content))]
    cut = [content[:size] for size in [*range(40), *range(40, len(content), 7), len(content) - 1]]
    for damaged in (*flipped, *cut, content + b"\0"):
        with pytest.raises(CorruptSidecarError, match=r"x\.wdsidx is (damaged|not a shard index): .*"):
            parse_index(damaged, name="x.wdsidx")


NUMBERS = st.one_of(
    st.integers(-3, 12), st.sampled_from([512, 1024, 4096, 6144, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)])
)


@given(
    name=st.sampled_from([name for name in COLUMNS if name not in ("key_text", "field_text")]),
    at=st.integers(0, 10),
    number=NUMBERS,
    length=st.one_of(st.none(), st.integers(0, 8)),
)
@settings(deadline=None, max_examples=60)
def test_inconsistent_numbers_are_refused(
    index: ShardIndex, name: str, at: int, number: int, length: int | None
) -> None:
    """Whatever its columns contain, an index never points outside its sample."""
    columns = {each: np.array(column) for each, column in index.columns.items()}
    columns[name][at % len(columns[name])] = number if name != "member_fields" else number % 2**32
    columns[name] = columns[name][:length]
    try:
        made = ShardIndex(index.facts, columns)
    except CorruptSidecarError:
        return
    assert len(made.keys) == len(made) == len(list(made))
    for sample in made:
        assert sample.entries
        assert 0 <= sample.offset < sample.end
        for entry in sample.entries:
            assert sample.offset + 512 <= entry.offset <= entry.offset + entry.size <= sample.end


def test_a_header_that_claims_much_takes_no_memory(index: ShardIndex, tracing: Any) -> None:
    content = bytearray(index_bytes(index))
    tracing.start()
    for size in (2**31, 2**32 - 1, len(content)):
        content[8:12] = size.to_bytes(4, "little")
        with pytest.raises(
            CorruptSidecarError, match=rf"its header has {size} bytes, but the file only {len(content)}"
        ):
            parse_index(bytes(content), name="x")
    assert tracing.get_traced_memory()[1] < 1 << 20


def test_a_written_index_is_read_back(index: ShardIndex, tmp_path: Path) -> None:
    place = str(tmp_path / "x.tar.wdsidx")
    write_index(index, place)
    write_index(index, place)  # over the existing one
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar.wdsidx"]
    found = read_index(place)
    assert found == index
    assert all(not column.flags.writeable for column in found.columns.values())
    assert all(column.base is not None for column in found.columns.values()), "columns are not copied"
    assert all(column.flags.aligned for column in found.columns.values())
    del found
