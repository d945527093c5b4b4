"""Indexes and manifests: the position of every sample in its shard, and the list of the shards of a dataset."""

from wds_datapipes.index.build import build_index, check_index
from wds_datapipes.index.build_many import build_indexes
from wds_datapipes.index.file_format import index_url, read_index, write_index
from wds_datapipes.index.interop.dali import read_dali_index, write_dali_index
from wds_datapipes.index.interop.energon import read_energon_index, write_energon_index
from wds_datapipes.index.interop.energon_dataset import EnergonDataset, read_energon_dataset, write_energon_dataset
from wds_datapipes.index.interop.wids import read_wids_index, write_wids_index
from wds_datapipes.index.manifest import Manifest, check_manifest, read_manifest, write_manifest
from wds_datapipes.index.options import AccessOptions, EpochOptions, IndexOptions
from wds_datapipes.index.sample_table import SampleTable, balance, read_table, resample
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.samples.keys import KeySplit

__all__ = [
    "AccessOptions",
    "EnergonDataset",
    "EpochOptions",
    "IndexOptions",
    "KeySplit",
    "Manifest",
    "SampleTable",
    "ShardIndex",
    "balance",
    "build_index",
    "build_indexes",
    "check_index",
    "check_manifest",
    "index_url",
    "read_dali_index",
    "read_energon_dataset",
    "read_energon_index",
    "read_index",
    "read_manifest",
    "read_table",
    "read_wids_index",
    "resample",
    "write_dali_index",
    "write_energon_dataset",
    "write_energon_index",
    "write_index",
    "write_manifest",
    "write_wids_index",
]
