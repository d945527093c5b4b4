"""Shard writing: one shard, or a numbered series of shards."""

from wds_datapipes.types import PlacedSample, ShardInfo
from wds_datapipes.writing.record_writer import RecordWriter
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = [
    "PlacedSample",
    "RecordWriter",
    "ShardInfo",
    "ShardWriter",
    "TarWriter",
]
