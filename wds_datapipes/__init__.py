"""Train from WebDataset tar shards on torchdata DataPipes.

Importing this package registers its stages, so that every ``IterDataPipe`` has ``.load_wds_shards()`` and the others,
and mends what is broken in torchdata's own reading service; `repairs` lists it.
"""

import importlib
import importlib.util
import signal
import sys
import typing

# The command line cannot handle Ctrl-C before torch is imported, which takes seconds: until then, the signal ends the
# process, and not an import with a traceback. `main` takes over.
if sys.orig_argv[1:3] == ["-m", "wds_datapipes.cli"] or "".join(sys.orig_argv[1:2]).endswith("/wds-datapipes"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from wds_datapipes.codecs.extensions import Continue, handle_extension
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.extras import require as _require
from wds_datapipes.index.build import build_index, check_index
from wds_datapipes.index.build_many import build_indexes
from wds_datapipes.index.file_format import index_url, read_index, write_index
from wds_datapipes.index.interop.dali import read_dali_index, write_dali_index
from wds_datapipes.index.interop.energon import (
    read_energon_dataset,
    read_energon_index,
    write_energon_dataset,
    write_energon_index,
)
from wds_datapipes.index.interop.wids import read_wids_index, write_wids_index
from wds_datapipes.index.manifest import Manifest, check_manifest, read_manifest, write_manifest
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import register_opener
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.loading.torchdata_patches.patches import apply as _apply_repairs
from wds_datapipes.loading.torchdata_patches.patches import repairs
from wds_datapipes.on_error.policy import ErrorBudget
from wds_datapipes.on_error.quarantine import read_quarantine
from wds_datapipes.pipes.caching import SampleCacher
from wds_datapipes.pipes.composing import StreamComposer
from wds_datapipes.pipes.decoding import SampleDecoder, register_decoder
from wds_datapipes.pipes.directory_shards import DirectoryShards
from wds_datapipes.pipes.encoding import SampleEncoder
from wds_datapipes.pipes.epochs import EpochSetter, LengthSetter
from wds_datapipes.pipes.fields import DictMapper, FieldRenamer, SampleMapper, TupleMaker, TupleMapper
from wds_datapipes.pipes.grouping import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.joining import Associator, ColumnAdder
from wds_datapipes.pipes.loading import ShardLoader
from wds_datapipes.pipes.mixing import SampleMixer
from wds_datapipes.pipes.mock_samples import MockSamples
from wds_datapipes.pipes.random_functions import RngSampleMapper
from wds_datapipes.pipes.resampling import ShardResampler
from wds_datapipes.pipes.sample_log import SampleLogger
from wds_datapipes.pipes.sampling import NonEmptyChecker, SampleRsampler, SampleSlicer
from wds_datapipes.pipes.select import FieldSelector, KeyExtractor, KeyRenamer
from wds_datapipes.pipes.shard_cache import ShardCacher
from wds_datapipes.pipes.shard_list import DatasetSpec, ShardList
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.unbatching import SampleUnbatcher
from wds_datapipes.pipes.writing import SampleWriter
from wds_datapipes.prepare.convert import ConvertedShard, convert_shards
from wds_datapipes.samples.batching import collate_samples
from wds_datapipes.samples.keys import first_dot, last_dot
from wds_datapipes.types import Member, Sample, ShardInfo
from wds_datapipes.writing.shard_writer import ShardWriter
from wds_datapipes.writing.tar_writer import TarWriter

if typing.TYPE_CHECKING:
    from wds_datapipes.loading.checkpoint.resharding import merge_states
    from wds_datapipes.loading.report import LoadingReport, WorkerReport
    from wds_datapipes.loading.service.service import ShardReadingService
    from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards

__all__ = [
    "Associator",
    "ColumnAdder",
    "Continue",
    "ConvertedShard",
    "DatasetSpec",
    "DictMapper",
    "DirectoryShards",
    "EpochSetter",
    "ErrorBudget",
    "FieldRenamer",
    "FieldSelector",
    "ImageDecoder",
    "KeyExtractor",
    "KeyRenamer",
    "LengthSetter",
    "LoadingReport",
    "Manifest",
    "Member",
    "MockSamples",
    "NonEmptyChecker",
    "ReadLimits",
    "RngSampleMapper",
    "Sample",
    "SampleCacher",
    "SampleDecoder",
    "SampleEncoder",
    "SampleGrouper",
    "SampleLogger",
    "SampleMapper",
    "SampleMixer",
    "SampleRsampler",
    "SampleShuffler",
    "SampleSlicer",
    "SampleUnbatcher",
    "SampleWriter",
    "ShardCacher",
    "ShardIndex",
    "ShardInfo",
    "ShardList",
    "ShardLoader",
    "ShardReadingService",
    "ShardResampler",
    "ShardWriter",
    "Stage",
    "StatefulShards",
    "StreamComposer",
    "TarWriter",
    "TupleMaker",
    "TupleMapper",
    "WorkerReport",
    "build_index",
    "build_indexes",
    "check_index",
    "check_manifest",
    "collate_samples",
    "convert_shards",
    "first_dot",
    "handle_extension",
    "index_url",
    "last_dot",
    "merge_states",
    "read_dali_index",
    "read_energon_dataset",
    "read_energon_index",
    "read_index",
    "read_manifest",
    "read_quarantine",
    "read_wids_index",
    "register_decoder",
    "register_opener",
    "repairs",
    "write_dali_index",
    "write_energon_dataset",
    "write_energon_index",
    "write_index",
    "write_manifest",
    "write_wids_index",
]

_apply_repairs()

#: What is imported when it is first asked for. The reading service is derived from torchdata's, and everything else
#: also works without torchdata, and with releases of it that have no DataLoader2.
_LATER = {
    "LoadingReport": "wds_datapipes.loading.report",
    "ShardReadingService": "wds_datapipes.loading.service.service",
    "StatefulShards": "wds_datapipes.loading.stateful_dataset.dataset",
    "WorkerReport": "wds_datapipes.loading.report",
    "merge_states": "wds_datapipes.loading.checkpoint.resharding",
}


try:
    _has_dataloader2 = importlib.util.find_spec("torchdata.dataloader2") is not None
except ImportError:  # there is no torchdata at all
    _has_dataloader2 = False
if not _has_dataloader2:
    # So that `import *` works. By another name, because type checkers would believe that it is never there.
    _visible = __all__
    _visible.remove("ShardReadingService")


def __getattr__(name: str) -> object:
    if name in _LATER:
        if name == "ShardReadingService":
            purpose = "read with ShardReadingService and DataLoader2 (StatefulShards needs no torchdata)"
            _require("torchdata.dataloader2", extra="dataloader2", purpose=purpose)
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
