"""Sources of shard URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.core.shards import expand_urls

__all__ = ["ShardList"]


class ShardList(IterDataPipe[str]):
    """List the shards of a dataset.

    Each of ``urls`` is expanded, in this order: ``::`` separates patterns; ``${NAME}`` stands for the environment
    variable ``WDS_NAME``; braces are expanded (``{000..146}``, steps, alternatives); ``*``, ``?`` and ``[...]`` match
    local files, and ``*`` objects of every store that fsspec can list; a name that ends in ``/`` stands for the
    archives in that directory, sorted. ``pipe:`` commands and ``-`` (standard input) stay as they are, but for
    variables and braces.

    The list is made once, when the pipeline is built, so that all workers deal out the same one.

    Yields:
        str: the URL of each shard, in the order of the list.

    Args:
        urls: a pattern, a path, or an iterable of them.
        storage_options: what fsspec needs to list a store, as in ``{"anon": True}``.

    Raises:
        PatternError: a pattern cannot be expanded, or matches nothing.

    Examples:
        >>> list(ShardList("train-{000..002}.tar"))
        ['train-000.tar', 'train-001.tar', 'train-002.tar']
        >>> len(ShardList(["a-{0..9}.tar", "b.tar"]))
        11
    """

    _is_child_datapipe = False

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._listed = _Listed(expand_urls(urls, variables=os.environ, storage_options=storage_options))

    def __iter__(self) -> Iterator[str]:
        yield from self._listed.urls

    def __len__(self) -> int:
        return len(self._listed.urls)


class _Listed:
    """Holds the URLs out of sight of torch, which looks into every list in an attribute, again for each epoch."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
