"""Torch's datapipes, imported from here by all other modules: if torch moves them, only this package changes."""

import warnings

# A deprecation of datapipes does not concern users of this package, as it works without those of torch.
warnings.filterwarnings("ignore", "(?is)(?=.*data ?pipe).*deprecat", module=r"(abc|torch|torchdata|wds_datapipes)\b")

from torch.utils.data import IterDataPipe, MapDataPipe, functional_datapipe, graph, graph_settings  # noqa: E402  after the filter
from torch.utils.data.datapipes.iter import Batcher, Collator, IterableWrapper, ShardingFilter, Shuffler  # noqa: E402  after the filter
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES  # noqa: E402  after the filter
from torch.utils.data.graph import traverse_dps  # noqa: E402  after the filter
