"""The datapipes of torch, for all other modules: a release of torch that moves or deprecates them concerns this one."""

from torch.utils.data import IterDataPipe, MapDataPipe, graph, graph_settings
from torch.utils.data.datapipes.iter import (
    Batcher,
    Collator,
    Filter,
    IterableWrapper,
    Mapper,
    ShardingFilter,
    Shuffler,
)
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
