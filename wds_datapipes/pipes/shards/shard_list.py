"""The source `ShardList`: the shards of a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from wds_datapipes.pipes.foreign_stages import TORCH_BUFFER_SIZE
from wds_datapipes.pipes.shards.listing import ListingStage
from wds_datapipes.pipes.state.shard_order import UrlList
from wds_datapipes.shards.patterns import Rewrite, expand_urls


class ShardList(ListingStage[str]):
    """List the shards of a dataset.

    Each of ``urls`` is expanded in this order: ``::`` separates patterns; ``${NAME}`` is replaced by the environment
    variable ``WDS_NAME``; braces are expanded (``{000..146}``, steps, alternatives); ``*``, ``?`` and ``[...]`` match
    local files, and ``*`` also matches objects in every store that fsspec can list; a name that ends in ``/`` lists the
    archives in that directory, sorted. In ``pipe:`` commands and ``-`` (standard input), only variables and braces are
    expanded.

    The list is computed once, when the pipeline is built, so that all workers split the same list.

    Yields:
        str: the URL of each shard, in the order of the list.

    Args:
        urls: a pattern, a path, or an iterable of these.
        storage_options: options for fsspec to list a store, such as ``{"anon": True}``.
        rewrite: pairs of a regular expression and its replacement. The first rule that matches the start of a URL and
            changes it is applied. By default, rules come from the environment variable ``WDS_REWRITE`` or
            ``GOPEN_REWRITE``, in the form ``EXPRESSION=REPLACEMENT;...``. If ``AIS_ENDPOINT`` is set, URLs of AIStore
            (``ais://bucket/name``) and of the schemes in ``USE_AIS_FOR`` are read from there.
        allow_local_files: pass False for an untrusted list. Then only files on a network are accepted (``abfs``,
            ``abfss``, ``ais``, ``az``, ``ftp``, ``gcs``, ``gs``, ``hf``, ``http``, ``https``, ``s3``, ``s3a`` and
            ``sftp``), even after rewriting: no local files, commands, variables, chained file systems of fsspec or
            schemes of `register_opener`. Pass it to ``.load_wds_shards()`` as well.

    Raises:
        SpecError: a pattern cannot be expanded, or matches nothing; or a rule is invalid.
        UnsafeInputError: a shard is not a file on a network, and ``allow_local_files`` is False.

    Examples:
        >>> list(ShardList("train-{000..002}.tar"))
        ['train-000.tar', 'train-001.tar', 'train-002.tar']
        >>> len(ShardList(["a-{0..9}.tar", "b.tar"]))
        11
        >>> list(ShardList("s3://bucket/{0..1}.tar", rewrite=[("s3://", "/mnt/")]))
        ['/mnt/bucket/0.tar', '/mnt/bucket/1.tar']
    """

    argument_uses: ClassVar = dict.fromkeys(("storage_options", "allow_local_files", "rewrite"), "ignored")

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        storage_options: Mapping[str, Any] | None = None,
        rewrite: Rewrite | None = None,
        allow_local_files: bool = True,
    ) -> None:
        self._urls = UrlList(
            expand_urls(
                urls,
                variables=os.environ,
                storage_options=storage_options,
                rewrite=rewrite,
                allow_local_files=allow_local_files,
            )
        )

    @property
    def urls(self) -> list[str]:
        """The URLs of all shards."""
        return self._urls.urls

    def known_list(self) -> Sequence[str]:
        """Return the URLs of all shards."""
        return self.urls

    def draw_list(self) -> UrlList | None:
        """Return a long list in its own order; see `Role.draw_list`."""
        return self._urls.in_order(np.arange(len(self), dtype=np.int32)) if len(self) > TORCH_BUFFER_SIZE else None

    def __iter__(self) -> Iterator[str]:
        yield from self._urls.urls

    def __len__(self) -> int:
        return len(self._urls.urls)
