"""Samples of several open shards: order, errors, and the closing of every file."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_parallel_pipelines import open_service
from drawn_archives import write_members
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import DirectoryShards, ShardList, last_dot
from wds_datapipes.errors import ChangedShardError, ShardOpenError
from wds_datapipes.testing import build_shard

Pipe = Any

pytestmark = pytest.mark.usefixtures("folder")


def write(name: str, size: int, *, junk: bool = False) -> str:
    """Write a shard; with ``junk``, files that belong to no sample are between the others."""
    samples = [{"__key__": f"{name}-{n}", "cls": str(n), "txt": "x" * (300 * n % 1000)} for n in range(size)]
    path = build_shard(f"{name}.tar", samples)
    if junk:
        write_members(path, ["LICENSE", *(f"{name}-{n}.cls" for n in range(size)), "INDEX"])
    return str(path)


def loaded(urls: list[str], open_shards: int, **options: Any) -> Pipe:
    return IterableWrapper(urls).load_wds_shards(open_shards=open_shards, **options).group_samples()


def keys(samples: Iterator[dict[str, Any]], count: int | None = None) -> list[str]:
    return [sample["__key__"] for sample in itertools.islice(samples, count)]


def in_turn(shards: list[list[str]], open_shards: int) -> list[str]:
    """Return the expected order, from lists."""
    left, opened, found = [*shards], list[list[str]](), list[str]()
    while left or opened:
        while left and len(opened) < open_shards:
            opened.append(left.pop(0))
        current, *opened = opened
        if current:
            found.append(current[0])
            opened += [current[1:]] if len(current) > 1 else []
    return found


def open_tars() -> list[str]:
    return [file.path for file in psutil.Process().open_files() if file.path.endswith(".tar")]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 6), max_size=8), open_shards=st.integers(1, 9), junk=st.booleans())
def test_each_open_shard_has_its_turn_and_the_next_takes_the_place_of_one_that_has_ended(
    sizes: list[int], open_shards: int, junk: bool
) -> None:
    urls = [write(str(shard), size, junk=junk) for shard, size in enumerate(sizes)]
    shards = [[f"{shard}-{n}" for n in range(size)] for shard, size in enumerate(sizes)]
    samples = list(loaded(urls, open_shards))
    assert keys(iter(samples)) == in_turn(shards, open_shards)
    whole = {sample["__key__"]: sample for sample in loaded(urls, 1)}
    assert samples == [whole[sample["__key__"]] for sample in samples]


def test_the_key_rule_of_the_samples_decides_where_a_turn_ends() -> None:
    for shard in "ab":
        write_members(f"{shard}.tar", ["x/1.l.txt", "x/1.r.txt", "x/2.l.txt", "y/1.l.txt", "y/1.r.txt"])

    def by_folder(name: str) -> tuple[str, str]:
        folder, _, file = name.partition("/")
        return folder, file

    shards = ShardList("{a,b}.tar").load_wds_shards(open_shards=2)
    assert [len(sample) - 3 for sample in shards.group_samples(key_rule=by_folder)] == [3, 3, 2, 2]
    shards = ShardList("{a,b}.tar").load_wds_shards(open_shards=2)
    assert keys(iter(shards.group_samples(key_rule=last_dot)), 4) == ["x/1.l", "x/1.l", "x/1.r", "x/1.r"]


def test_keys_are_compared_within_each_shard(recwarn: pytest.WarningsRecorder) -> None:
    for shard in "ab":
        build_shard(f"{shard}.tar", [{"__key__": str(n), "cls": "1"} for n in range(3)])
    assert keys(iter(loaded(["a.tar", "b.tar"], 2))) == ["0", "0", "1", "1", "2", "2"]
    assert not recwarn.list
    write_members("c.tar", ["0.cls", "1.cls", "0.txt"])
    with pytest.warns(UserWarning, match=r"c\.tar holds the sample '0' in parts"):
        list(loaded(["a.tar", "c.tar"], 2))


def broken(name: str, size: int = 6) -> str:
    """Write a shard that is truncated in its last sample."""
    path = Path(write(name, size))
    path.write_bytes(path.read_bytes()[:-12_000])
    return str(path)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("open_shards", [2, 3, 9])
def test_a_shard_that_fails_is_skipped_without_the_others(open_shards: int) -> None:
    urls = [write("a", 5), broken("b"), "missing.tar", write("c", 3), write("d", 2)]
    found = keys(iter(loaded(urls, open_shards, on_error="skip")))
    expected = keys(iter(loaded(urls, 1, on_error="skip")))
    assert Counter(found) == Counter(expected)
    assert 10 < len(found) < 16


@pytest.mark.usefixtures("nothing_left")
def test_an_error_comes_at_the_turn_of_its_shard_and_closes_the_others() -> None:
    urls = [write("a", 30), "missing.tar", write("c", 30)]
    pipe = iter(loaded(urls, 3))
    assert keys(pipe, 1) == ["a-0"]
    with pytest.raises(ShardOpenError, match=r"missing\.tar") as failed:
        next(pipe)
    assert open_tars() == []
    del failed


def test_a_handler_that_stops_ends_all_shards() -> None:
    urls = [write("a", 5), "missing.tar", write("c", 5)]
    found = keys(iter(loaded(urls, 3, on_error=lambda _: False)))
    assert found == ["a-0"]
    assert open_tars() == []


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("source", ["{}", "pipe:cat {}"])
def test_all_files_and_commands_are_closed_when_iteration_is_abandoned(source: str) -> None:
    urls = [source.format(write(name, 200)) for name in "abc"]
    pipe = iter(loaded(urls, 2))
    assert keys(pipe, 5) == ["a-0", "b-0", "a-1", "b-1", "a-2"]
    assert len(open_tars()) == (2 if source == "{}" else 0)
    del pipe


def test_only_group_samples_may_read_several_shards() -> None:
    write("a", 2)
    pipe = ShardList("a.tar").load_wds_shards(open_shards=2)
    for reader in (pipe, pipe.filter(bool).group_samples()):
        with pytest.raises(RuntimeError, match=r"Put \.group_samples\(\) directly after it"):
            list(reader)


def test_directories_are_read_shard_by_shard() -> None:
    Path("inbox").mkdir()
    shards = DirectoryShards("inbox", timeout_s=0)
    with pytest.raises(RuntimeError, match=r"DirectoryShards counts a shard as read .* open_shards=1"):
        list(shards.load_wds_shards(open_shards=2).group_samples())


# States -------------------------------------------------------------------------------------------------------------


def run(state: Any = None) -> Any:
    samples = ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards(open_shards=3).group_samples()
    return open_service(samples.shuffle_samples(3).to_tuple("__key__"), 0, state)


def test_each_open_shard_is_compared_with_the_state() -> None:
    for shard in range(6):
        write(str(shard), 4)
    with run() as loader:
        opened = {key[0] for (key,) in itertools.islice(loader, 5)}
        state = loader.state_dict()
    for shard in opened:
        build_shard(f"{shard}.tar", [{"__key__": f"other-{n}", "cls": str(n), "txt": "x" * 300} for n in range(4)])
        with pytest.raises(ChangedShardError), run(state) as loader:
            list(loader)
        write(shard, 4)


def test_a_state_after_an_error_begins_with_the_shard_that_failed() -> None:
    urls = [write("a", 3), "b.tar", write("c", 3)]
    pipe = loaded(urls, 3)
    items = iter(pipe)
    assert keys(items, 1) == ["a-0"]
    with pytest.raises(ShardOpenError):
        next(items)
    state = pipe.state_dict()
    write("b", 2)
    again = loaded(urls, 3)
    again.load_state_dict(state)
    assert keys(iter(again)) == ["b-0", "c-0", "a-1", "b-1", "c-1", "a-2", "c-2"]
