"""Different pipelines and their descriptions, which this prints as JSON when run as a script."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe, RandomSampler, SequentialSampler
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper, Sampler, Shuffler

from wds_datapipes import (
    CenterCrop,
    DatasetSpec,
    DirectoryShards,
    ImageDecoder,
    MockSamples,
    RandomResizedCrop,
    ShardList,
    first_dot,
    handle_extension,
    last_dot,
)
from wds_datapipes.pipes.state.description import descriptions

Pipe = IterDataPipe[Any]


def one(value: Any) -> Any:
    """Return the value."""
    return value


def two(value: Any) -> Any:
    return value, value


def helped(value: Any) -> Any:
    return one(value)


def helped_otherwise(value: Any) -> Any:
    return two(value)


def scaled(value: Any, by: int = 1, *, and_by: int = 1) -> Any:
    return value, by, and_by


def draw_one(value: Any, rng: Random) -> Any:
    return value, rng.random()


def draw_two(value: Any, rng: Random) -> Any:
    return value, rng.random(), rng.random()


def every(items: Iterator[Any]) -> Iterable[Any]:
    return items


def some(items: Iterator[Any]) -> Iterable[Any]:
    return itertools.islice(items, 2)


class Resize:
    """A typical transform: a callable object whose generator and count change while it is used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.called = 0
        self.rng = Random()

    def __call__(self, value: Any) -> Any:
        self.called += 1
        return value

    def smaller(self, value: Any) -> Any:
        return value


class Repeating(IterDataPipe[Any]):
    """A user's stage that stores its argument under a different name."""

    def __init__(self, source: Pipe, count: int) -> None:
        self.source = source
        self.times = count

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield from [item] * self.times


class LaterShuffler(Shuffler[Any]):
    """A user's subclass that forwards everything."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)


def source() -> Pipe:
    pipe: Pipe = IterableWrapper([{"__key__": "a", "__url__": "a.tar", "cls": b"1"}])
    return pipe


def calls(name: str, *all_arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Callable[[], Pipe]]:
    """Return a function that builds a stage with each of several arguments."""

    def call(arguments: tuple[Any, ...], options: dict[str, Any]) -> Pipe:
        pipe: Pipe = getattr(source(), name)(*arguments, **options)
        return pipe

    return [partial(call, *each) for each in all_arguments]


def given(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, options


FUNCTIONS = [
    *(given(function) for function in (one, two, helped, helped_otherwise, scaled, str.upper)),
    *(given(partial(scaled, by=by)) for by in (1, 2)),
    given(partial(scaled, and_by=2)),
    *(given(make(size)) for make in (Resize, lambda size: Resize(size).smaller) for size in (1, 2)),
    *(given(partial(operator.add, np.arange(length))) for length in (3, 4)),
    *(given(partial(operator.add, torch.full((3,), value))) for value in (0, 1)),
    given(lambda value: value + 1),
    given({str(number): number for number in range(3000)}.get),
    given({str(number): -number for number in range(3000)}.get),
]

#: Different arguments of each stage of this package that follows another one.
ARGUMENTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "associate": [
        *(given({str(key): {"n": sign * key} for key in range(3000)}) for sign in (1, -1)),
        *(given({}, **options) for options in ({"missing": "skip"}, {"by": "__url__"})),
    ],
    "bucket_samples": [
        *(given(size, batch_size=3) for size in ("txt", one, two)),
        *(given("txt", **options) for options in ({"max_tokens": 9}, {"max_tokens": 9, "batch_size": 4})),
        *(given("txt", batch_size=3, **options) for options in ({"boundaries": [2]}, {"drop_last": True})),
    ],
    "cache_samples": [given(), given(seed=1)],
    "cache_wds_shards": [],  # wherever the copies are, the samples are the same
    "compose": [given(every), given(some), given(every, some)],
    "decode_batch": [
        *(given(*decoders) for decoders in ((), ("rgb8",), (one,))),
        *(given(ImageDecoder("rgb8", crop=crop)) for crop in (CenterCrop(8), CenterCrop(9), RandomResizedCrop(8))),
        *(given(**options) for options in ({"collate_fn": one}, {"only": "cls"})),
    ],
    "extract_keys": [given("cls"), given("c*"), given(["cls"], "txt"), given("cls", missing="none")],
    "group_samples": [
        *(given(key_rule=rule) for rule in (first_dot, last_dot, one)),
        *(given(fields=[*map(str, range(count))]) for count in (1, 30, 31)),
        *(given(**options) for options in ({"lowercase": False}, {"on_duplicate": "last"}, {"on_error": "skip"})),
    ],
    "load_wds_records": [given(), given(format="cbor"), given(key="id"), given(fields=["a"]), given(open_shards=2)],
    "load_wds_shards": [
        *(given(select_files=function) for function in (one, two)),
        *(given(**options) for options in ({}, {"rename_files": one}, {"ignore_zeros": True}, {"on_error": "skip"})),
    ],
    "log_samples": [given(), given(first=4), given(every=2)],
    "map_dict": [given(cls=one), given(cls=two), given(txt=one), given(cls=one, txt=one)],
    "map_samples": FUNCTIONS,
    "map_samples_with_rng": [given(draw_one), given(draw_two)],
    "map_tuple": [given(one), given(two), given(None, one), given(one, None)],
    "mix_samples": [given(MockSamples({}, 3), **options) for options in ({}, {"stop": "all"}, {"weights": [1, 2]})],
    "non_empty": [given()],
    "pack_rows": [
        *(given(field) for field in ("cls", "txt")),
        *(
            given("cls", **options)
            for options in ({"pad": 0}, {"pad": 1}, {"lists": ["txt"]}, {"layout": "cu_seqlens"})
        ),
    ],
    "pack_samples": [given(8, "txt"), given(9, "txt"), given(8, ("txt", "cls")), given(8, "txt", open_rows=3)],
    "rename": [given(a="b"), given(a="c"), given(b="a"), given(a="b", keep=False)],
    "rename_keys": [given(a="b"), given(("a", "b")), given(a="b", keep_unselected=True)],
    "resample_wds_shards": [given(3), given(4), given(), given(3, seed=1)],
    "rsample": [given(0.5), given(0.25)],
    "select_fields": [given("cls"), given("c*"), given("cls", "txt"), given("cls", missing="skip")],
    "shuffle_samples": [given(3), given(4), given(4, initial=2), given(4, max_bytes=10)],
    "slice_samples": [given(100), given(110), given(10, 100), given(10, 100, 2), given(10, None)],
    "to_tuple": [given("cls"), given("txt"), given("cls", "txt"), given("cls", missing="none")],
    "unbatch_samples": [given()],
    "wds_decode": [
        *(given(*decoders) for decoders in ((), ("pil",), ("pil", "torch_audio"), (one,))),
        *(given(handle_extension("png", function)) for function in (one, two)),
        *(given(ImageDecoder("rgb8", crop=crop)) for crop in (RandomResizedCrop(8), RandomResizedCrop(9))),
        *(given(**options) for options in ({"cls": one}, {"txt": one}, {"only": "cls"}, {"allow_pickle": True})),
    ],
    "wds_encode": [given(), given(cls=one), given(only="cls")],
    "with_epoch": [given(3), given(4)],
    "with_length": [given(3), given(4)],
    "write_wds_shards": [given("a-%d.tar"), given("b-%d.tar"), given("a-%d.tar", maxcount=3)],
}
#: The same, with sources, and some stages of torch and of users.
PIPELINES: dict[str, list[Callable[[], Pipe]]] = {
    **{name: calls(name, *all_arguments) for name, all_arguments in ARGUMENTS.items()},
    "ShardList": [
        *(partial(ShardList, urls) for urls in ("{0..9}.tar", "{0..8}.tar")),
        lambda: ShardList([*(f"{number}.tar" for number in range(8)), "9.tar", "8.tar"]),
        *(partial(ShardList, f"https://host/{{0..9}}.tar?part={part}") for part in (1, 2)),
    ],
    "DatasetSpec": [
        partial(DatasetSpec, {"datasets": [{"shards": "{0..9}.tar", **rule}]})
        for rule in ({"choose": 3}, {"choose": 4}, {"resample": 3})
    ],
    "DirectoryShards": [
        *(partial(DirectoryShards, path) for path in "./"),
        partial(DirectoryShards, ".", "*.tgz"),
        partial(DirectoryShards, ".", after="delete"),
    ],
    "MockSamples": [partial(MockSamples, *each) for each in (({"cls": 1}, 3), ({"cls": 2}, 3), (one, 3), (two, 3))],
    "of torch": [
        *calls("map", *FUNCTIONS, given(one, input_col="cls"), given(one, input_col="cls", output_col="txt")),
        *calls("batch", given(3), given(4), given(3, drop_last=True)),
        *calls("collate", given(), given(collate_fn=one), given(collate_fn=two)),
        *calls("shuffle", given(), given(buffer_size=3)),
        *calls("sharding_filter", given()),
        *(partial(FileLister, *each) for each in ((["/a"], "*.tar"), (["/b"], "*.tar"), (["/a"], "*.tgz"))),
        *(partial(IterableWrapper, range(count)) for count in (3, 4)),
        *(partial(Sampler, IterableWrapper([1, 2]), kind) for kind in (SequentialSampler, RandomSampler)),
    ],
    "of a user": [
        *(partial(Repeating, source(), count) for count in (2, 3)),
        *(partial(LaterShuffler, source(), buffer_size=size) for size in (3, 4)),
    ],
}


def described() -> dict[str, list[list[str]]]:
    """Return the descriptions of all pipelines."""
    return {name: [descriptions(make()) for make in makers] for name, makers in PIPELINES.items()}


if __name__ == "__main__":
    print(json.dumps(described()))
