"""Write a single shard, or a numbered series of shards."""

from wds_datapipes.types import Instance, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["Instance", "ShardInfo", "ShardWriter", "TarWriter", "WriteOptions"]
