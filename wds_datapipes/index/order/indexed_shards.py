"""Shards of an indexed dataset: which samples they have, with what they are joined, and in which order they come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from wds_datapipes.errors import EmptySourceError, plural
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.format.index_copies import DatasetIndexes
from wds_datapipes.index.format.index_file import index_urls
from wds_datapipes.index.format.options import AccessOptions, EpochOptions, Lengths, Pack
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.order.exclusions import Exclusions
from wds_datapipes.index.order.join import JoinedShards
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.mixed_order import MixedOrder, numbers_of_shards
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.rows.row_columns import RowColumns, Samples, measure_rows
from wds_datapipes.index.order.rows.row_plan import RowPlan, window_of
from wds_datapipes.index.order.sample_order import (
    Chunk,
    EpochOrder,
    LaneOrder,
    LengthOrder,
    Order,
    SampleOrder,
    check_lengths,
)
from wds_datapipes.index.order.select import Select, Selection, by_dataset, values_of
from wds_datapipes.index.order.timeline import RunTimeline
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.fields import Lacking


class IndexedShards:
    """The shards of one or several datasets and their samples.

    Args:
        datasets: for each dataset, the URL and the number of samples of each shard. A single dataset has the name
            ``""``.
        select: which samples; by default all. With several datasets, a function, or a mapping from names of datasets.
        join: other datasets whose fields are added to the samples with the same keys, and what to do with samples
            that have no counterpart there.
        lengths: the length of each selected sample, or a function that returns those of all samples of a shard.
        pack: the columns from which rows are planned, if they are.
        exclude: the samples that an epoch replaces with others; see `Exclusions`.
        fields: the fields to read; by default all.
        access: where the indexes are, and how shards are opened.

    Attributes:
        exclusions: the samples that an epoch replaces with others.
        urls: the URL of each shard.
        sizes: the number of selected samples in each shard.
        all_sizes: the number of samples in each.
        all_starts: the number of the first sample of each.
        shards_of: the shards of each dataset.
        lengths: the length of each selected sample, in the order of the shards; None if unknown.
        columns: the columns from which rows are planned; None if they are not.
        joins: the joined datasets.
        access: how shards are opened.
        fields: the fields to read; None for all.
        dataset_names: the name of the dataset of each shard; None for a single dataset.

    Raises:
        EmptySourceError: there are no samples, or none is selected.
        MisalignedShardsError: a sample has no counterpart, and ``missing`` is ``"raise"``.
        DuplicateKeyError: a joined dataset has two samples with the same key.
        ValueError: two shards have the same index.
    """

    def __init__(
        self,
        datasets: Mapping[str, list[tuple[str, int]]],
        *,
        select: Select | Mapping[str, Select] | None = None,
        join: Sequence[tuple[IndexedShards, Lacking]] = (),
        lengths: Lengths | None = None,
        pack: Pack | None = None,
        exclude: Any = None,
        fields: Collection[str] | None = None,
        access: AccessOptions = AccessOptions(),  # noqa: B008  immutable
    ) -> None:
        self.access, self.fields = access, fields
        self.exclusions = Exclusions.of(exclude, [*datasets], access.storage_options)
        self.shards_of: dict[str, slice] = {}
        every = list[tuple[str, int]]()
        for name, shards in datasets.items():
            self.shards_of[name] = slice(len(every), len(every) + len(shards))
            every += shards
        self.urls = [url for url, _ in every]
        self.dataset_names = None if "" in datasets else [name for name, shards in datasets.items() for _ in shards]
        self.all_sizes = self.sizes = np.array([size for _, size in every], np.int64)
        self.all_starts = np.cumsum(self.all_sizes) - self.all_sizes
        if not self.all_sizes.any():
            raise EmptySourceError(f"There are no samples in {plural(len(every), 'shard')}. Check their pattern")
        index_urls({*self.urls, *chain(*(other.urls for other, _ in join))}, access.index_dir)
        self._indexes = DatasetIndexes(self.urls, self.all_sizes, access)
        self.joins = [JoinedShards(self, other) for other, _ in join]
        self._selection: Selection | None = None
        missing = [lacking for _, lacking in join]
        self._select(select, missing)
        self._ends = np.cumsum(self.sizes)
        for joined, lacking in zip(self.joins, missing, strict=True):
            if lacking == "raise":
                joined.check_complete(self._selected(), self.read_index)
        self.lengths = None if lengths is None else self._measure(lengths)
        self.columns: RowColumns | None = None
        if pack is not None:
            samples = Samples(*self._selected(), self.all_starts, self.read_index, self._key_of)
            self.columns = measure_rows(pack, samples, self.all_sizes)

    def read_index(self, shard: int) -> ShardIndex:
        """Read the index of a shard.

        Raises:
            ChangedShardError: its number of samples differs from when the dataset was opened.
            SidecarError: it is missing or damaged, or its shard is compressed.
        """
        return self._indexes.read(shard)

    def _select(self, select: Select | Mapping[str, Select] | None, missing: Sequence[Lacking]) -> None:
        """Restrict the datasets to the selected samples with all required counterparts."""
        masks = [join.are_found for join, lacking in zip(self.joins, missing, strict=True) if lacking == "skip"]
        among = np.logical_and.reduce(masks) if masks else None
        selects = by_dataset("select", select, self.shards_of)
        if isinstance(select, Mapping):
            select = self._select_by_name(selects)
        if select is None and among is None:
            return
        chosen = slice(None) if select is None else select
        self._selection = Selection(chosen, self.all_sizes, read_index=self.read_index, among=among)
        self.sizes = self._selection.sizes
        if not self.sizes.any():
            what = "select chooses none" if among is None else "select and join leave none"
            raise EmptySourceError(f"{what} of the {plural(int(self.all_sizes.sum()), 'sample')}")

    def _select_by_name(self, select: Mapping[str, Select]) -> Numbers:
        """Return the numbers of the samples selected from each dataset, by default all."""
        numbers = [np.empty(0, np.int64)]
        for name, part in self.shards_of.items():
            read = partial(lambda first, shard: self.read_index(first + shard), part.start)
            own = Selection(select.get(name, slice(None)), self.all_sizes[part], read_index=read)
            numbers.append(own.numbers + int(self.all_sizes[: part.start].sum()))
        return np.concatenate(numbers)

    def _measure(self, lengths: Lengths) -> Numbers:
        """Return the length of each selected sample."""
        if not callable(lengths):
            return check_lengths(lengths, len(self), "the dataset")
        parts = [
            check_lengths(values_of("bucket_by", lengths, self.read_index(shard)), size, redact(self.urls[shard]))
            for shard, size in enumerate(self.all_sizes.tolist())
        ]
        shards, numbers = self._selected()
        found: Numbers = np.concatenate(parts)[self.all_starts[shards] + numbers]
        return found

    def _key_of(self, chosen: int) -> str:
        """Return the key of a selected sample by its number."""
        return self.keys(*self.find(self.locate(np.array([chosen]))))[0]

    def _selected(self) -> tuple[Numbers, Numbers]:
        """Return the shards of all selected samples, and the numbers of the samples in these shards."""
        shards = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return self.find((shards, np.arange(len(self)) - self.starts[shards]))

    @property
    def most_open(self) -> int:
        """The maximum number of shards of a dataset that a process keeps open."""
        return self.access.open_shards

    @property
    def starts(self) -> Numbers:
        """The number of the first selected sample of each shard."""
        return self._ends - self.sizes

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1])

    def locate(self, chosen: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shards of selected samples by their numbers, and their positions among those of the shard."""
        shards = np.searchsorted(self._ends, chosen, "right")
        return shards, chosen - self.starts[shards]

    def find(self, chunk: Chunk) -> Chunk:
        """Convert positions among the selected samples of shards to numbers of samples in these shards."""
        shards, positions = chunk
        return shards, positions if self._selection is None else self._selection.find(shards, positions)

    def excluding(self, exclusions: Exclusions) -> IndexedShards:
        """Return these shards with different exclusions."""
        shards = copy(self)
        shards.exclusions = exclusions
        return shards

    def order_of(
        self, timeline: RunTimeline, epoch: int, order: Order, options: EpochOptions, *, seed: int, run: int
    ) -> LaneOrder:
        """Return the order of an epoch of a run.

        Args:
            timeline: the phases of the run.
            epoch: the number of the epoch.
            order: the order of samples within each dataset.
            options: the widths of windows.
            seed: the seed of batches by length and of an epoch that has each sample once.
            run: the seed of a run that draws from the datasets.
        """
        first, window = timeline.phase_of(epoch), options.window_shards
        lanes = Lanes(first.count, first.batch, timeline.lanes)
        found = self._samples_of(timeline, epoch, order, window, lanes, seed=seed, run=run)
        if self.lengths is not None:
            shuffles, window = order != "sequential", options.bucket_window
            found = LengthOrder(
                found, self.lengths, self.starts, lanes=lanes, window=window, seed=seed if shuffles else None
            )
        later = [each for each in timeline.phases_within(epoch) if each.batch != first.batch]
        rests = [(each.start, Lanes(first.count - each.start, each.batch, timeline.lanes)) for each in later]
        return LaneOrder(found, lanes, rests)

    def _samples_of(
        self, timeline: RunTimeline, epoch: int, order: Order, window: int, lanes: Lanes, *, seed: int, run: int
    ) -> SampleOrder:
        """Return the order of an epoch whose lanes follow one another."""
        first = timeline.phase_of(epoch)
        if first.points is not None:
            return MixedOrder(
                timeline, epoch, self.sizes, self.shards_of, order, seed=run, lanes=lanes, window_shards=window
            )
        own = numbers_of_shards(first.drawn_datasets(""), self.shards_of)
        return EpochOrder(self.sizes[own], order, seed=seed, window_shards=window, lanes=timeline.lanes, numbers=own)

    def rows_of(
        self, timeline: RunTimeline, epoch: int, order: Order, options: EpochOptions, *, seed: int, run: int
    ) -> RowPlan:
        """Return the plan of the rows of an epoch of a run; arguments as for `order_of`."""
        if self.columns is None or options.pack is None:
            raise ValueError("rows are planned only with EpochOptions(pack=)")
        phase = timeline.phase_of(epoch)
        lanes = Lanes(phase.count, phase.batch, timeline.lanes)
        samples = self._samples_of(timeline, epoch, order, options.window_shards, lanes, seed=seed, run=run)
        read = phase.drawn_datasets("")
        count = sum(phase.datasets[name][1] for name in read)
        window = window_of(options.pack, phase.batch, count, self.tokens_in(read, options.pack))
        return RowPlan(
            samples,
            self.starts,
            self.columns,
            options.pack,
            lanes=lanes,
            step=phase.batch,
            window=window,
            seed=seed if order != "sequential" else None,
        )

    def tokens_in(self, shards: Mapping[str, int], pack: Pack) -> int:
        """Return the number of tokens that rows take from the selected samples in the first shards of some datasets."""
        total, limit = 0, pack.row if pack.long_samples == "truncate" else np.iinfo(np.int32).max
        for name, count in shards.items():
            first = self.shards_of[name].start
            begin, end = int(self.starts[first]) if count else 0, int(self._ends[first + count - 1]) if count else 0
            if self.columns is not None:
                total += int(np.minimum(self.columns.lengths[begin:end], limit).sum(dtype=np.int64))
        return total

    def datasets_of(self, shards: Numbers) -> Numbers:
        """Return the numbers of the datasets of shards."""
        return np.searchsorted([part.stop for part in self.shards_of.values()], shards, "right")

    def keys(self, shards: Numbers, numbers: Numbers) -> list[str]:
        """Return the keys of samples; the index of each of their shards is read once."""
        keys = np.empty(len(shards), object)
        for shard in {*shards.tolist()}:
            keys[shards == shard] = self.read_index(shard).keys_of(numbers[shards == shard])
        return [*map(str, keys)]

    def names(self, shards: Numbers) -> list[str]:
        """Return the names of the datasets of shards."""
        return (
            [""] * len(shards)
            if self.dataset_names is None
            else [self.dataset_names[shard] for shard in shards.tolist()]
        )

    def digest_of(self, name: str, shards: int) -> str:
        """Return a digest of the first shards of a dataset, the samples selected from them, and their columns."""
        part = self.shards_of[name]
        part = slice(part.start, part.start + shards)
        details = [join.other.fingerprint() for join in self.joins]
        details += self._digests_of_columns(*np.append(0, self._ends)[[part.start, part.stop]].tolist())
        if self._selection is not None and shards:
            details.append(self._selection.fingerprint_of(part))
        return fingerprint([self.urls[part], self.sizes[part].tobytes(), details])[:12]

    def _digests_of_columns(self, first: int, end: int) -> list[str]:
        """Return digests of the values of some selected samples on which batches or rows depend."""
        columns = (self.lengths, *(self.columns or ())[:3])
        return [fingerprint(column[first:end].tobytes()) for column in columns if column is not None]

    def fingerprint(self) -> str:
        """Return the number of shards and samples, the first and last URL, and a digest of all."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text = f"{len(self)} samples in {len(self.urls)} shards from {redact(self.urls[0])} to {redact(self.urls[-1])}"
        details = [] if self._selection is None else [self._selection.fingerprint()]
        details += [
            *(join.other.fingerprint() for join in self.joins),
            *(repr(part) for part in self.shards_of.items() if part[0]),
            *self._digests_of_columns(0, len(self)),
        ]
        return f"{text} #{fingerprint([self.urls, self.sizes.tobytes(), *details])[:12]}"
