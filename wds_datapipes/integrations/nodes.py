"""`PipelineNode`: a pipeline as a source for ``torchdata.nodes``, which torchdata has since release 0.10."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.extras import NODES, require
from wds_datapipes.loading.data_parallel_group import Distributed
from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards
from wds_datapipes.loading.torchdata_patches.patches import apply_to_nodes

if TYPE_CHECKING:
    from torchdata.nodes import BaseNode
else:
    BaseNode = require("torchdata.nodes", release=NODES, purpose="read with PipelineNode").BaseNode

apply_to_nodes()

#: The key in a state that says whether the node had raised ``StopIteration``.
EXHAUSTED = "is_exhausted"
#: Follows the last item of an epoch, unless the epoch has failed.
END: Final = object()


class PipelineNode(BaseNode):  # type: ignore[misc]  # older releases have no nodes
    """A source for ``torchdata.nodes`` that runs a pipeline, in this process or in workers, with mid-epoch states.

    It yields the same items in the same order as a ``DataLoader2`` with the same seed and a `ShardReadingService` with
    the same number of workers. It splits the shards between ranks and workers like `StatefulShards`. ``reset()`` loads
    the states of all loaders, and these load the state of a ``torchdata.nodes.Loader`` over this node.

    Args:
        pipe: the pipeline.
        seed: the seed of the orders, the same on all ranks.
        distributed: the ranks that share the data, as for `StatefulShards`.
        num_workers: the number of worker processes that run the pipeline; with 0, the process or thread that requests
            items runs it. Workers start with the first item of an epoch and end with the epoch.
        prefetch_factor: the number of items that each worker prefetches; 2 by default.
        multiprocessing_context: the start method of workers, such as ``"forkserver"``. The default is that of torch's
            ``DataLoader``.

    Attributes:
        data: the `StatefulShards` over which this node iterates. Its ``set_epoch`` selects the next epoch. Its
            ``load_state_dict`` loads a state of another loader before the first epoch.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value.
        RuntimeError: ``distributed`` is True, but there is no process group.
        StateError: a stage of the pipeline has no position, and its epochs are not reproducible from seeds.
        MissingDependencyError: this module is imported, but torchdata has no nodes.

    Examples:
        >>> import torchdata.nodes as tn
        >>> from wds_datapipes.integrations.nodes import PipelineNode
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": str(n), "cls": str(n)} for n in range(5)])
        >>> pipe = ShardList(shard).sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
        >>> loader = tn.Loader(tn.Batcher(PipelineNode(pipe), batch_size=2, drop_last=False))
        >>> for batch in loader:
        ...     print(batch)
        ...     break
        [('0',), ('1',)]
        >>> state = loader.state_dict()
        >>> loader = tn.Loader(tn.Batcher(PipelineNode(pipe), batch_size=2, drop_last=False))
        >>> loader.load_state_dict(state)
        >>> list(loader)
        [[('2',), ('3',)], [('4',)]]
    """

    def __init__(
        self,
        pipe: IterDataPipe[Any],
        *,
        seed: int = 0,
        distributed: Distributed = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        super().__init__()
        self.data = StatefulShards(pipe, seed=seed, distributed=distributed)
        self._loader: DataLoader[Any] = DataLoader(
            self.data,
            batch_size=None,
            collate_fn=_return_item,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
        )
        self._has_begun = False  # an epoch that has not ended
        self._is_exhausted = False
        self._begin_epoch()

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """Begin the next epoch, or resume from a state.

        Args:
            initial_state: the return value of `get_state`, or of ``state_dict()`` of another loader of the pipeline.

        Raises:
            StateError: the argument is none of these, or belongs to another pipeline, seed or rank.
        """
        super().reset(initial_state)
        self._close()
        if initial_state is not None:
            self.data.load_state_dict(initial_state)
        elif self._has_begun:
            self.data.end_epoch()
        self._is_exhausted = initial_state is not None and bool(initial_state.get(EXHAUSTED))
        self._has_begun = initial_state is not None and not self._is_exhausted
        self._begin_epoch()

    def next(self) -> Any:
        """Return the next item.

        Raises:
            StopIteration: the epoch is over.
        """
        if self._is_exhausted:
            raise StopIteration
        item = next(self._items)
        self._has_begun, self._is_exhausted = item is not END, item is END
        if self._is_exhausted:
            raise StopIteration
        return item

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last item, as the state of a `StatefulShards` with one more key."""
        return {**self.data.state_dict(), EXHAUSTED: self._is_exhausted}

    def _begin_epoch(self) -> None:
        """Start to iterate; the items do not refer to this node."""
        self._items = _epoch_of(self.data, self._loader)
        # If a node is garbage in a cycle, as with a Loader, torch cannot ask its workers to end, and waits 5 s for
        # each. This ends them before anything is collected.
        self._close = weakref.finalize(self, self._items.close)


def _epoch_of(data: StatefulShards, loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield the items of an epoch, and then `END`."""
    yield from data.tracked(loader)
    yield END


def _return_item(item: Any) -> Any:
    """Replace the function with which torch converts arrays to tensors."""
    return item
