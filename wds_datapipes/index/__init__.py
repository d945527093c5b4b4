"""Indexes and manifests: the position of every sample in its shard, and the list of the shards of a dataset."""

from wds_datapipes.index import interop
from wds_datapipes.index.format import builder, dataset_builder, validity
from wds_datapipes.index.format.index_file import index_url, read_index, write_index
from wds_datapipes.index.format.manifest import Manifest, read_manifest, write_manifest
from wds_datapipes.index.format.options import AccessOptions, EpochOptions, IndexOptions, Join
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.interop import read_wids_index, write_wids_index
from wds_datapipes.index.order.select import resample
from wds_datapipes.index.read import table
from wds_datapipes.index.read.table import SampleTable
from wds_datapipes.samples.keys import KeySplit
from wds_datapipes.signatures import spells_hints

build_index = spells_hints(builder.build_index)
check_index = spells_hints(validity.check_index)
build_indexes = spells_hints(dataset_builder.build_indexes)
write_dali_index = spells_hints(interop.write_dali_index)
read_table = spells_hints(table.read_table)

__all__ = [
    "AccessOptions",
    "EpochOptions",
    "IndexOptions",
    "Join",
    "KeySplit",
    "Manifest",
    "SampleTable",
    "ShardIndex",
    "build_index",
    "build_indexes",
    "check_index",
    "index_url",
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
