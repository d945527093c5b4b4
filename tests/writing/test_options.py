"""Options of the writers: the dataclasses, and the matching keyword arguments of functions."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import webdataset

from wds_datapipes import ShardWriter
from wds_datapipes.tools.prepare.shard_contents import ScanKeywords, ScanOptions
from wds_datapipes.tools.prepare.shard_producer import RunKeywords, RunOptions
from wds_datapipes.writing.options import WriteKeywords, WriteOptions


@pytest.mark.parametrize(
    ("options", "keywords"), [(WriteOptions, WriteKeywords), (RunOptions, RunKeywords), (ScanOptions, ScanKeywords)]
)
def test_each_option_has_a_keyword_of_its_type(options: Any, keywords: Any) -> None:
    types = {field.name: field.type for field in dataclasses.fields(options)}
    given = {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}
    assert given == types


def test_a_shard_writer_takes_the_positional_arguments_of_webdataset() -> None:
    theirs, ours = (list(inspect.signature(writer).parameters) for writer in (webdataset.ShardWriter, ShardWriter))
    named = [name for name in theirs if name not in ("kw", "opener")]
    assert ours[: len(named)] == named
    members = set(inspect.signature(webdataset.TarWriter).parameters) - {"fileobj", "format"}
    assert members <= {field.name for field in dataclasses.fields(WriteOptions)}
