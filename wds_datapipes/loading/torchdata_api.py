"""The names of torchdata 0.7.1 to 0.9.0 that the loaders use: if a release moves one, only this module changes.

Importing this module requires torchdata, which is optional. Only `torchdata_patches` uses other names, of the modules
that it patches.
"""

from torchdata.dataloader2 import DataLoader2, DistributedReadingService, MultiProcessingReadingService, dataloader2
from torchdata.dataloader2.graph import list_dps, replace_dp
from torchdata.dataloader2.graph._serialization import (
    attach_wrapper,
    clone,
    deserialize_datapipe,
    extract_wrapper,
    serialize_datapipe,
)
from torchdata.dataloader2.graph.utils import _find_replicable_branches as find_replicable_branches
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.dataloader2.utils.dispatch import find_lca_round_robin_sharding_dp as find_dispatched
