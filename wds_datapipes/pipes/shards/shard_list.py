"""Sources of shard URLs, and shuffling of whole lists."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import IterDataPipe, Shuffler
from wds_datapipes.pipes.foreign_stages import TORCH_BUFFER_SIZE, declared
from wds_datapipes.pipes.inspection import library_of, name_of, sources_of, upstream
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.pipes.state.shard_order import UrlList
from wds_datapipes.shards.patterns import Rewrite, expand_urls

T_co = TypeVar("T_co", covariant=True)


class ShufflerIterDataPipe(Shuffler[T_co]):
    """torch's ``.shuffle()`` for a whole list of any length, in a buffer of references.

    torch's own stage chooses from 10,000 items, so a shard of a longer list would stay near its place in the list.
    Lists of at most 10,000 shards have the same order as with torch. The class has the name of torch's because states
    and caches record the name.

    Yields:
        T_co: the items of ``datapipe``, in a different order in each epoch.

    Args:
        datapipe: yields URLs of shards.

    Attributes:
        lanes: the number of lanes. Lane i consists of every ``lanes``-th item, starting with item i, and is shuffled
            separately.
    """

    lanes = 1

    def __iter__(self) -> Iterator[T_co]:
        if not self._enabled:
            yield from self.datapipe
            return
        held: list[Any] = list(declared(self.datapipe).known_list() or self.datapipe)
        if len(held) > TORCH_BUFFER_SIZE or self.lanes > 1:
            for number in self._permute(np.arange(len(held), dtype=np.int32)).tolist():
                yield held[number]
            return
        while held:
            yield held.pop(self._rng.randint(0, len(held) - 1))

    def draw_list(self) -> UrlList | None:
        """Return a long list in the order of the next pass; see `Declarations.draw_list`."""
        drawn: UrlList | None = declared(self.datapipe).draw_list()
        if drawn is not None and self._enabled:
            self.reset()  # takes the seed, as a pass does
            return drawn.in_order(self._permute(drawn.order))
        return drawn

    def _permute(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        # NumPy guarantees the sequence of this generator, and draws a million numbers in the time of 10,000 above.
        draw = np.random.RandomState(self._rng.getrandbits(32))
        return draw.permutation(numbers) if self.lanes == 1 else numbers[_permute_lanes(len(numbers), self.lanes, draw)]

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.lanes  # type: ignore[no-untyped-call]  # torch's

    def __setstate__(self, state: Any) -> None:
        own, lanes = state
        super().__setstate__(own)  # type: ignore[no-untyped-call]  # torch's
        if lanes > 1:  # states record attributes
            self.lanes = lanes


def _permute_lanes(count: int, lanes: int, draw: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Return a permutation that moves numbers only by multiples of ``lanes``."""
    keys = draw.random_sample((-(-count // lanes), lanes))
    keys.ravel()[count:] = 1  # more than all others
    order: npt.NDArray[np.int64] = keys.argsort(axis=0, kind="stable") * lanes + np.arange(lanes)
    return order.ravel()[:count]


class ListingStage(EngineStage[T_co]):
    """Base class of stages that list shards."""

    lists_shards = True

    def shuffle(self, buffer_size: int | None = None, *, lanes: int = 1, unbatch_level: int = 0) -> Shuffler[T_co]:
        """Shuffle the whole list, however long it is.

        Args:
            buffer_size: the number of shards to choose from, as in torch's ``.shuffle()``; by default, all.
            lanes: move shards only by multiples of this number of places. If the number of ranks divides it,
                ``.sharding_filter()`` gives each shard to the same rank in all epochs, so that its copy in the cache of
                the host is used again. Choose a number with many divisors that the number of ranks will never exceed,
                such as 64, 512 or 4,096; each lane needs several shards to be shuffled.
            unbatch_level: as in torch's ``.shuffle()``.

        Raises:
            ValueError: ``buffer_size`` or ``lanes`` is not positive, both are given, there are fewer shards than lanes,
                or the shards change from epoch to epoch.

        Examples:
            >>> urls = list(ShardList("{0..8}.tar").shuffle(lanes=3))
            >>> [int(url[0]) % 3 for url in urls]
            [0, 1, 2, 0, 1, 2, 0, 1, 2]
        """
        lanes = check_integer("lanes", lanes, 1)
        if lanes > 1 and (buffer_size is not None or lanes > len(self.known_list())):
            raise ValueError(
                f"shuffle(lanes={lanes}) divides a whole list that is the same in each epoch, but {name_of(self)} has "
                f"{len(self.known_list())} such shards, with buffer_size={buffer_size}. Choose fewer lanes and no "
                "buffer_size"
            )
        if buffer_size is None:
            shuffler = ShufflerIterDataPipe(self, unbatch_level=unbatch_level)
            if lanes > 1:
                shuffler.lanes = lanes
            return shuffler
        buffer_size = check_integer("buffer_size", buffer_size, 1)
        return Shuffler(self, buffer_size=buffer_size, unbatch_level=unbatch_level)


def shuffle_whole_lists(source: IterDataPipe[Any]) -> None:
    """Make each torch ``.shuffle()`` with the default buffer shuffle the whole list of shards, if the list ends.

    Args:
        source: yields URLs of shards.
    """
    for stage in upstream(source):
        # A source of shards creates torch's stage only if this size was passed explicitly.
        is_default = declared(stage).is_default_shuffle and not declared(stage.datapipe).lists_shards
        if is_default and _ends(stage.datapipe):
            stage.__class__ = ShufflerIterDataPipe  # in place, because the program may hold references to it


def _ends(pipe: Any) -> bool:
    """Whether a stage is known to yield a finite number of items."""
    if not declared(pipe).declares_length:  # the stream may be endless
        with suppress(Exception):  # of a user's stage
            len(pipe)
            return True
    sources = list(sources_of(pipe))
    is_known = declared(pipe).is_transparent or library_of(type(pipe)) in ("torch", "torchdata")
    return is_known and declared(pipe).restarts_once and bool(sources) and all(map(_ends, sources))


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

    ignored_arguments = frozenset({"storage_options", "allow_local_files", "rewrite"})

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
        """Return a long list in its own order; see `Declarations.draw_list`."""
        return self._urls.in_order(np.arange(len(self), dtype=np.int32)) if len(self) > TORCH_BUFFER_SIZE else None

    def __iter__(self) -> Iterator[str]:
        yield from self._urls.urls

    def __len__(self) -> int:
        return len(self._urls.urls)


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

    ignored_arguments = frozenset({"storage_options", "allow_local_files"})

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

    @property
    def repeats_shards(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether a shard may occur more than once in an epoch."""
        return any(each.with_replacement for each in self._mixture.collections)

    def __iter__(self) -> Iterator[str]:
        yield from self._mixture.draw(self._rng)

    def __len__(self) -> int:
        return len(self._mixture)
