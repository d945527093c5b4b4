"""Shard writing: one archive, or a numbered series of shards."""

from wds_datapipes.types import PlacedSample, ShardInfo
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = [
    "PlacedSample",
    "ShardInfo",
    "ShardWriter",
    "TarWriter",
]
