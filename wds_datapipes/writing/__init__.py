"""Shard writing: one shard, or a numbered series of shards."""

from wds_datapipes.types import PlacedSample, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_names import WriterShare
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import RecordWriter, TarWriter

__all__ = [
    "PlacedSample",
    "RecordWriter",
    "ShardInfo",
    "ShardWriter",
    "TarWriter",
    "WriteOptions",
    "WriterShare",
]
