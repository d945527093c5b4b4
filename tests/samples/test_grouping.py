"""Grouping members into samples: the rules, compared with a simple implementation, and broken shards."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import re
import tarfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wds_datapipes import ShardList
from wds_datapipes.errors import DuplicateKeyError, TruncatedShardError
from wds_datapipes.samples.grouping import SampleGrouping, group_samples, split_by_shard
from wds_datapipes.samples.keys import last_dot
from wds_datapipes.shards.loading import TarOptions, load_wds_shards, read_shards
from wds_datapipes.testing import build_shard, check_resume
from wds_datapipes.types import Member, Sample, Shard

#: The URL of a shard, its names, and whether it can be read to the end.
ShardSpec = tuple[str, list[str], bool]


def members(shards: Iterable[ShardSpec]) -> Iterator[Member]:
    """Yield the members of the shards; the content of each file is its name and number."""
    for url, names, whole in shards:
        read = Shard(url)
        for number, name in enumerate(names):
            yield Member(read, name, f"{name}@{number}".encode(), 1024 * number)
        read.is_complete = whole


def group(*names: str, **options: Any) -> list[Sample]:
    return list(group_samples(split_by_shard(members([("s.tar", list(names), True)])), **options))


def fields(sample: Sample) -> list[str]:
    return [field for field in sample if field not in ("__key__", "__url__")]


# Fields


def test_a_pass_without_any_wanted_field_warns_with_the_names_there_are() -> None:
    with pytest.warns(
        UserWarning, match=r"yielded none of 2 samples, because none has a field 'clss'\. .* 'cls', 'jpg'$"
    ):
        assert group("a.jpg", "a.cls", "b.cls", fields=["clss"]) == []
    assert len(group("a.jpg", "b.cls", fields=["cls", "txt"])) == 1  # a field may be optional
    assert group(fields=["clss"]) == []  # as in a worker without a shard
    assert group("a.jpg", fields=[]) == []  # as asked


def test_other_key_rules() -> None:
    assert [sample["__key__"] for sample in group("1.2mm.jpg", "1.2mm.txt", key_rule=last_dot)] == ["1.2mm"]
    assert group("a.jpg", key_rule=lambda name: None) == []


# Duplicates, and repeated keys


def test_the_error_of_a_duplicate_names_its_position() -> None:
    message = r"s\.tar holds the field 'jpg' of the sample 'a' twice, at bytes 1024 and 3072 \(member 'a\.JPG'\)"
    with pytest.raises(DuplicateKeyError, match=message):
        group("a.cls", "a.jpg", "a.txt", "a.JPG")


def test_a_duplicate_drops_only_its_sample() -> None:
    names = ["a.jpg", "b.jpg", "b.cls", "b.jpg", "b.txt", "c.jpg"]
    assert [sample["__key__"] for sample in group(*names, on_error="skip")] == ["a", "c"]
    with pytest.warns(UserWarning, match=r"group_samples skipped an item: DuplicateKeyError: s\.tar holds"):
        assert len(group(*names, on_error="warn")) == 2
    assert [sample["__key__"] for sample in group(*names, on_error=lambda error: False)] == ["a"]


def test_a_repeated_key_warns_once() -> None:
    names = ["a.jpg", "b.jpg", "a.cls", "b.cls", "a.txt"]
    with pytest.warns(UserWarning, match=naming("s.tar", "'a'", "byte 2048")) as caught:
        samples = group(*names)
    assert len(caught) == 1
    assert [sample["__key__"] for sample in samples] == ["a", "b", "a", "b", "a"]
    assert group(*names, on_repeated_key="ignore") == samples


def test_a_repeated_key_can_be_an_error() -> None:
    names = ["a.jpg", "b.jpg", "a.cls", "a.txt", "c.jpg"]
    with pytest.raises(DuplicateKeyError, match=naming("'a'", "byte 2048", "tar --sort")):
        group(*names, on_repeated_key="raise")
    kept = group(*names, on_repeated_key="raise", on_error="skip")
    assert [(sample["__key__"], fields(sample)) for sample in kept] == [("a", ["jpg"]), ("b", ["jpg"]), ("c", ["jpg"])]


def test_the_requested_number_of_keys_is_remembered() -> None:
    names = ["a.x", "b.x", "a.y", "b.y"]
    kept = group(*names, on_repeated_key="raise", on_error="skip", remembered_keys=1)
    assert [sample["__key__"] for sample in kept] == ["a", "b", "b"]


# Comparison with a simple implementation

NAMES = st.builds(
    lambda folder, key, field: f"{folder}{key}{field}",
    st.sampled_from(["", "", "", "d/", "a.x/", "__m__/", ".h/", "./", "./", "././", "./__m__/", "./d/__m__/"]),
    st.sampled_from(["a", "b", "A", "__a__", "._a", ""]),
    st.sampled_from([".x", ".y", ".X", ".x.y", ".x__", ".__key__", ".__URL__", ".", ""]),
)
SHARDS = st.lists(st.tuples(st.sampled_from("12"), st.lists(NAMES, max_size=8), st.booleans()), max_size=5)


def simply_grouped(
    shards: list[ShardSpec], on_duplicate: str, lowercase: bool, wanted: set[str] | None
) -> list[Sample]:
    found = []
    if wanted is not None and lowercase:
        wanted = {field.lower() for field in wanted}
    for url, names, whole in shards:
        parsed = []
        for number, name in enumerate(names):
            match = re.fullmatch(r"((?:.*/)?[^./][^./]*)\.([^/]*)", name)
            if match and not re.match(r"(\./)*__[^/]*__(\Z|/)", name):
                parsed.append((match[1], match[2].lower() if lowercase else match[2], f"{name}@{number}".encode()))
        groups = [(key, list(files)) for key, files in itertools.groupby(parsed, key=lambda file: file[0])]
        for key, files in groups if whole else groups[:-1]:
            sample: Sample = {"__key__": key, "__url__": url}
            for _, field, content in files:
                taken = field in ("__key__", "__url__") or (field in sample and on_duplicate == "first")
                if not taken and (wanted is None or field in wanted):
                    sample[field] = content
            if fields(sample):
                found.append(sample)
    return found


@given(
    shards=SHARDS,
    on_duplicate=st.sampled_from(["first", "last"]),
    lowercase=st.booleans(),
    wanted=st.none() | st.sets(st.sampled_from(["x", "y", "X"])),
)
@example(shards=[("1", ["__a__.x", "__a__.x__"], True)], on_duplicate="first", lowercase=True, wanted=None)
@example(shards=[("1", ["./__a__.x", "./__a__.x__"], True)], on_duplicate="first", lowercase=True, wanted=None)
@example(shards=[("1", ["a.x"], True)], on_duplicate="first", lowercase=True, wanted={"X"})
@settings(deadline=None, max_examples=100)
def test_grouping_agrees_with_a_simple_implementation(
    shards: list[ShardSpec], on_duplicate: Any, lowercase: bool, wanted: set[str] | None
) -> None:
    samples = group_samples(
        split_by_shard(members(shards)),
        on_duplicate=on_duplicate,
        lowercase=lowercase,
        fields=wanted,
        on_repeated_key="ignore",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"group_samples\(fields=...\) yielded none")
        assert list(samples) == simply_grouped(shards, on_duplicate, lowercase, wanted)


# Broken shards


def test_an_incomplete_sample_does_not_precede_the_error_of_another_process(tmp_path: Path) -> None:
    """Members sent by another process do not reveal whether their shard ended well."""
    shard = build_shard(tmp_path / "s.tar", [{"__key__": key, "jpg": "", "cls": ""} for key in "ab"], end_marker=False)
    sent = map(pickle.loads, map(pickle.dumps, load_wds_shards([shard])))
    samples = group_samples(split_by_shard(sent))
    assert next(samples)["__key__"] == "a"
    with pytest.raises(TruncatedShardError):
        next(samples)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Three shards with the same keys at their borders."""
    return [
        build_shard(tmp_path / f"{number}.tar", [{"__key__": key, "jpg": f"{number}", "cls": "1"} for key in "ab"])
        for number in range(3)
    ]


def known(samples: Iterable[Sample]) -> list[tuple[str, bytes]]:
    found = []
    for sample in samples:
        assert fields(sample) == ["__local_path__", "jpg", "cls"]
        found.append((sample["__key__"], sample["jpg"]))
    return found


GOOD = [("a", b"0"), ("b", b"0"), ("a", b"1"), ("a", b"2"), ("b", b"2")]


@pytest.mark.parametrize("size", range(0, 5120, 640))
def test_a_truncated_shard_never_merges_with_the_next(shards: list[str], size: int) -> None:
    with open(shards[1], "wb") as file, open(shards[0], "rb") as whole:
        file.write(whole.read(size))
    # The first sample is known to be complete once the header of the first file of the second sample has been read.
    before = GOOD[:2] + [("a", b"0")] * (size >= 2560)
    assert known(group_samples(read_shards(shards, TarOptions(on_error="skip")))) == before + GOOD[3:]
    samples = group_samples(read_shards(shards))
    before = before[: 2 + (size > 2560)]  # the error comes first
    assert known(itertools.islice(samples, len(before))) == before
    with pytest.raises(TruncatedShardError, match=r"1\.tar "):
        next(samples)


def broken_in_data(url: str, sizes: dict[str, int], name: str) -> str:
    """Write a shard that breaks off in the middle of the data of a member."""
    with tarfile.open(url, "w") as archive:
        for each, size in sizes.items():
            member = tarfile.TarInfo(each)
            member.size = size
            archive.addfile(member, io.BytesIO(bytes(size)))
    with tarfile.open(url) as archive:
        at = archive.getmember(name).offset_data
    os.truncate(url, at + sizes[name] // 2)
    return url


@pytest.mark.parametrize("size", [100, 100_000])
@pytest.mark.parametrize("open_shards", [1, 2])
@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        (["0.jpg", "0.cls", "1.jpg", "1.cls"], "1.jpg", ["0"]),
        (["0.jpg", "0.cls", "1.jpg", "1.cls"], "1.cls", ["0"]),
        (["0.jpg", "0.cls", "0.txt"], "0.txt", []),
        (["0.jpg", "1.jpg", "__meta__/x.json"], "__meta__/x.json", ["0"]),  # which belongs to no sample
        (["0.jpg", "a.seg", "0.cls"], "a.seg", []),  # nor does a file that is not selected
    ],
)
def test_a_sample_before_a_broken_file_of_another_one_is_complete(
    tmp_path: Path, size: int, open_shards: int, names: list[str], name: str, found: list[str]
) -> None:
    url = broken_in_data(str(tmp_path / "a.tar"), dict.fromkeys(names, size), name)
    whole = build_shard(tmp_path / "b.tar", [{"__key__": "b", "cls": "1"}])
    options: dict[str, Any] = {"on_error": "skip", "select_files": lambda each: not each.endswith(".seg")}
    loaded = ShardList([url, whole]).load_wds_shards(open_shards=open_shards, **options)
    assert sorted(sample["__key__"] for sample in loaded.group_samples()) == [*found, "b"]


def move(member: Member) -> Member:
    return member._replace(name=f"new/{member.name}")


def test_a_stage_that_renames_members_hides_what_follows(tmp_path: Path) -> None:
    url = broken_in_data(str(tmp_path / "a.tar"), {"0.jpg": 9, "0.cls": 9, "0.txt": 9}, "0.cls")
    loaded = ShardList(url).load_wds_shards(on_error="skip")
    assert list(loaded.map(move).group_samples()) == []


@pytest.mark.parametrize("open_shards", [1, 2])
def test_a_state_before_and_after_a_break_resumes_with_the_same_samples(tmp_path: Path, open_shards: int) -> None:
    names = [f"{number}.{field}" for number in range(5) for field in ("jpg", "cls")]
    broken = [broken_in_data(f"{tmp_path}/{shard}.tar", dict.fromkeys(names, 700), "4.jpg") for shard in "ab"]

    def pipeline() -> Any:
        shards = ShardList(broken).load_wds_shards(on_error="skip", open_shards=open_shards)
        return shards.group_samples().shuffle_samples(3)

    assert len(list(pipeline())) == 8
    check_resume(pipeline)


# Members in another order


@pytest.mark.parametrize("complete", [None, True], ids=["one by one", "after all are read"])
def test_shuffled_members(complete: bool | None) -> None:
    """They would become samples that lack fields."""
    url = Shard("s.tar", is_complete=complete)
    first, second, third = [Member(url, name, b"", 512 * at) for at, name in enumerate(["a.jpg", "a.cls", "b.jpg"])]
    with pytest.raises(ValueError, match=naming("s.tar", "byte 512", "byte 1024")):
        list(group_samples(split_by_shard([first, third, second]), on_error="skip"))


def test_mixed_members_of_shards(tmp_path: Path) -> None:
    """They would be lost."""
    shards = [build_shard(tmp_path / name, [{"__key__": "a", "jpg": "", "cls": ""}]) for name in ("s.tar", "t.tar")]
    mixed = itertools.chain.from_iterable(zip(*(load_wds_shards([shard]) for shard in shards), strict=True))
    with pytest.raises(ValueError, match=r"got the one at byte 0 of .*t\.tar after the one at byte 0 of .*s\.tar"):
        list(group_samples(split_by_shard(mixed), on_error="skip"))


def test_a_stage_may_make_more_members_of_one(tmp_path: Path) -> None:
    shard = build_shard(tmp_path / "s.tar", [{"__key__": key, "jpg": "x", "cls": "1"} for key in "ab"])
    doubled = (
        (url, name + end, data, offset) for url, name, data, offset in load_wds_shards([shard]) for end in ("", ".bak")
    )
    expected = ["__local_path__", "jpg", "jpg.bak", "cls", "cls.bak"]
    assert [fields(sample) for sample in group_samples(split_by_shard(doubled))] == [expected, expected]


def test_a_shard_may_be_abandoned_in_the_middle(tmp_path: Path) -> None:
    """Its last sample may lack a field; that of the next shard is complete."""
    urls = [build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "jpg": "", "cls": ""}]) for name in "st"]
    some = itertools.chain(itertools.islice(load_wds_shards(urls[:1]), 1), load_wds_shards(urls[1:]))
    assert [sample["__key__"] for sample in group_samples(split_by_shard(some))] == ["t"]


@pytest.mark.parametrize(
    "item",
    [
        {"__key__": "a"},
        dict.fromkeys("abcd"),
        "abcd",
        4,
        ("a.tar", "a.txt", b""),
        ("a.tar", 1, b"", 0),
        (1, "a.txt", b"", 0),
    ],
)
def test_items_that_are_not_members(item: Any) -> None:
    said = rf"group_samples needs members .* but got {type(item).__name__}: {re.escape(repr(item))}"
    with pytest.raises(TypeError, match=said):
        list(group_samples(split_by_shard([item])))


# Memory


def peak(run: Callable[[], None]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def consume(samples: Iterable[Sample]) -> None:
    for sample in samples:
        sample.clear()


def test_memory_does_not_grow_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = SampleGrouping.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "remembered_keys", 100)

    def run(count: int) -> None:
        url = Shard("s.tar")
        consume(
            group_samples(
                split_by_shard(Member(url, f"{number}.{number % 10}", b"x", 512 * number) for number in range(count))
            )
        )

    run(100)
    assert peak(lambda: run(5000)) - peak(lambda: run(200)) < 20_000


def test_large_files_are_released(tmp_path: Path) -> None:
    size = 4 << 20
    shard = build_shard(tmp_path / "x.tar", [{"__key__": str(number), "bin": bytes(size)} for number in range(8)])
    assert peak(lambda: consume(group_samples(read_shards([shard])))) < 3.5 * size
