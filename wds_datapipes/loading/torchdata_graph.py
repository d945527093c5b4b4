"""Functions on graphs that are private to torchdata, in 0.7.1 to 0.9.0, the last releases that have them."""

from torchdata.dataloader2.graph._serialization import (
    attach_wrapper,
    clone,
    deserialize_datapipe,
    extract_wrapper,
    serialize_datapipe,
)
from torchdata.dataloader2.graph.utils import _find_replicable_branches as find_replicable_branches
from torchdata.dataloader2.utils.dispatch import _DummyIterDataPipe as DispatchedSource

__all__ = [
    "DispatchedSource",
    "attach_wrapper",
    "clone",
    "deserialize_datapipe",
    "extract_wrapper",
    "find_replicable_branches",
    "serialize_datapipe",
]
