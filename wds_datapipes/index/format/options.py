"""Options of indexes: how shards are indexed, how they are read by their indexes, and how an epoch is ordered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import check_choice, check_integer, check_optional_integer, checks_calls
from wds_datapipes.fingerprint import format_value, is_default
from wds_datapipes.index.format.shard_facts import Rules, rule_name
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.samples.fields import Lacking
from wds_datapipes.samples.grouping import OnDuplicate
from wds_datapipes.samples.keys import KeyRule, check_key_rule, first_dot
from wds_datapipes.samples.packing import LongSamples
from wds_datapipes.tar.headers import EndMarker

Lengths: TypeAlias = npt.ArrayLike | Callable[[ShardIndex], npt.ArrayLike]
"""The length of each sample, or a function that returns those of a shard from its index."""
Column: TypeAlias = "str | Lengths"
"""A value of each sample: the name of a column of the index, an array, or a function of the index of a shard."""
Balance: TypeAlias = Literal["mixed", "similar"]
"""Which rows share a step: rows of all costs, or rows of similar cost."""
Exclude: TypeAlias = "str | os.PathLike[str] | Callable[[ShardIndex], npt.ArrayLike] | Iterable[Any]"
"""A file of keys, a function that returns numbers or a mask for the index of a shard, or a list of both."""

#: The default of ``read_ahead``: with less, shuffled orders from a store are slower than a stream.
HELD_BYTES = 64 << 20


@checks_calls
@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """Options for indexing shards, shared by `build_index`, `build_indexes` and the index that a `TarWriter` writes.

    Args:
        key_rule: splits member names.
        lowercase: convert field names to lower case.
        on_duplicate: if several members are the same field of a sample: ``"raise"``, or use the ``"first"`` or the
            ``"last"``.
        digest: compute the SHA-256 of the shards too, which reads all of them.
        ignore_zeros: continue after an end marker, to read concatenated archives.
        end_marker: ``"optional"`` accepts archives without the two blocks of zeros at their end, and ``"final"``
            ignores data that follow them.
        limits: the limits for shards, see `ReadLimits`.

    Raises:
        TypeError: ``key_rule`` is not a function.
        ValueError: ``on_duplicate`` or ``end_marker`` has another value.

    Examples:
        >>> from wds_datapipes import last_dot
        >>> from wds_datapipes.index import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> build_index(build_shard("a.tar", [{"__key__": "1.5", "txt": "one"}]), IndexOptions(key_rule=last_dot)).keys
        ['1.5']
    """

    key_rule: KeyRule = first_dot
    lowercase: bool = True
    on_duplicate: OnDuplicate = "raise"
    digest: bool = False
    ignore_zeros: bool = False
    end_marker: EndMarker = "required"
    limits: ReadLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        check_key_rule(self.key_rule)
        check_choice("on_duplicate", self.on_duplicate, OnDuplicate)
        check_choice("end_marker", self.end_marker, EndMarker)

    @property
    def rules(self) -> Rules:
        """The rules, as an index records them."""
        return Rules(rule_name(self.key_rule), self.lowercase, self.on_duplicate)


@checks_calls
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Options of `IndexedSamples` for finding indexes and opening shards.

    Args:
        index_dir: the directory of the indexes; by default, they are next to the shards. A host downloads indexes from
            a store once, into ``cache_dir`` or a folder of this user for temporary files, and its processes map them;
            indexes that no process uses for a day are removed.
        indexes: what to do about missing and stale indexes when the dataset is opened: ``"local"`` builds them on the
            disks of this host, and is an error if they would have to be written to a store; ``"build"`` builds them
            there, too; ``"require"`` is an error. Those of a manifest must exist. Of several processes, one builds,
            and the others wait for it; see `build_indexes`.
        indexing: how they are built; existing indexes must have the same rules. By default, they are built by the rules
            of the dataset's other indexes.
        open_shards: the maximum number of shards that a process keeps open.
        read_ahead: about how many bytes of samples a process holds, 64 MiB by default: of remote shards, those that
            threads request before they are due; of local ones, half as many, of small fields that are read together.
            Samples of a window that are near each other are read at once, so a larger number needs fewer requests.
        cache_dir: a folder for copies of remote shards, as for ``.cache_wds_shards()``: each shard is downloaded as a
            whole before its first sample is read. A loader with a seed knows the next epoch and downloads its first
            shards before this epoch ends. A copy whose version is not that of the index is downloaded again; if the
            store has another version, this is a `ChangedShardError`. By default, samples are requested from the store.
        cache_bytes: the maximum size of all copies in ``cache_dir``; by default, only the disk limits it. Copies that
            this epoch has already used are evicted first, and a process releases those that it no longer reads. If a
            shard does not fit because all others are in use, its samples are requested from the store, with a warning.
        storage_options: options for fsspec, such as credentials; and ``timeout_s``, a number or `Timeouts`, and
            ``retries``, for all that is read from stores.
        limits: limits on the size of members and others, for reading and for the indexes that are built; see
            `ReadLimits`.

    Raises:
        TypeError, ValueError: an argument is invalid, ``indexing`` has limits of its own, or ``cache_bytes`` is given
            without ``cache_dir``.
    """

    index_dir: str | os.PathLike[str] | None = None
    indexes: Literal["local", "build", "require"] = "local"
    indexing: IndexOptions | None = None
    open_shards: int = 128
    read_ahead: int = HELD_BYTES
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    limits: ReadLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        check_choice("indexes", self.indexes, Literal["local", "build", "require"])
        check_integer("open_shards", self.open_shards, 1)
        check_integer("read_ahead", self.read_ahead, 1)
        check_optional_integer("cache_bytes", self.cache_bytes, 1)
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | os.PathLike):
            raise TypeError(f"cache_dir must be the path of a folder, not {self.cache_dir!r}")
        if self.indexing is not None and self.indexing.limits != DEFAULT_LIMITS:
            raise ValueError("limits= of AccessOptions also apply to the indexes that are built: pass them there")
        if self.cache_bytes is not None and self.cache_dir is None:
            raise ValueError("cache_bytes limits the copies in cache_dir, so it requires cache_dir")


@checks_calls
@hides_credentials
@dataclass(frozen=True)
class Join:
    """Another dataset, whose fields `IndexedSamples` adds to the samples with the same keys.

    Args:
        shards: a `Manifest`, a pattern or an iterable of URLs. The order of its shards and samples does not matter;
            those without a counterpart are not read.
        missing: what to do with samples that have no counterpart in it: ``"raise"`` an error, ``"skip"`` them, or
            ``"keep"`` them without its fields.

    Raises:
        ValueError: ``missing`` has another value.
    """

    shards: Any
    missing: Lacking = "raise"

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, Lacking)


@checks_calls
@dataclass(frozen=True, kw_only=True)
class Pack:
    """How `IndexedSamples` plans an epoch of packed rows, which ``.pack_rows()`` joins.

    Rows are planned from the index before any sample is read, the same on every rank: ``global_batch_size`` then counts
    rows, each rank has equally many in every step, and the rows of a step are the same on any number of ranks and
    workers. A *window* of samples, in the order of the epoch, is packed at once by best-fit decreasing, so rows need
    hardly any padding. Within a step, rows are placed so that the ranks have about the same cost. All arithmetic is on
    integers.

    ``length``, ``cost`` and the first part of ``second`` are columns: the name of a column of the index, as computed by
    ``build_indexes(columns=)``; an array in the order of the shards; or a function that returns the values for the
    `ShardIndex` of a shard. They take 20 bytes per sample at most.

    Args:
        length: the number of tokens of each sample, an integer.
        row: the maximum number of tokens in a row, below 2**31.
        cost: what each sample costs a rank, such as ``tokens + tokens**2 / 8192``; by default, its length. Numbers that
            are not integers are rounded to multiples of 2**-30 of the power of two above the largest.
        second: another bound of a row, such as ``("images", 16)``: a column, and its maximum sum in a row, below 2**31.
            Each part of a split sample counts the whole value.
        window: the number of samples that are packed at once; by default, those of about 16 steps, but at most 32,768.
            A larger window needs less padding and memory for its plan, which takes about 1 µs per sample.
        balance: which rows share a step. ``"mixed"`` gives each step rows of all costs, so all steps are alike.
            ``"similar"`` gives it rows of similar cost, so ranks have equal work even if each has a single row in a
            step, but some steps consist of long samples and others of short ones. The order of these steps is shuffled
            within a window.
        long_samples: what to do with samples longer than a row: ``"raise"`` an error when the dataset is opened,
            ``"truncate"`` them, or ``"split"`` them into several sequences, all but the last of which fill a row.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> from wds_datapipes import IndexedSamples
        >>> from wds_datapipes.index import build_indexes
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "txt": "a" * n} for n in (3, 4, 2, 1)])
        >>> _ = build_indexes(url, columns=lambda sample: {"length": len(sample["txt"])})
        >>> pack = Pack(length="length", row=5)
        >>> samples = IndexedSamples(url, order="sequential", global_batch_size=2, epoch=EpochOptions(pack=pack))
        >>> letters = samples.map_dict(txt=lambda text: list(text))
        >>> [(row["__key__"], row["segment_ids"].tolist()) for row in letters.pack_rows("txt")]
        [(['4', '1'], [1, 1, 1, 1, 2]), (['3', '2'], [1, 1, 1, 2, 2])]
    """

    length: Column
    row: int
    cost: Column | None = None
    second: tuple[Column, int] | None = None
    window: int | None = None
    balance: Balance = "mixed"
    long_samples: LongSamples = "raise"

    def __post_init__(self) -> None:
        check_integer("row", self.row, 1)
        check_optional_integer("window", self.window, 1)
        check_choice("balance", self.balance, Balance)
        check_choice("long_samples", self.long_samples, LongSamples)
        second: Any = self.second
        if second is not None:
            if not isinstance(second, tuple) or len(second) != 2:
                raise TypeError(f'second must be a column and a limit, such as ("images", 16), not {second!r:.100}')
            check_integer("the limit of second", second[1], 1)
        for name, limit in (("row", self.row), ("the limit of second", second[1] if second else 1)):
            if limit >= 1 << 31:
                raise ValueError(f"{name} must be below 2**31, as lengths are, not {limit}")
        cost, bound = "" if self.cost is None else self.cost, second[0] if second else ""
        for name, column in (("length", self.length), ("cost", cost), ("second", bound)):
            if not (isinstance(column, str | list | tuple | np.ndarray) or callable(column)):
                raise TypeError(f"{name} must be the name of a column, an array or a function, not {column!r:.100}")


@checks_calls
@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """Which samples an epoch of `IndexedSamples` has and how they are combined.

    Args:
        samples: the number of samples in an epoch; by default, as many as the datasets that are read have. The next
            epoch continues where this one ends, and samples repeat after all of them have been read. It is
            rounded down to a multiple of ``lanes``, as is the length of an epoch with weights.
        window_shards: the number of shards that ``order="window"`` shuffles together.
        bucket_by: the length of each sample, so that each global batch has samples of similar length: an array in the
            order of the shards, or a function that returns the lengths for the `ShardIndex` of one shard. Takes 8 bytes
            per sample and requires ``global_batch_size``.
        exclude: samples to leave out without moving others: each is replaced by another sample of the epoch, from its
            lane and dataset, marked by ``__padding__``; with ``remainder="keep"``, by none. A list of keys, or a file
            with a key in each line; or a function that returns numbers or a mask of samples for the `ShardIndex` of one
            shard, and is called when the shard is read; or a list of keys and such functions. With several datasets, a
            function or a mapping from their names. A run may append to the list: a state can be loaded with a longer
            one, and records from where on it applies.
        bucket_window: the number of global batches sorted by length together. Their order is then shuffled again,
            except with ``order="sequential"``. A larger window leaves less padding and mixes samples less. A worker
            computes whole windows of the lanes of its rank, so choose ``lanes`` if there are many ranks.
        pack: how rows of several samples are planned; see `Pack`. Requires ``global_batch_size``, which then counts
            rows, and excludes ``bucket_by``. An excluded or unreadable sample leaves its place in its row empty.

    Raises:
        TypeError, ValueError: a number is not an integer from 1, or both ``bucket_by`` and ``pack`` are given.
    """

    samples: int | None = None
    window_shards: int = 16
    bucket_by: Lengths | None = None
    bucket_window: int = 50
    exclude: Exclude | Mapping[str, Exclude] | None = None
    pack: Pack | None = None

    def __post_init__(self) -> None:
        if self.pack is not None and not isinstance(self.pack, Pack):
            raise TypeError(f'pack must be a Pack, as in Pack(length="tokens", row=8192), not {self.pack!r:.100}')
        if self.pack is not None and self.bucket_by is not None:
            raise ValueError("bucket_by sorts samples by length, which pack does in its own windows: choose one")
        check_optional_integer("samples", self.samples, 1)
        check_integer("window_shards", self.window_shards, 1)
        check_integer("bucket_window", self.bucket_window, 1)

    def shown_options(self) -> str:
        """Return what a state says of rows beside a digest of all options, so that an error shows what has changed."""
        if (pack := self.pack) is None:
            return ""
        values = [(each.name, getattr(pack, each.name), each.default) for each in fields(pack)]
        shown = [f"{name}={format_value(value)}" for name, value, default in values if not is_default(value, default)]
        return f"(pack=Pack({', '.join(shown)}))"
