"""Options of the writers, and those of webdataset's writers."""

from __future__ import annotations

import dataclasses
import inspect

import webdataset

from wds_datapipes import ShardWriter
from wds_datapipes.writing.options import WriteOptions


def test_a_shard_writer_takes_the_positional_arguments_of_webdataset() -> None:
    theirs, ours = (list(inspect.signature(writer).parameters) for writer in (webdataset.ShardWriter, ShardWriter))
    named = [name for name in theirs if name not in ("kw", "opener")]
    assert ours[: len(named)] == named
    members = set(inspect.signature(webdataset.TarWriter).parameters) - {"fileobj", "format"}
    assert members <= {field.name for field in dataclasses.fields(WriteOptions)}
