"""Train from WebDataset tar shards with PyTorch DataPipes.

Importing this package registers its stages as methods of every ``IterDataPipe``, such as ``.load_wds_shards()``, and
patches defects of torchdata that lose data, hang or repeat an order, which `list_patches` lists. It changes no class of
torch. The stage classes are in `wds_datapipes.pipes`; `wds_datapipes.index` reads and writes indexes.
"""

import importlib
import signal
import sys
import typing

# Importing torch takes seconds, during which the command line cannot handle Ctrl-C: until `main` takes over, the signal
# ends the process without a traceback.
if sys.orig_argv[1:3] == ["-m", "wds_datapipes"] or "".join(sys.orig_argv[1:2]).endswith("/wds-datapipes"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from wds_datapipes.codecs.crops import CenterCrop, RandomResizedCrop
from wds_datapipes.codecs.extensions import Continue, handle_extension
from wds_datapipes.extras import DATALOADER2 as _DATALOADER2
from wds_datapipes.extras import require as _require
from wds_datapipes.foreign_names import explain_name as _explain_name
from wds_datapipes.io.openers import register_opener
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.io.timeouts import Timeouts
from wds_datapipes.loading.torchdata_patches.on_import import has_dataloader2 as _has_dataloader2
from wds_datapipes.loading.torchdata_patches.patches import apply as _apply_patches
from wds_datapipes.loading.torchdata_patches.patches import list_patches
from wds_datapipes.on_error.policy import ErrorBudget, read_quarantine
from wds_datapipes.pipes import Stage
from wds_datapipes.pipes.samples.registered_decoders import register_decoder
from wds_datapipes.samples.batching import collate_samples
from wds_datapipes.samples.keys import first_dot, last_dot
from wds_datapipes.types import Member, Sample

if typing.TYPE_CHECKING:
    from wds_datapipes.codecs.images import ImageDecoder
    from wds_datapipes.loading.checkpoint.resharding import merge_states
    from wds_datapipes.loading.loader_batches import LoaderBatches
    from wds_datapipes.loading.other_hosts import RayReadingService
    from wds_datapipes.loading.report import LoadingReport, WorkerReport
    from wds_datapipes.loading.service.service import ShardReadingService
    from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards
    from wds_datapipes.pipes import DatasetSpec, DirectoryShards, MockSamples, ShardList
    from wds_datapipes.pipes.samples.indexed_samples import IndexedSamples
    from wds_datapipes.tools.prepare.convert import ConvertedShard, convert_shards
    from wds_datapipes.tools.prepare.create import create_shards
    from wds_datapipes.tools.prepare.job_options import JobOptions
    from wds_datapipes.tools.prepare.read_options import ReadOptions
    from wds_datapipes.tools.prepare.stats import dataset_stats
    from wds_datapipes.tools.prepare.verify import verify_shards
    from wds_datapipes.tools.runs.steps import explain
    from wds_datapipes.writing import ShardWriter, TarWriter, WriteOptions

    __version__: str

__all__ = [
    "CenterCrop",
    "Continue",
    "ConvertedShard",
    "DatasetSpec",
    "DirectoryShards",
    "ErrorBudget",
    "ImageDecoder",
    "IndexedSamples",
    "JobOptions",
    "LoaderBatches",
    "LoadingReport",
    "Member",
    "MockSamples",
    "RandomResizedCrop",
    "RayReadingService",
    "ReadLimits",
    "ReadOptions",
    "Sample",
    "ShardList",
    "ShardReadingService",
    "ShardWriter",
    "Stage",
    "StatefulShards",
    "TarWriter",
    "Timeouts",
    "WorkerReport",
    "WriteOptions",
    "collate_samples",
    "convert_shards",
    "create_shards",
    "dataset_stats",
    "explain",
    "first_dot",
    "handle_extension",
    "last_dot",
    "list_patches",
    "merge_states",
    "read_quarantine",
    "register_decoder",
    "register_opener",
    "verify_shards",
]

_apply_patches()

#: Names imported on first use, to halve the import time. Only the reading service needs torchdata, whose class it
#: derives from; everything else also works without torchdata or with releases that lack DataLoader2.
_LATER = {
    name: f"wds_datapipes.{module}"
    for module, names in {
        "codecs.images": "ImageDecoder",
        "loading.checkpoint.resharding": "merge_states",
        "loading.loader_batches": "LoaderBatches",
        "loading.other_hosts": "RayReadingService",
        "loading.report": "LoadingReport WorkerReport",
        "loading.service.service": "ShardReadingService",
        "loading.stateful_dataset.dataset": "StatefulShards",
        "pipes": "DatasetSpec DirectoryShards MockSamples ShardList",
        "pipes.samples.indexed_samples": "IndexedSamples",
        "tools.prepare.convert": "ConvertedShard convert_shards",
        "tools.prepare.create": "create_shards",
        "tools.prepare.job_options": "JobOptions",
        "tools.prepare.read_options": "ReadOptions",
        "tools.prepare.stats": "dataset_stats",
        "tools.prepare.verify": "verify_shards",
        "tools.runs.steps": "explain",
        "writing": "ShardWriter TarWriter WriteOptions",
    }.items()
    for name in names.split()
}


if not _has_dataloader2():
    # For `import *`. The alias keeps type checkers from removing the name unconditionally.
    _visible = __all__
    _visible.remove("RayReadingService")
    _visible.remove("ShardReadingService")


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("wds-datapipes")
    if name in _LATER:
        if name in ("RayReadingService", "ShardReadingService"):
            purpose = f"read with {name} and DataLoader2 (StatefulShards needs no torchdata)"
            _require("torchdata.dataloader2", release=_DATALOADER2, purpose=purpose)
        return getattr(importlib.import_module(_LATER[name]), name)
    message = f"module {__name__!r} has no attribute {name!r}{_explain_name(name)}"
    raise AttributeError(message, name=name, obj=sys.modules[__name__])  # lets Python suggest a similar name


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
