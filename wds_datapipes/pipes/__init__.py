"""The stages: each is imported at its first use, by its functional form or its class.

Importing this package registers their functional names on every ``IterDataPipe``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from wds_datapipes.pipes.functional_form import register_stage
from wds_datapipes.pipes.stage import Stage as Stage

if TYPE_CHECKING:
    from wds_datapipes.pipes.samples.associate import Associator as Associator
    from wds_datapipes.pipes.samples.bucket_samples import SampleBucketer as SampleBucketer
    from wds_datapipes.pipes.samples.cache_samples import SampleCacher as SampleCacher
    from wds_datapipes.pipes.samples.compose import StreamComposer as StreamComposer
    from wds_datapipes.pipes.samples.decode_batch import BatchDecoder as BatchDecoder
    from wds_datapipes.pipes.samples.extract_keys import KeyExtractor as KeyExtractor
    from wds_datapipes.pipes.samples.group_samples import SampleGrouper as SampleGrouper
    from wds_datapipes.pipes.samples.log_samples import SampleLogger as SampleLogger
    from wds_datapipes.pipes.samples.map_dict import DictMapper as DictMapper
    from wds_datapipes.pipes.samples.map_samples import SampleMapper as SampleMapper
    from wds_datapipes.pipes.samples.map_samples_with_rng import RngSampleMapper as RngSampleMapper
    from wds_datapipes.pipes.samples.map_tuple import TupleMapper as TupleMapper
    from wds_datapipes.pipes.samples.mix_samples import SampleMixer as SampleMixer
    from wds_datapipes.pipes.samples.mock_samples import MockSamples as MockSamples
    from wds_datapipes.pipes.samples.non_empty import NonEmptyChecker as NonEmptyChecker
    from wds_datapipes.pipes.samples.pack_rows import RowPacker as RowPacker
    from wds_datapipes.pipes.samples.pack_samples import SamplePacker as SamplePacker
    from wds_datapipes.pipes.samples.rename import FieldRenamer as FieldRenamer
    from wds_datapipes.pipes.samples.rename_keys import KeyRenamer as KeyRenamer
    from wds_datapipes.pipes.samples.rsample import SampleRsampler as SampleRsampler
    from wds_datapipes.pipes.samples.select_fields import FieldSelector as FieldSelector
    from wds_datapipes.pipes.samples.shuffle_samples import SampleShuffler as SampleShuffler
    from wds_datapipes.pipes.samples.slice_samples import SampleSlicer as SampleSlicer
    from wds_datapipes.pipes.samples.to_tuple import TupleMaker as TupleMaker
    from wds_datapipes.pipes.samples.unbatch_samples import SampleUnbatcher as SampleUnbatcher
    from wds_datapipes.pipes.samples.wds_decode import SampleDecoder as SampleDecoder
    from wds_datapipes.pipes.samples.wds_encode import SampleEncoder as SampleEncoder
    from wds_datapipes.pipes.samples.with_epoch import EpochSetter as EpochSetter
    from wds_datapipes.pipes.samples.with_length import LengthSetter as LengthSetter
    from wds_datapipes.pipes.shards.cache_wds_shards import ShardCacher as ShardCacher
    from wds_datapipes.pipes.shards.dataset_spec import DatasetSpec as DatasetSpec
    from wds_datapipes.pipes.shards.directory_shards import DirectoryShards as DirectoryShards
    from wds_datapipes.pipes.shards.load_wds_records import RecordLoader as RecordLoader
    from wds_datapipes.pipes.shards.load_wds_shards import ShardLoader as ShardLoader
    from wds_datapipes.pipes.shards.resample_wds_shards import ShardResampler as ShardResampler
    from wds_datapipes.pipes.shards.shard_list import ShardList as ShardList
    from wds_datapipes.pipes.shards.write_wds_shards import SampleWriter as SampleWriter

#: The class of each stage that has a functional name, by its module, which has this name.
_STAGES = {
    "samples.associate": "Associator",
    "samples.bucket_samples": "SampleBucketer",
    "samples.cache_samples": "SampleCacher",
    "samples.compose": "StreamComposer",
    "samples.decode_batch": "BatchDecoder",
    "samples.extract_keys": "KeyExtractor",
    "samples.group_samples": "SampleGrouper",
    "samples.log_samples": "SampleLogger",
    "samples.map_dict": "DictMapper",
    "samples.map_samples": "SampleMapper",
    "samples.map_samples_with_rng": "RngSampleMapper",
    "samples.map_tuple": "TupleMapper",
    "samples.mix_samples": "SampleMixer",
    "samples.non_empty": "NonEmptyChecker",
    "samples.pack_rows": "RowPacker",
    "samples.pack_samples": "SamplePacker",
    "samples.rename": "FieldRenamer",
    "samples.rename_keys": "KeyRenamer",
    "samples.rsample": "SampleRsampler",
    "samples.select_fields": "FieldSelector",
    "samples.shuffle_samples": "SampleShuffler",
    "samples.slice_samples": "SampleSlicer",
    "samples.to_tuple": "TupleMaker",
    "samples.unbatch_samples": "SampleUnbatcher",
    "samples.wds_decode": "SampleDecoder",
    "samples.wds_encode": "SampleEncoder",
    "samples.with_epoch": "EpochSetter",
    "samples.with_length": "LengthSetter",
    "shards.cache_wds_shards": "ShardCacher",
    "shards.load_wds_records": "RecordLoader",
    "shards.load_wds_shards": "ShardLoader",
    "shards.resample_wds_shards": "ShardResampler",
    "shards.write_wds_shards": "SampleWriter",
}
#: The class of each source, by its module.
_SOURCES = {
    "samples.mock_samples": "MockSamples",
    "shards.dataset_spec": "DatasetSpec",
    "shards.directory_shards": "DirectoryShards",
    "shards.shard_list": "ShardList",
}
_MODULES = {kind: f"{__name__}.{module}" for module, kind in {**_STAGES, **_SOURCES}.items()}

__all__ = [*_MODULES, "Stage"]

for _module, _kind in _STAGES.items():
    register_stage(_module.rpartition(".")[2], _MODULES[_kind], _kind)

if not TYPE_CHECKING:  # type checkers refuse names that do not exist

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=import_module(__name__))  # lets Python suggest a similar name


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
