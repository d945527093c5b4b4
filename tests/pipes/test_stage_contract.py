"""Every stage, checked against what torch and the loaders expect of one."""

from __future__ import annotations

import inspect
import itertools
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from record_files import write_records
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_datapipes
from wds_datapipes import DatasetSpec, DirectoryShards, Member, MockSamples, ShardList
from wds_datapipes.errors import (
    DecodeError,
    DuplicateKeyError,
    EncodeError,
    MissingFieldError,
    SampleSizeError,
    ShardOpenError,
    WdsError,
)
from wds_datapipes.samples.row_joining import RowMark
from wds_datapipes.testing import build_shard, check_stage

SAMPLES = [{"__key__": str(key), "__url__": "a.tar", "cls": b"%d" % key, "txt": "text"} for key in range(5)]
#: Stages without a functional name, because they start a pipeline.
SOURCES = [ShardList, DatasetSpec, DirectoryShards, MockSamples]
BARE = [{"__key__": "x"}]  # without fields
ROWS = [{"__key__": str(key), "__url__": "a.tar"} for key in range(3)]
TOKENS = [{"__key__": str(key), "tokens": torch.arange(key)} for key in range(4)]
PLANNED = [
    {"__key__": f"{n}", "tokens": [n, n], "__row__": RowMark(n // 2, n % 2, 2, 0, 2, True, row_length=4)}
    for n in range(4)
]
MEMBERS = [Member("a.tar", f"{key}.cls", b"1", key * 1024) for key in range(3)]


class Stage(NamedTuple):
    """The arguments of a stage, items that it accepts, and items for which it raises an error."""

    items: list[Any]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  no test changes it
    bad_items: list[Any] = []  # noqa: RUF012
    error: type[Exception] = ValueError
    text: str = "3 is odd"


def halve(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value // 2


def both(numbers: Iterator[int]) -> Iterator[int]:
    for number in numbers:
        yield number
        yield -number


def every_second(numbers: Iterator[int]) -> Iterator[int]:
    return itertools.islice(numbers, 0, None, 2)


def halve_sample(sample: dict[str, int]) -> dict[str, int]:
    return {"n": halve(sample["n"])}


def halve_and_draw(sample: dict[str, int], rng: Random) -> dict[str, float]:
    return {"n": halve(sample["n"]), "drawn": rng.random()}


#: Every stage with a functional name. A new one gets its row here.
TABLE = {
    "associate": Stage(
        SAMPLES, ({str(key): {"n": key} for key in range(5)},), {}, BARE, MissingFieldError, "the sample 'x'"
    ),
    "bucket_samples": Stage(SAMPLES, ("txt",), {"batch_size": 2}, BARE, MissingFieldError, "from the field 'txt'"),
    "cache_samples": Stage(SAMPLES),
    "cache_wds_shards": Stage(["a.tar", "b.tar.gz"], ("copies",), {}, [3], TypeError, "must yield str, not int: 3"),
    "extract_keys": Stage(SAMPLES, ("c?s", ["txt"]), {}, BARE, MissingFieldError, "matches 'c.s'"),
    "compose": Stage([2, 4], (both, every_second)),
    "group_samples": Stage(
        MEMBERS, (), {}, [MEMBERS[0], MEMBERS[0]._replace(offset=512)], DuplicateKeyError, "a.tar holds the field 'cls'"
    ),
    "load_wds_records": Stage(["a.jsonl", "b.jsonl.gz"], (), {}, ["c.jsonl"], ShardOpenError, "c.jsonl"),
    "load_wds_shards": Stage(["a.tar", "b.tar.gz"], (), {}, ["c.tar"], ShardOpenError, "c.tar"),
    "log_samples": Stage(SAMPLES, (), {"first": 1}),
    "map_dict": Stage([{"n": 2}, {"n": 4}], (), {"n": halve}, [{"n": 3}]),
    "map_samples": Stage([{"n": 2}, {"n": 4}], (halve_sample,), {}, [{"n": 3}]),
    "map_samples_with_rng": Stage([{"n": 2}, {"n": 4}], (halve_and_draw,), {}, [{"n": 3}]),
    "map_tuple": Stage([(2, "a"), (4, "b")], (halve, None), {}, [(3, "a")]),
    "mix_samples": Stage(SAMPLES[:3], (IterableWrapper(SAMPLES[3:]),), {"stop": "all"}),
    "non_empty": Stage(SAMPLES),
    "decode_batch": Stage(
        [SAMPLES, SAMPLES], (), {"only": "cls"}, [[{"__key__": "x", "cls": b"seven"}]], DecodeError, "cls.*sample 'x'"
    ),
    "pack_rows": Stage(PLANNED, ("tokens",), {}, BARE, MissingFieldError, "the sample 'x' .* no field '__row__'"),
    "pack_samples": Stage(
        TOKENS, (3, "tokens"), {}, [{"__key__": "x", "tokens": [1] * 4}], SampleSizeError, "4 tokens.*max_length=3"
    ),
    "rename": Stage(SAMPLES, (), {"label": "class;cls"}, BARE, MissingFieldError, "'class;cls' was"),
    "resample_wds_shards": Stage(["a.tar", "b.tar"], (4,)),
    "rename_keys": Stage(
        SAMPLES, (("label", "c?s"),), {"text": "*.txt"}, BARE, MissingFieldError, "to rename to 'label'"
    ),
    "rsample": Stage(SAMPLES, (1,)),
    "select_fields": Stage(SAMPLES, ("c?s",), {}, BARE, MissingFieldError, "matches 'c.s'"),
    "shuffle_samples": Stage(SAMPLES, (3,)),
    "slice_samples": Stage(SAMPLES, (0, None, 2)),
    "to_tuple": Stage(SAMPLES, ("cls", "txt"), {}, BARE, MissingFieldError, "'cls' was requested"),
    "unbatch_samples": Stage(
        [{"n": [1, 2], "m": [3, 4]}], (), {}, [{"n": [1, 2], "m": [3]}], ValueError, "has 2 items and .* has 1"
    ),
    "wds_decode": Stage(
        SAMPLES, (), {"only": "cls"}, [{"__key__": "x", "cls": b"seven"}], DecodeError, "cls.*sample 'x'"
    ),
    "wds_encode": Stage(
        [{"__key__": "0", "cls": 1}] * 3,
        (),
        {},
        [{"__key__": "x", "cls": "seven"}],
        EncodeError,
        "holds the str .*It takes an int",
    ),
    "write_wds_shards": Stage(
        SAMPLES,
        ("written-%03d.tar",),
        {"maxcount": 2},
        [{"__key__": "x.y", "cls": 1}],
        EncodeError,
        "cannot be written",
    ),
    # It continues where it stopped, so another iteration has the same items only if all items are equal.
    "with_epoch": Stage([1, 1, 1, 1], (3,)),
    "with_length": Stage(SAMPLES, (5,)),
}


@pytest.fixture(autouse=True)
def shards(folder: Path) -> None:
    for name in ("a.tar", "b.tar.gz"):
        build_shard(name, [{"__key__": str(key), "txt": b"text"} for key in range(3)])
    for name in ("a.jsonl", "b.jsonl.gz"):
        write_records(name, [{"__key__": str(key), "txt": "text"} for key in range(3)])
    build_shard("more.tar", [{"__key__": str(key), "cls": b"1"} for key in range(3)])


def error_of(loader: DataLoader[Any]) -> Exception:
    """Return the error that ends a loader."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  the callers check it
        list(loader)
    # A frame of torch references the error and the workers; ending them by garbage collection would take 5 seconds.
    traceback.clear_frames(caught.tb)
    return caught.value


def registered() -> dict[str, type[IterDataPipe[Any]]]:
    """The classes of this package that have a functional name."""
    found = {}
    for name, function in IterDataPipe.functions.items():
        kind = getattr(function, "__wrapped__", None)
        if isinstance(kind, type) and issubclass(kind, IterDataPipe) and kind.__module__.startswith("wds_datapipes."):
            found[name] = kind
    return found


def wrap(items: list[Any]) -> IterDataPipe[Any]:
    return IterableWrapper(items)


def functional(name: str) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = getattr(wrap(TABLE[name].items), name)(*TABLE[name].arguments, **TABLE[name].options)
    return pipe


def failing(name: str) -> IterDataPipe[Any]:
    # If a stage accepts any item, the error comes from its source and must pass through.
    source = wrap(TABLE[name].bad_items) if TABLE[name].bad_items else wrap([2, 4, 3]).map(halve)
    pipe: IterDataPipe[Any] = getattr(source, name)(*TABLE[name].arguments, **TABLE[name].options)
    return pipe


def test_the_table_contains_every_stage() -> None:
    assert set(TABLE) == set(registered())


@pytest.mark.parametrize("name", TABLE)
def test_a_stage_keeps_the_contract(name: str) -> None:
    check_stage(lambda: functional(name))


def test_the_source_keeps_the_contract() -> None:
    check_stage(lambda: ShardList("train-{00..03}.tar"))
    check_stage(lambda: MockSamples({"__key__": "a", "cls": 1}, 3))
    check_stage(lambda: DatasetSpec({"datasets": [{"shards": "a-{0..9}.tar", "resample": 5}, {"shards": "b.tar"}]}))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", TABLE)
def test_an_error_arrives_with_its_type_and_text(name: str, workers: int) -> None:
    loader = DataLoader(failing(name), batch_size=None, num_workers=workers)
    error = error_of(loader)
    assert type(error) is TABLE[name].error
    assert re.search(TABLE[name].text, str(error))


@pytest.mark.parametrize("kind", [*SOURCES, *registered().values()])
def test_no_parameter_is_named_like_an_attribute_of_every_datapipe(kind: type[IterDataPipe[Any]]) -> None:
    """torch prints such attributes in every error; ``functions`` would print the list of all stages."""
    assert not set(inspect.signature(kind).parameters) & set(dir(IterDataPipe))


@pytest.mark.parametrize("kind", [*SOURCES, *registered().values()])
def test_a_stage_derives_from_the_base_class(kind: type[IterDataPipe[Any]]) -> None:
    assert issubclass(kind, wds_datapipes.Stage)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_error_contains_credentials(workers: int) -> None:
    secret = "hunter2-hunter2"
    stage = wrap(["memory://nowhere/a.tar"]).load_wds_shards(storage_options={"token": secret})
    assert "storage_options" not in vars(stage)
    error = error_of(DataLoader(stage, batch_size=None, num_workers=workers))
    assert type(error) is ShardOpenError
    assert "memory://nowhere/a.tar" in str(error)
    assert secret not in str(error)


def test_no_error_of_a_list_contains_credentials() -> None:
    secret = "hunter2-hunter2"
    with pytest.raises(WdsError) as caught:
        ShardList("memory://nowhere/*.tar", storage_options={"token": secret})
    assert secret not in str(caught.value)
    assert "storage_options" not in vars(ShardList("a.tar", storage_options={"token": secret}))
