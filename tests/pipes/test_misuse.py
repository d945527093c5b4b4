"""Wrong arguments and items of stages and public functions: each error is one that this package raises on purpose."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_datapipes
from wds_datapipes import index
from wds_datapipes.errors import WdsError
from wds_datapipes.samples.row_joining import RowMark
from wds_datapipes.testing import build_shard

PACKAGE = os.path.dirname(wds_datapipes.__file__)
SAMPLES = [{"__key__": str(n), "__url__": "a.tar", "cls": n, "txt": "x", "png": b"q"} for n in range(3)]
#: Wrong values of arguments, fields and items; each may be right in some places.
VALUES: dict[str, Any] = {
    "None": None,
    "a negative number": -1,
    "a fraction": 1.5,
    "nan": float("nan"),
    "text": "abc",
    "no text": "",
    "bytes": b"abc",
    "a list": [1, 2],
    "a nested list": [["a"]],
    "an empty list": [],
    "a dict": {"a": 1},
    "an object": object(),
    "a path": Path("a"),
    "a generator": (n for n in range(2)),
    "a name that no file can have": "a\0b",
    "a missing file": "nowhere/x.tar",
    "a home directory": "~/x",
}
#: Values that only items have.
ARRAYS: dict[str, Any] = {"an array": np.zeros(3), "a tensor": torch.zeros(3)}
#: Arguments with which each stage works.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "associate": ({str(n): {"n": n} for n in range(3)},),
    "bucket_samples": ("txt",),
    "cache_wds_shards": ("copies",),
    "compose": (iter,),
    "extract_keys": ("c?s",),
    "map_samples": (lambda sample: sample,),
    "map_samples_with_rng": (lambda sample, _: sample,),
    "map_tuple": (None,),
    "mix_samples": (IterableWrapper(SAMPLES),),
    "pack_rows": ("txt",),
    "pack_samples": (8, "txt"),
    "rename_keys": (("label", "c?s"),),
    "resample_wds_shards": (4,),
    "rsample": (0.5,),
    "select_fields": ("c?s",),
    "shuffle_samples": (3,),
    "slice_samples": (2,),
    "to_tuple": ("cls",),
    "with_epoch": (3,),
    "with_length": (3,),
    "write_wds_shards": ("written-%d.tar",),
}
OPTIONS: dict[str, dict[str, Any]] = {"bucket_samples": {"batch_size": 2}}
#: Items that a stage works with, if they are not samples.
ITEMS: dict[str, list[Any]] = {
    "cache_wds_shards": ["a.tar"],
    "decode_batch": [SAMPLES],
    "load_wds_records": ["a.jsonl"],
    "load_wds_shards": ["a.tar"],
    "map_tuple": [(1, 2)],
    "pack_rows": [{"__key__": "a", "txt": [1], "__row__": RowMark(0, 0, 1, 0, 1, True, row_length=8)}],
    "resample_wds_shards": ["a.tar"],
    "unbatch_samples": [{"a": [1, 2]}],
}
STAGES: dict[str, Any] = {
    name: function.__wrapped__  # type: ignore[attr-defined]
    for name, function in IterDataPipe.functions.items()
    if getattr(getattr(function, "__wrapped__", None), "__module__", "").startswith("wds_datapipes.")
}
#: Calls that work, of sources, writers and functions; `misused` replaces each argument.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "ShardList": (wds_datapipes.ShardList, ("a.tar",), {}),
    "DatasetSpec": (wds_datapipes.DatasetSpec, ({"datasets": [{"shards": "a.tar"}]},), {}),
    "IndexedSamples": (wds_datapipes.IndexedSamples, ("a.tar",), {}),
    "StatefulShards": (wds_datapipes.StatefulShards, (wds_datapipes.ShardList("a.tar"),), {}),
    "ShardReadingService": (wds_datapipes.ShardReadingService, (), {}),
    "TarWriter": (wds_datapipes.TarWriter, ("b.tar",), {}),
    "ShardWriter": (wds_datapipes.ShardWriter, ("b-%d.tar",), {}),
    "ImageDecoder": (wds_datapipes.ImageDecoder, ("rgb",), {}),
    "RandomResizedCrop": (wds_datapipes.RandomResizedCrop, (8,), {}),
    "CenterCrop": (wds_datapipes.CenterCrop, (8,), {}),
    "ErrorBudget": (wds_datapipes.ErrorBudget, (3,), {}),
    "ReadLimits": (wds_datapipes.ReadLimits, (), {}),
    "merge_states": (wds_datapipes.merge_states, ([],), {}),
    "read_quarantine": (wds_datapipes.read_quarantine, ("a.tar",), {}),
    "handle_extension": (wds_datapipes.handle_extension, ("foo", len), {}),
    "convert_shards": (wds_datapipes.convert_shards, (lambda sample: sample, "a.tar", "out/"), {"num_workers": 0}),
    "create_shards": (wds_datapipes.create_shards, ([], "b-%d.tar"), {"num_workers": 0}),
    "verify_shards": (wds_datapipes.verify_shards, ("a.tar",), {"num_workers": 0}),
    "build_index": (index.build_index, ("a.tar",), {}),
    "build_indexes": (index.build_indexes, ("a.tar",), {}),
    "read_index": (index.read_index, ("a.tar.wdsidx",), {}),
    "Manifest": (index.Manifest, ([],), {}),
    "read_manifest": (index.read_manifest, ("a.json",), {}),
    "write_manifest": (index.write_manifest, (index.Manifest([]), "b.json"), {}),
    "read_wids_index": (index.read_wids_index, ("a.json",), {}),
    "write_wids_index": (index.write_wids_index, (index.Manifest([]), "b.json"), {}),
    "write_dali_index": (index.write_dali_index, ("a.tar",), {}),
    "resample": (index.resample, ([1.0],), {}),
}
#: Arguments that no check covers, because the value is the user's own function, or a whole array is compared.
EXEMPT = {("MockSamples", "sample"), ("IndexedSamples", "global_batch_size")}


@pytest.fixture(autouse=True)
def files(folder: Path) -> None:
    build_shard("a.tar", [{"__key__": str(n), "cls": b"1"} for n in range(3)])
    Path("a.jsonl").write_text('{"__key__": "a", "x": 1}\n')
    Path("a.json").write_text(json.dumps({"other": 1}))


@functools.cache
def raised_lines(path: str) -> set[int]:
    """The lines of a module's ``raise`` statements."""
    statements = ast.walk(ast.parse(Path(path).read_text("utf-8")))
    raises = [each for each in statements if isinstance(each, ast.Raise) and each.exc is not None]
    return {line for each in raises for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}


def is_deliberate(error: Exception) -> bool:
    """Whether this package has raised an error by a statement of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_own = last.filename.startswith(PACKAGE) and last.lineno in raised_lines(last.filename)
    return isinstance(error, WdsError) or is_own


def problems(calls: Iterator[tuple[str, Callable[[], Any]]]) -> list[str]:
    """What Python itself raised in some calls, whose results are iterated."""
    found = []
    for label, call in calls:
        try:
            result = call()
            for _ in itertools.islice(result, 9) if isinstance(result, IterDataPipe) else ():
                pass
            if isinstance(result, wds_datapipes.TarWriter | wds_datapipes.ShardWriter):
                result.close()
        except Exception as error:  # noqa: PERF203  of a few calls
            if not is_deliberate(error):
                found.append(f"{label}: {type(error).__name__}: {str(error)[:90]}")
    return found


def misused(
    call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], names: list[str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a call for each argument and each wrong value in its place."""
    for what, value in VALUES.items():
        for place in range(len(arguments)):
            changed = (*arguments[:place], value, *arguments[place + 1 :])
            yield f"argument {place} is {what}", functools.partial(call, *changed, **options)
        for name in names:
            yield f"{name} is {what}", functools.partial(call, *arguments, **{**options, name: value})


def names_of(function: Callable[..., Any], given: int) -> list[str]:
    """The names of the arguments after those that are given by position."""
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STAGES)
def test_a_wrong_argument_of_a_stage_is_refused_on_purpose(name: str) -> None:
    arguments, options = ARGUMENTS.get(name, ()), OPTIONS.get(name, {})
    source: IterDataPipe[Any] = IterableWrapper(ITEMS.get(name, SAMPLES))
    source = IterableWrapper(["a.tar"]).load_wds_shards() if name == "group_samples" else source
    names = names_of(STAGES[name], 1 + len(arguments))
    assert problems(misused(getattr(source, name), arguments, options, names)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STAGES)
def test_a_wrong_item_of_a_stage_is_refused_on_purpose(name: str) -> None:
    def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
        for what, value in {**VALUES, **ARRAYS}.items():
            keyed = {} if isinstance(value, (list, dict, np.ndarray)) else {value: 1}
            samples = [{"__key__": value}, {"cls": value}, {"__key__": "a", "cls": value, "txt": value}, keyed]
            for item in (value, ("a.tar", value), *samples):
                source: IterDataPipe[Any] = IterableWrapper([item], deepcopy=False)
                build = functools.partial(getattr(source, name), *ARGUMENTS.get(name, ()), **OPTIONS.get(name, {}))
                yield f"{type(item).__name__} with {what}", build

    assert problems(calls()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_of_a_function_or_class_is_refused_on_purpose(name: str) -> None:
    call, arguments, options = CALLS[name]
    names = [each for each in names_of(call, len(arguments)) if (name, each) not in EXEMPT]
    function: Any = vars(call)["__init__"] if isinstance(call, type) else call
    keywords = getattr(inspect.unwrap(function), "_wds_datapipes_keywords", {})
    assert problems(misused(call, arguments, options, [*names, *keywords])) == []
