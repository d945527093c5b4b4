"""The source `DatasetSpec`: the shards of a mixture of datasets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, ClassVar

from wds_datapipes.pipes.shards.listing import ListingStage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.shards.patterns import expand_urls


class DatasetSpec(SeededStage, ListingStage[str]):
    """List the shards of a mixture of datasets that a YAML or JSON file specifies.

    The file has the keys of webdataset's specifications::

        prefix: "s3://"                # before each URL; optional
        buckets: ["training-data"]     # for datasets without buckets; optional
        datasets:                      # or dataset
          - name: books                # for messages
            shards: ["books-{000..099}.tar"]
            choose: 10                 # 10 of its 100 shards in each epoch
            language: en               # a setting of its samples
          - buckets: web
            shards: "crawl-{0000..0999}.tar"
            resample: 0.5              # 500 draws in each epoch, with replacement

    A URL consists of the prefix, the bucket, a slash and the shard. It is expanded as by `ShardList`; a ``~`` at the
    start of a bucket or a shard is the home directory. In each epoch, ``choose`` selects distinct shards of the
    dataset, and ``resample`` draws shards with replacement; without either, all shards are used. An integer (``1``) is
    a number of shards, and a float (``1.0``) a share of the dataset's shards, rounded, but at least one shard.
    ``scaleprob`` is always a share: ``scaleprob: 0.3`` means ``choose: 0.3``.

    All other keys of a dataset, such as ``scale`` and ``extensions``, are settings of its samples. They do not change
    what is read: ``settings`` has them by shard, and ``.associate(spec.settings, by="__url__")`` adds them to samples.
    A setting whose name resembles one of the keys above belongs under the key ``settings``.

    The shards are in the order of the file; put ``.shuffle()`` and then ``.sharding_filter()`` after this stage. The
    drawn shards differ in each epoch, but not between ranks and workers, because the seed comes from the loader.

    Yields:
        str: the URL of each shard of the epoch. ``len()`` returns their number.

    Args:
        spec: the path or URL of a ``.yaml``, ``.yml`` or ``.json`` file, or its parsed content. Files need the
            extra ``yaml``.
        storage_options: options for fsspec to read the file and to list a store, such as ``{"anon": True}``.
        allow_local_files: False accepts only URLs of files on a network, including that of the specification; see
            `ShardList`. ``~`` is then an ordinary character instead of the home directory, and the braces of all
            patterns may expand to 1,000,000 shards instead of 10,000,000.

    Raises:
        SpecError: the specification lacks a key, has an unknown one or an invalid value, or names too many shards; or a
            pattern in it cannot be expanded or matches nothing.
        MissingDependencyError: PyYAML is not installed.
        UnsafeInputError: a remote file lists a command; or a URL is not a file on a network, and
            ``allow_local_files`` is False.

    Examples:
        >>> spec = DatasetSpec({"datasets": [{"shards": "a-{0..2}.tar"}, {"shards": "b-{0..9}.tar", "choose": 1}]})
        >>> len(spec)
        4
        >>> list(spec)[:3]
        ['a-0.tar', 'a-1.tar', 'a-2.tar']
    """

    argument_uses: ClassVar = {"storage_options": "ignored", "allow_local_files": "ignored"}

    def __init__(
        self,
        spec: str | os.PathLike[str] | Mapping[str, Any],
        *,
        storage_options: Mapping[str, Any] | None = None,
        allow_local_files: bool = True,
    ) -> None:
        from wds_datapipes.shards.mixture_spec import read_mixture  # imports fsspec

        self._mixture = read_mixture(
            spec,
            lambda pattern: expand_urls(
                pattern, variables=os.environ, storage_options=storage_options, allow_local_files=allow_local_files
            ),
            storage_options=storage_options,
            allow_local_files=allow_local_files,
        )
        self._rng = Random()

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        if self._mixture.is_random:
            self._rng.seed(self.take_seed())
        self._seed = None

    @property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """The settings of the samples of each shard, by URL."""
        return self._mixture.settings

    def repeats_shards(self) -> bool:
        """Whether a shard may occur more than once in an epoch."""
        return any(each.with_replacement for each in self._mixture.collections)

    def __iter__(self) -> Iterator[str]:
        yield from self._mixture.draw(self._rng)

    def __len__(self) -> int:
        return len(self._mixture)
