"""Write a single shard, or a numbered series of shards."""

from wds_datapipes.types import Instance, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_file import TarWriter
from wds_datapipes.writing.shard_writer import ShardWriter

__all__ = ["Instance", "ShardInfo", "ShardWriter", "TarWriter", "WriteOptions"]
