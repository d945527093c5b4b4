"""Sources of shard URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

from wds_datapipes.fingerprint.values import fingerprint
from wds_datapipes.io.openers import redact
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.shards.mixture_spec import read_mixture
from wds_datapipes.shards.patterns import expand_urls
from wds_datapipes.shards.url_rewriting import Rewrite

__all__ = ["DatasetSpec", "ShardList"]


class ShardList(Stage[str]):
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
        rewrite: pairs of a regular expression and its replacement. The first whose expression matches at the beginning
            of a URL, and changes it, tells where the shard is read. By default they come from the environment variable
            ``WDS_REWRITE``, or ``GOPEN_REWRITE``, as ``EXPRESSION=REPLACEMENT;...``. With ``AIS_ENDPOINT`` set, URLs of
            AIStore (``ais://bucket/name``), and of the schemes that ``USE_AIS_FOR`` names, are read from there.
        safe: for a list that somebody else has given. No shards are taken but files on a network (``abfs``, ``abfss``,
            ``ais``, ``az``, ``ftp``, ``gcs``, ``gs``, ``hf``, ``http``, ``https``, ``s3``, ``s3a`` and ``sftp``), also
            as what a rule makes of a URL: no file of this host, no command, no variable, nothing that fsspec makes of
            another file, and no scheme of `register_opener`. Give it to ``.load_wds_shards()`` as well.

    Raises:
        PatternError: a pattern cannot be expanded, or matches nothing; or a rule cannot be read.
        RefusedURLError: with ``safe``, a shard is something else.

    Examples:
        >>> list(ShardList("train-{000..002}.tar"))
        ['train-000.tar', 'train-001.tar', 'train-002.tar']
        >>> len(ShardList(["a-{0..9}.tar", "b.tar"]))
        11
        >>> list(ShardList("s3://bucket/{0..1}.tar", rewrite=[("s3://", "/mnt/")]))
        ['/mnt/bucket/0.tar', '/mnt/bucket/1.tar']
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        storage_options: Mapping[str, Any] | None = None,
        rewrite: Rewrite | None = None,
        safe: bool = False,
    ) -> None:
        super().__init__()
        found = expand_urls(urls, variables=os.environ, storage_options=storage_options, rewrite=rewrite, safe=safe)
        self._urls = _Listed(found)

    @property
    def urls(self) -> list[str]:
        """All that are listed."""
        return self._urls.urls

    def __iter__(self) -> Iterator[str]:
        yield from self._urls.urls

    def __len__(self) -> int:
        return len(self._urls.urls)


class DatasetSpec(SeededStage, Stage[str]):
    """List the shards of several datasets that are mixed in proportions, as a YAML or JSON file tells them.

    The file holds the keys that webdataset's specifications have:

        prefix: "s3://"                # before each URL; may be left out
        buckets: ["training-data"]     # for datasets that name none; may be left out
        datasets:
          - name: books                # for messages
            shards: ["books-{000..099}.tar"]
            choose: 10                 # 10 of its 100 shards in each epoch
          - buckets: web
            shards: "crawl-{0000..0999}.tar"
            resample: 0.5              # 500 draws in each epoch, with replacement

    A URL is the prefix, the bucket and a slash, and the shard. It is expanded as by `ShardList`; a ``~`` at the
    beginning of a bucket or a shard is the home directory. With ``choose``, an epoch has so many shards of the dataset,
    each once; with ``resample``, so many draws with replacement; with neither, all shards. A whole number (``1``) is a
    number of shards, and one with a point (``1.0``) a share of all, rounded, and at least one shard. ``scaleprob`` is
    a share as well: ``scaleprob: 0.3`` means ``choose: 0.3``.

    A dataset may also say something about its samples: ``scale`` (a number or the two ends of a range, by which images
    are to be resized), ``extensions`` (the fields that hold the image), and ``settings`` with keys of your own. These
    do not change what is read. They are in `settings`, from where ``.associate(spec.settings, by="__url__")`` adds them
    to samples.

    The shards come in the order of the file; put ``.shuffle()`` behind. Which are drawn changes with each epoch, and is
    the same in all ranks and workers, since the loader gives the seed: the place for ``.sharding_filter()`` is behind.

    Yields:
        str: the URL of each shard of the epoch. ``len()`` tells how many there are.

    Args:
        spec: the path or the URL of a ``.yaml``, ``.yml`` or ``.json`` file, or what such a file holds. YAML needs the
            extra ``yaml``.
        storage_options: what fsspec needs to read the file and to list a store, as in ``{"anon": True}``.
        safe: take no URLs but those of files on a network, that of the file included; see `ShardList`.
        allow_commands: let a file that is not of this host name commands (``pipe:``) as shards.

    Raises:
        SpecError: the specification has an unknown key, lacks one, or has a value that makes no sense.
        PatternError: a pattern in it cannot be expanded, or matches nothing.
        MissingDependencyError: PyYAML is not installed.
        RefusedURLError: the file is not of this host and names a command; or, with ``safe``, something is no file on a
            network.

    Examples:
        >>> spec = DatasetSpec({"datasets": [{"shards": "a-{0..2}.tar"}, {"shards": "b-{0..9}.tar", "choose": 1}]})
        >>> len(spec)
        4
        >>> list(spec)[:3]
        ['a-0.tar', 'a-1.tar', 'a-2.tar']
    """

    def __init__(
        self,
        spec: str | os.PathLike[str] | Mapping[str, Any],
        *,
        storage_options: Mapping[str, Any] | None = None,
        safe: bool = False,
        allow_commands: bool = False,
    ) -> None:
        super().__init__()
        self._mixture = read_mixture(
            spec,
            lambda pattern: expand_urls(pattern, variables=os.environ, storage_options=storage_options, safe=safe),
            storage_options=storage_options,
            safe=safe,
            allow_commands=allow_commands,
        )
        self._rng = Random()

    def reset(self) -> None:
        """Begin an epoch, with the seed that was set for it or one from torch's generator."""
        if self._mixture.is_random:
            self._rng.seed(self.take_seed())
        self._seed = None

    @property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """What the specification says about the samples of each shard, by URL; shards without settings are left out."""
        return self._mixture.settings

    @property
    def repeats_shards(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether one shard may come more than once in an epoch."""
        return any(some.again for some in self._mixture.collections)

    def __iter__(self) -> Iterator[str]:
        yield from self._mixture.draw(self._rng)

    def __len__(self) -> int:
        return len(self._mixture)


class _Listed:
    """Holds the URLs out of sight of torch, which looks into every list in an attribute, again for each epoch."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def fingerprint(self) -> str:
        """Return how many shards there are, with the first and the last, and a digest of their URLs."""
        text = f"{len(self.urls)} shards"
        if self.urls:
            text += f" from {redact(self.urls[0])} to {redact(self.urls[-1])}"
        return f"{text} #{fingerprint(self.urls)[:12]}"
