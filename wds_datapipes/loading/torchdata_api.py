"""The names of torchdata, in 0.7.1 to 0.9.0, that the loaders use: a release that moves one concerns this module.

Importing it needs torchdata, which is optional. `torchdata_patches` alone has others, those of the modules that it
patches.
"""

from torchdata.dataloader2 import DataLoader2, DistributedReadingService, MultiProcessingReadingService
from torchdata.dataloader2.graph import find_dps, list_dps, replace_dp
from torchdata.dataloader2.graph._serialization import (
    attach_wrapper,
    clone,
    deserialize_datapipe,
    extract_wrapper,
    serialize_datapipe,
)
from torchdata.dataloader2.graph.utils import _find_replicable_branches as find_replicable_branches
from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.dataloader2.utils.dispatch import _DummyIterDataPipe as DispatchedSource
from torchdata.dataloader2.utils.dispatch import find_lca_round_robin_sharding_dp, find_non_dispatching_branches
from torchdata.datapipes.iter import FullSync

__all__ = [
    "CheckpointableReadingServiceInterface",
    "DataLoader2",
    "DispatchedSource",
    "DistributedReadingService",
    "FullSync",
    "MultiProcessingReadingService",
    "WorkerInfo",
    "attach_wrapper",
    "clone",
    "deserialize_datapipe",
    "extract_wrapper",
    "find_dps",
    "find_lca_round_robin_sharding_dp",
    "find_non_dispatching_branches",
    "find_replicable_branches",
    "list_dps",
    "replace_dp",
    "serialize_datapipe",
]
