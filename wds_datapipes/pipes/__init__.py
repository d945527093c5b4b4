"""Registered stages: the classes whose functional forms every ``IterDataPipe`` has once they are imported."""

from wds_datapipes.pipes.samples.buffering import SampleBucketer, SamplePacker, SampleShuffler
from wds_datapipes.pipes.samples.caching import SampleCacher
from wds_datapipes.pipes.samples.columns import BatchDecoder, SampleUnbatcher
from wds_datapipes.pipes.samples.counting import NonEmptyChecker, SampleLogger, SampleRsampler, SampleSlicer
from wds_datapipes.pipes.samples.epochs import EpochSetter, LengthSetter
from wds_datapipes.pipes.samples.field_codecs import SampleDecoder, SampleEncoder
from wds_datapipes.pipes.samples.fields import FieldRenamer, FieldSelector, KeyExtractor, KeyRenamer, TupleMaker
from wds_datapipes.pipes.samples.grouping import SampleGrouper
from wds_datapipes.pipes.samples.joining import Associator, ColumnAdder
from wds_datapipes.pipes.samples.mapping import (
    DictMapper,
    MockSamples,
    RngSampleMapper,
    SampleMapper,
    StreamComposer,
    TupleMapper,
)
from wds_datapipes.pipes.samples.mixing import SampleMixer
from wds_datapipes.pipes.shards.directory_shards import DirectoryShards
from wds_datapipes.pipes.shards.loading import ShardLoader
from wds_datapipes.pipes.shards.records import RecordLoader
from wds_datapipes.pipes.shards.resampling import ShardResampler
from wds_datapipes.pipes.shards.shard_cache import ShardCacher
from wds_datapipes.pipes.shards.shard_list import DatasetSpec, ShardList
from wds_datapipes.pipes.shards.writing import SampleWriter
from wds_datapipes.pipes.stage import Stage

__all__ = [
    "Associator",
    "BatchDecoder",
    "ColumnAdder",
    "DatasetSpec",
    "DictMapper",
    "DirectoryShards",
    "EpochSetter",
    "FieldRenamer",
    "FieldSelector",
    "KeyExtractor",
    "KeyRenamer",
    "LengthSetter",
    "MockSamples",
    "NonEmptyChecker",
    "RecordLoader",
    "RngSampleMapper",
    "SampleBucketer",
    "SampleCacher",
    "SampleDecoder",
    "SampleEncoder",
    "SampleGrouper",
    "SampleLogger",
    "SampleMapper",
    "SampleMixer",
    "SamplePacker",
    "SampleRsampler",
    "SampleShuffler",
    "SampleSlicer",
    "SampleUnbatcher",
    "SampleWriter",
    "ShardCacher",
    "ShardList",
    "ShardLoader",
    "ShardResampler",
    "Stage",
    "StreamComposer",
    "TupleMaker",
    "TupleMapper",
]
