"""Registered stages: the classes whose functional forms every ``IterDataPipe`` has once they are imported."""

from wds_datapipes.pipes.batch_decoding import BatchDecoder
from wds_datapipes.pipes.bucketing import SampleBucketer
from wds_datapipes.pipes.caching import SampleCacher
from wds_datapipes.pipes.composing import StreamComposer
from wds_datapipes.pipes.decoding import SampleDecoder
from wds_datapipes.pipes.directory_shards import DirectoryShards
from wds_datapipes.pipes.encoding import SampleEncoder
from wds_datapipes.pipes.epochs import EpochSetter, LengthSetter
from wds_datapipes.pipes.fields import DictMapper, FieldRenamer, SampleMapper, TupleMaker, TupleMapper
from wds_datapipes.pipes.grouping import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.joining import Associator, ColumnAdder
from wds_datapipes.pipes.loading import ShardLoader
from wds_datapipes.pipes.mixing import SampleMixer
from wds_datapipes.pipes.mock_samples import MockSamples
from wds_datapipes.pipes.packing import SamplePacker
from wds_datapipes.pipes.processing import ShardProcessor
from wds_datapipes.pipes.random_functions import RngSampleMapper
from wds_datapipes.pipes.records import RecordLoader
from wds_datapipes.pipes.resampling import ShardResampler
from wds_datapipes.pipes.sample_log import SampleLogger
from wds_datapipes.pipes.sampling import NonEmptyChecker, SampleRsampler, SampleSlicer
from wds_datapipes.pipes.select import FieldSelector, KeyExtractor, KeyRenamer
from wds_datapipes.pipes.shard_cache import ShardCacher
from wds_datapipes.pipes.shard_list import DatasetSpec, ShardList
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.unbatching import SampleUnbatcher
from wds_datapipes.pipes.writing import SampleWriter

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
    "ShardProcessor",
    "ShardResampler",
    "Stage",
    "StreamComposer",
    "TupleMaker",
    "TupleMapper",
]
