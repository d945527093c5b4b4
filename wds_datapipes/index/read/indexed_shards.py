"""Shards of an indexed dataset: their numbers of samples, and access to samples by number."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cached_property, partial
from itertools import chain, tee
from pathlib import Path
from typing import Any

import numpy as np

from wds_datapipes.counters import Counters
from wds_datapipes.errors import DuplicateKeyError, EmptySourceError, MisalignedShardsError, plural
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.format.index_copies import IndexCopies
from wds_datapipes.index.format.index_file import index_urls
from wds_datapipes.index.format.options import AccessOptions, EpochOptions, Lengths
from wds_datapipes.index.order.exclusions import Exclusions
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.mixed_order import MixedOrder, numbers_of_shards
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phases import PhasePlan
from wds_datapipes.index.order.sample_order import EpochOrder, LaneOrder, LengthOrder, Order, SampleOrder, check_lengths
from wds_datapipes.index.order.select import Select, Selection, by_dataset
from wds_datapipes.index.read.dataset_reader import Chunk, DatasetReader, Item
from wds_datapipes.index.read.join import NAMED, KeyTable
from wds_datapipes.io.openers import redact
from wds_datapipes.samples.fields import Lacking, describe_sample
from wds_datapipes.shard_cache.eviction import Passes
from wds_datapipes.types import Sample


class IndexedShards:
    """The shards of one or several datasets and their numbers of samples; each process has its own readers.

    Args:
        datasets: for each dataset, the URL and the number of samples of each shard. A single dataset has the name
            ``""``.
        select: which samples; by default all. With several datasets, a function, or a mapping from names of datasets.
        join: other datasets whose fields are added to the samples with the same keys, and what to do with samples
            that have no counterpart there.
        lengths: the length of each selected sample, or a function that returns those of all samples of a shard.
        exclude: the samples that an epoch replaces with others; see `Exclusions`.
        fields: the fields to read; by default all.
        access: where the indexes are, and how shards are opened.

    Attributes:
        exclusions: the samples that an epoch replaces with others.
        urls: the URL of each shard.
        sizes: the number of selected samples in each shard.
        all_sizes: the number of samples in each.
        parts: the shards of each dataset.
        lengths: the length of each selected sample, in the order of the shards; None if unknown.

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
        exclude: Any = None,
        fields: Collection[str] | None = None,
        access: AccessOptions = AccessOptions(),  # noqa: B008  immutable
    ) -> None:
        self._access, self._fields, self._indexes = access, fields, IndexCopies(access)
        self.exclusions = Exclusions.of(exclude, [*datasets], access.storage_options)
        self.parts: dict[str, slice] = {}
        every = list[tuple[str, int]]()
        for name, shards in datasets.items():
            self.parts[name] = slice(len(every), len(every) + len(shards))
            every += shards
        self.urls = [url for url, _ in every]
        self._names = None if "" in datasets else [name for name, shards in datasets.items() for _ in shards]
        self.all_sizes = self.sizes = np.array([size for _, size in every], np.int64)
        self._starts = np.cumsum(self.all_sizes) - self.all_sizes
        self._readers: tuple[int, list[DatasetReader]] | None = None
        #: The process and its readers for the next epoch, which the stack closes.
        self._ahead: tuple[int, list[DatasetReader], ExitStack] | None = None
        self._passes = Passes()
        if not self.all_sizes.any():
            raise EmptySourceError(f"There are no samples in {plural(len(every), 'shard')}. Check their pattern")
        index_urls({*self.urls, *chain(*(other.urls for other, _ in join))}, access.index_dir)
        self._others, missing = [other for other, _ in join], [lacking for _, lacking in join]
        self._selection: Selection | None = None
        with self.open_reader() as reader:
            #: For each joined dataset, the numbers of its samples with the keys of all samples, or -1.
            self._joins = [self._join(reader, other) for other in self._others]
            self._select(reader, select, missing)
            self._ends = np.cumsum(self.sizes)
            self._check_joins(reader, missing)
            self.lengths = None if lengths is None else self._measure(reader, lengths)

    def _join(self, reader: DatasetReader, other: IndexedShards) -> Numbers:
        """Find the samples of another dataset that have the same keys."""
        with other.open_reader() as others:
            table = KeyTable(other.urls, map(others.index_of, range(len(other.urls))))
        keys = (reader.index_of(shard).keys for shard in range(len(self.urls)))
        found: Numbers = np.concatenate([np.empty(0, np.int64), *map(table.find, keys)])
        return found

    def _check_joins(self, reader: DatasetReader, missing: Sequence[Lacking]) -> None:
        """Raise an error if a selected sample lacks a required counterpart."""
        for join, other, lacking in zip(self._joins, self._others, missing, strict=True):
            if lacking != "raise":
                continue
            shards, numbers = self._selected()
            is_absent = join[self._starts[shards] + numbers] < 0
            if count := int(is_absent.sum()):
                some = zip(shards[is_absent][:NAMED].tolist(), numbers[is_absent][:NAMED].tolist(), strict=True)
                named = ", ".join(repr(reader.index_of(shard)[number].key) for shard, number in some)
                raise MisalignedShardsError(
                    f"There is no counterpart of {plural(count, 'sample')} in {plural(len(other.urls), 'shard')} from "
                    f"{redact(other.urls[0])}: {named}{', ...' if count > NAMED else ''}. Pass Join(shards, "
                    'missing="skip") to leave out such samples, or missing="keep" to read them without those fields'
                )

    def _select(
        self, reader: DatasetReader, select: Select | Mapping[str, Select] | None, missing: Sequence[Lacking]
    ) -> None:
        """Restrict the datasets to the selected samples with all required counterparts."""
        masks = [join >= 0 for join, lacking in zip(self._joins, missing, strict=True) if lacking == "skip"]
        among = np.logical_and.reduce(masks) if masks else None
        selects = by_dataset("select", select, self.parts)
        if isinstance(select, Mapping):
            select = self._select_by_name(reader, selects)
        if select is None and among is None:
            return
        chosen = slice(None) if select is None else select
        self._selection = Selection(chosen, self.all_sizes, read_index=reader.index_of, among=among)
        self.sizes = self._selection.sizes
        if not self.sizes.any():
            what = "select chooses none" if among is None else "select and join leave none"
            raise EmptySourceError(f"{what} of the {plural(int(self.all_sizes.sum()), 'sample')}")

    def _select_by_name(self, reader: DatasetReader, select: Mapping[str, Select]) -> Numbers:
        """Return the numbers of the samples selected from each dataset, by default all."""
        numbers = [np.empty(0, np.int64)]
        for name, part in self.parts.items():
            read = partial(lambda first, shard: reader.index_of(first + shard), part.start)
            own = Selection(select.get(name, slice(None)), self.all_sizes[part], read_index=read)
            numbers.append(own.numbers + int(self.all_sizes[: part.start].sum()))
        return np.concatenate(numbers)

    def _measure(self, reader: DatasetReader, lengths: Lengths) -> Numbers:
        """Return the length of each selected sample."""
        if not callable(lengths):
            return check_lengths(lengths, len(self), "the dataset")
        parts = [
            check_lengths(lengths(reader.index_of(shard)), size, redact(self.urls[shard]))
            for shard, size in enumerate(self.all_sizes.tolist())
        ]
        shards, numbers = self._selected()
        found: Numbers = np.concatenate(parts)[self._starts[shards] + numbers]
        return found

    def _selected(self) -> tuple[Numbers, Numbers]:
        """Return the shards of all selected samples, and the numbers of the samples in these shards."""
        shards = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return self.find((shards, np.arange(len(self)) - self.starts[shards]))

    @property
    def most_open(self) -> int:
        """The maximum number of shards of a dataset that a process keeps open."""
        return self._access.open_shards

    @property
    def starts(self) -> Numbers:
        """The number of the first selected sample of each shard."""
        return self._ends - self.sizes

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": None, "_ahead": None}

    @contextmanager
    def open(self, counters: Counters) -> Iterator[list[DatasetReader]]:
        """Open readers of all shards and joined shards for an epoch."""
        if self._access.cache_dir is not None:
            self._passes.begin(Path(self._access.cache_dir))
        (process, readers, stack), self._ahead = self._ahead or (0, [], ExitStack()), None
        if process != os.getpid() or any(reader.is_closed for reader in readers):
            stack.close()
            readers = self._open_all(stack, counters)
        with stack:
            for reader in readers:
                reader.begin(counters)
            yield readers

    def open_ahead(self, readers: Sequence[DatasetReader], chunk: Chunk) -> None:
        """Begin to open the shards of the first samples of the next epoch, for which `open` is called later.

        Args:
            readers: the result of `open`.
            chunk: the shards of the samples, and their positions among the selected samples of the shards.
        """
        own = self.find(chunk)
        others = zip(self._joins, self._others, strict=True)
        chunks = [own, *(self._counterparts(*other, own) for other in others)]
        stack = ExitStack()
        self._ahead = os.getpid(), self._open_all(stack, readers[0].counters), stack
        weakref.finalize(self, stack.close)
        for each, reader, following, (found, _) in zip(
            (self, *self._others), readers, self._ahead[1], chunks, strict=True
        ):
            shards = [*dict.fromkeys(found[found >= 0].tolist())][: self.most_open]
            self._passes.expect([] if reader.cache is None else map(reader.cache.entry, [each.urls[n] for n in shards]))
            reader.open_next(following, shards)

    def _open_all(self, stack: ExitStack, counters: Counters) -> list[DatasetReader]:
        options = {"priority": self._passes.priority, "counters": counters}
        return [stack.enter_context(each.open_reader(**options)) for each in (self, *self._others)]

    def open_reader(self, **options: Any) -> DatasetReader:
        """Open a reader of these shards and their indexes, without joined datasets."""
        options |= {"fields": self._fields, "names": self._names, "indexes": self._indexes}
        return DatasetReader(self.urls, self.all_sizes, self._access, **options)

    def stream(self, readers: Sequence[DatasetReader], chunks: Iterable[Chunk]) -> Iterator[Item]:
        """Yield samples with the fields of all joined datasets, with an error in place of each unreadable one.

        A sample without a counterpart in another dataset lacks that dataset's fields. If two datasets have the same
        field, the error is a `DuplicateKeyError`.

        Args:
            readers: the result of `open`.
            chunks: the shards of some samples, or -1, and the samples' numbers in these shards.
        """
        own, *copies = tee(chunks, len(readers))
        samples = readers[0].stream(own)
        if not copies:
            return samples
        others = [
            reader.stream(map(partial(self._counterparts, join, other), some))
            for reader, join, other, some in zip(readers[1:], self._joins, self._others, copies, strict=True)
        ]
        return map(join_fields, samples, zip(*others, strict=True))

    def _counterparts(self, join: Numbers, other: IndexedShards, chunk: Chunk) -> Chunk:
        """Return the positions of a joined dataset's samples with the keys of some samples; shard -1 means none."""
        shards, numbers = chunk
        wanted = np.where(shards < 0, -1, join[np.where(shards < 0, 0, self._starts[shards] + numbers)])
        found = np.searchsorted(other._ends, wanted, "right")
        return np.where(wanted < 0, -1, found), wanted - other._starts[found]

    def find(self, chunk: Chunk) -> Chunk:
        """Convert positions among the selected samples of shards to numbers of samples in these shards."""
        shards, places = chunk
        return shards, places if self._selection is None else self._selection.find(shards, places)

    def excluding(self, exclusions: Exclusions) -> IndexedShards:
        """Return these shards with different exclusions."""
        shards = copy(self)
        shards.exclusions = exclusions
        return shards

    def order_of(
        self, plan: PhasePlan, epoch: int, order: Order, options: EpochOptions, *, seed: int, run: int
    ) -> LaneOrder:
        """Return the order of an epoch of a run.

        Args:
            plan: the phases of the run.
            epoch: the number of the epoch.
            order: the order of samples within each dataset.
            options: the widths of windows.
            seed: the seed of batches by length and of an epoch that has each sample once.
            run: the seed of a run that draws from the datasets.
        """
        first, window = plan.phase_of(epoch), options.window_shards
        lanes = Lanes(first.count, first.batch, plan.lanes)
        found: SampleOrder
        if first.points is None:
            own = numbers_of_shards(first.drawn_datasets(""), self.parts)
            found = EpochOrder(self.sizes[own], order, seed=seed, window_shards=window, lanes=plan.lanes, numbers=own)
        else:
            found = MixedOrder(plan, epoch, self.sizes, self.parts, order, seed=run, lanes=lanes, window_shards=window)
        if self.lengths is not None:
            shuffles, window = order != "sequential", options.bucket_window
            found = LengthOrder(
                found, self.lengths, self.starts, lanes=lanes, window=window, seed=seed if shuffles else None
            )
        later = [each for each in plan.phases_within(epoch) if each.batch != first.batch]
        rests = [(each.start, Lanes(first.count - each.start, each.batch, plan.lanes)) for each in later]
        return LaneOrder(found, lanes, rests)

    def datasets_of(self, shards: Numbers) -> Numbers:
        """Return the numbers of the datasets of shards."""
        return np.searchsorted([part.stop for part in self.parts.values()], shards, "right")

    def keys(self, shards: Numbers, numbers: Numbers) -> list[str]:
        """Return the keys of samples; the index of each of their shards is read once."""
        keys = np.empty(len(shards), object)
        with self.open_reader() as reader:
            for shard in {*shards.tolist()}:
                keys[shards == shard] = reader.index_of(shard).keys_of(numbers[shards == shard])
        return [*map(str, keys)]

    def names(self, shards: Numbers) -> list[str]:
        """Return the names of the datasets of shards."""
        return [""] * len(shards) if self._names is None else [self._names[shard] for shard in shards.tolist()]

    def samples(self, numbers: list[int]) -> list[Sample]:
        """Return samples by their numbers in the order of the shards."""
        count = len(self)
        for number in numbers:
            if not hasattr(number, "__index__"):  # a slice has none
                raise TypeError(
                    f"The number of a sample must be an integer, not {number!r:.100}. For several samples, use "
                    "torch.utils.data.Subset(samples.map_style(), numbers)"
                )
            if not -count <= number < count:
                raise IndexError(f"The dataset has {plural(count, 'sample')}, so there is no sample {number}")
        wanted = np.array([number % count for number in numbers])
        shards = np.searchsorted(self._ends, wanted, "right")
        if self._readers is None or self._readers[0] != os.getpid():  # a forked process needs its own connections
            self._readers = os.getpid(), [each.open_reader() for each in (self, *self._others)]
        samples = []
        for item in self.stream(self._readers[1], [self.find((shards, wanted - self.starts[shards]))]):
            if isinstance(item, Exception):
                raise item
            samples.append(item)
        return [sample for sample in samples if sample is not None]

    def digest_of(self, name: str, shards: int) -> str:
        """Return a digest of the first shards of a dataset and of the samples selected from them."""
        part = self.parts[name]
        part = slice(part.start, part.start + shards)
        details = [each.fingerprint() for each in self._others]
        if self._selection is not None and shards:
            details.append(self._selection.fingerprint_of(part))
        return fingerprint([self.urls[part], self.sizes[part].tobytes(), details])[:12]

    def fingerprint(self) -> str:
        """Return the number of shards and samples, the first and last URL, and a digest of all."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text = f"{len(self)} samples in {len(self.urls)} shards from {redact(self.urls[0])} to {redact(self.urls[-1])}"
        details = [] if self._selection is None else [self._selection.fingerprint()]
        details += [
            *(other.fingerprint() for other in self._others),
            *(repr(part) for part in self.parts.items() if part[0]),
            *([] if self.lengths is None else [fingerprint(self.lengths.tobytes())]),
        ]
        return f"{text} #{fingerprint([self.urls, self.sizes.tobytes(), *details])[:12]}"


class FieldConflictError(DuplicateKeyError):
    """Two joined datasets have the same field. No error policy skips this error, because it affects all samples."""

    concerns_all = True


def join_fields(sample: Item, counterparts: Iterable[Item]) -> Item:
    """Return a sample with the fields of its counterparts in other datasets, or the first error."""
    if not isinstance(sample, dict):
        return sample
    for other in counterparts:
        if other is None:
            continue
        if not isinstance(other, dict):
            return other
        if other["__key__"] != sample["__key__"]:
            return MisalignedShardsError(
                f"{describe_sample(sample)} was joined with {describe_sample(other)}, but their keys differ. An index "
                "was replaced after the dataset was opened: open the dataset again"
            )
        added = {name: value for name, value in other.items() if name[:2] != "__"}
        if repeated := added.keys() & sample.keys():
            return FieldConflictError(
                f"join cannot add the field {min(repeated)!r} from {redact(str(other['__url__']))}, because "
                f"{describe_sample(sample)} already has it. Choose other fields with fields="
            )
        sample |= added
    return sample
