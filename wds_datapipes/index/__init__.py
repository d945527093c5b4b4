"""Indexes and manifests: the position of every sample in its shard, and the list of the shards of a dataset."""

import importlib
import sys
import typing

from wds_datapipes.index.format import builder, dataset_builder, validity
from wds_datapipes.index.format.index_file import index_url, read_index, write_index
from wds_datapipes.index.format.manifest import Manifest, read_manifest, write_manifest
from wds_datapipes.index.format.options import AccessOptions, EpochOptions, IndexOptions, Join, Pack
from wds_datapipes.index.format.parquet_columns import parquet_columns
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.select import resample
from wds_datapipes.index.read import table
from wds_datapipes.index.read.table import SampleTable
from wds_datapipes.samples.keys import KeySplit
from wds_datapipes.signatures import spells_hints

if typing.TYPE_CHECKING:
    from wds_datapipes.tools.interop import read_wids_index, write_dali_index, write_wids_index

build_index = spells_hints(builder.build_index)
check_index = spells_hints(validity.check_index)
build_indexes = spells_hints(dataset_builder.build_indexes)
read_table = spells_hints(table.read_table)

__all__ = [
    "AccessOptions",
    "EpochOptions",
    "IndexOptions",
    "Join",
    "KeySplit",
    "Manifest",
    "Pack",
    "SampleTable",
    "ShardIndex",
    "build_index",
    "build_indexes",
    "check_index",
    "index_url",
    "parquet_columns",
    "read_index",
    "read_manifest",
    "read_table",
    "read_wids_index",
    "resample",
    "write_dali_index",
    "write_index",
    "write_manifest",
    "write_wids_index",
]


def __getattr__(name: str) -> object:
    if name in {"read_wids_index", "write_dali_index", "write_wids_index"}:  # no training process needs them
        return getattr(importlib.import_module("wds_datapipes.tools.interop"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=sys.modules[__name__])  # lets Python suggest a similar name
