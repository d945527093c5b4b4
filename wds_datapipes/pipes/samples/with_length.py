"""The stage ``.with_length()``: declare the length of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.roles import Transform
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.types import Instance


class LengthSetter(Transform, EngineStage[Any]):
    """Declare the number of items, without changing them (functional name: ``with_length``).

    ``len()`` returns ``n``; stages that derive their length, such as ``.batch()``, and loaders use it, too. It is not
    compared with the actual number of items. Use ``.with_epoch()`` to set the length of an epoch.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.
        n: the number of items in an epoch, over all workers of a rank.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"n": n} for n in range(10)]).filter(bool).with_length(10)
        >>> len(samples), len(samples.batch(4))
        (10, 3)
    """

    _share: int | None = None

    def __init__(self, source: IterDataPipe[Any], n: int) -> None:
        self.source = source
        self.n = check_integer("n, the number of items,", n, 0)

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def declares_length(self) -> bool:
        """Whether the user has declared the length."""
        return True

    def share_length(self, instance: Instance) -> None:
        """Make ``len()`` return one worker's part."""
        self._share = instance.share_of(self.n)

    def __len__(self) -> int:
        return self.n if self._share is None else self._share
