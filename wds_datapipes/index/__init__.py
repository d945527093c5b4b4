"""Indexes and manifests: the position of every sample in its shard, and the list of the shards of a dataset."""

from wds_datapipes.hints import spells_hints
from wds_datapipes.index import build, build_many, interop, sample_table
from wds_datapipes.index.file_format import index_url, read_index, write_index
from wds_datapipes.index.interop import read_wids_index, write_wids_index
from wds_datapipes.index.manifest import Manifest, read_manifest, write_manifest
from wds_datapipes.index.options import AccessOptions, EpochOptions, IndexOptions, Join
from wds_datapipes.index.sample_table import SampleTable, resample
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.samples.keys import KeySplit

build_index = spells_hints(build.build_index)
check_index = spells_hints(build.check_index)
build_indexes = spells_hints(build_many.build_indexes)
write_dali_index = spells_hints(interop.write_dali_index)
read_table = spells_hints(sample_table.read_table)

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
