"""The names of torchdata, in 0.7.1 to 0.9.0, that the loaders use: a release that moves one concerns this module.

Importing it needs torchdata, which is optional. `torchdata_patches` alone has others, those of the modules that it
patches.
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
