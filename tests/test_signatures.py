"""Signatures of public functions, classes and stages: few arguments, each visible, and options in objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

import wds_datapipes
from wds_datapipes import (
    IndexedSamples,
    ShardWriter,
    TarWriter,
    WriteOptions,
    convert_shards,
    create_shards,
    pipes,
    testing,
    writing,
)
from wds_datapipes import index as indexes
from wds_datapipes.index import build_indexes
from wds_datapipes.signatures import OPTIONS, arguments_of, spell_argument

#: The most arguments of a call; the rest belongs in objects such as `WriteOptions`.
MOST = 12
#: Records that loaders return: users read their fields, and construct none.
RETURNED = {"WorkerReport"}
#: Arguments whose names the user chooses: extensions and fields.
NAMED_BY_USERS = {"by_extension", "by_field", "new"}


def public_calls() -> Iterator[tuple[str, list[inspect.Parameter]]]:
    """Yield the public names with the parameters that a call has: without ``self``, and the source of a stage."""
    for module in (wds_datapipes, indexes, pipes, testing, writing):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if not callable(value) or not getattr(value, "__module__", "").startswith("wds_datapipes"):
                continue
            if isinstance(value, type) and issubclass(value, Exception):
                continue
            parameters = list(inspect.signature(value).parameters.values())
            is_stage = isinstance(value, type) and issubclass(value, IterDataPipe)
            yield name, [each for each in parameters if not (is_stage and each.name == "source")]
            for method, function in vars(value).items() if isinstance(value, type) else ():
                if inspect.isfunction(function) and method[0] != "_":
                    yield f"{name}.{method}", list(inspect.signature(function).parameters.values())[1:]


CALLS = {name: parameters for name, parameters in public_calls() if name not in RETURNED}


def test_a_public_call_has_few_arguments() -> None:
    assert {name: len(found) for name, found in CALLS.items() if len(found) > MOST} == {}
    assert {"ShardWriter", "create_shards", "ShardLoader", "WriteOptions", "Stage.reset_state"} <= CALLS.keys()


def test_every_argument_is_in_the_signature() -> None:
    open_ended = {each.name for found in CALLS.values() for each in found if each.kind is each.VAR_KEYWORD}
    assert open_ended == NAMED_BY_USERS


def options_classes() -> list[type]:
    return [
        value
        for module in (wds_datapipes, indexes)
        for name in module.__all__
        if name.endswith(OPTIONS) and is_dataclass(value := getattr(module, name)) and isinstance(value, type)
    ]


@pytest.mark.parametrize("options", options_classes(), ids=lambda options: options.__name__)
def test_options_describe_each_of_their_fields(options: type) -> None:
    arguments = inspect.getdoc(options).partition("\nArgs:\n")[2]  # type: ignore[union-attr]  # it has one
    assert [each.name for each in fields(options) if f"    {each.name}: " not in arguments] == []


@pytest.mark.parametrize("call", [ShardWriter, TarWriter, convert_shards, create_shards])
def test_every_writer_takes_the_same_options_in_one_object(call: Callable[..., Any]) -> None:
    for field in fields(WriteOptions):
        assert spell_argument(call, field.name) == f"options=WriteOptions({field.name}=...)"
        with pytest.raises(
            TypeError, match=rf"no argument '{field.name}': pass options=WriteOptions\({field.name}=7\)"
        ):
            call(**{field.name: 7})


def test_an_argument_of_an_object_in_an_object_is_found() -> None:
    found = arguments_of(IndexedSamples)
    assert found["lowercase"] == [("access", "AccessOptions"), ("indexing", "IndexOptions")]
    assert spell_argument(build_indexes, "header_bytes") == "options=IndexOptions(limits=ReadLimits(header_bytes=...))"
    assert spell_argument(build_indexes, "lanes") is None
    assert spell_argument(pipes.ShardLoader, "connect_s", "3") == "timeout_s=Timeouts(connect_s=3)"
