"""The source that reads samples by index."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_choice, check_fields, check_integer, check_optional_integer
from wds_datapipes.errors import EmptySourceError, plural
from wds_datapipes.index.format.index_lookup import shard_sizes
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import AccessOptions, EpochOptions, Join
from wds_datapipes.index.order.batch_share import WHOLE_EPOCH, BatchShare, Remainder
from wds_datapipes.index.order.exclusions import Exclusions
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.lanes import check_lanes, warn_of_costs
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.sample_order import Order
from wds_datapipes.index.order.select import Select
from wds_datapipes.index.order.substitutes import Substitutes
from wds_datapipes.index.order.weight_schedule import Weights, check_schedule
from wds_datapipes.index.read.dataset_reader import DatasetReader, ProcessReaders
from wds_datapipes.index.read.epoch import read_epoch
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.pipes.foreign_calls import explain_samplers
from wds_datapipes.pipes.groups import Groups
from wds_datapipes.pipes.samples.indexed_dataset import IndexedDataset
from wds_datapipes.pipes.samples.indexed_rows import IndexedRows
from wds_datapipes.pipes.split_advice import warn_of_copies
from wds_datapipes.received_epochs import ReceivedEpochs
from wds_datapipes.samples.fields import PADDING_MARK
from wds_datapipes.shards.held_samples import NONE_AWAITED
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.signatures import spelled_for
from wds_datapipes.types import Sample

Shards: TypeAlias = "Manifest | str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""The shards of a dataset: a manifest, a pattern, or URLs."""


class IndexedSamples(IndexedRows):
    """Read samples by index in one global order, with equal batches on every rank and an exact length.

    The order of an epoch depends only on the sizes of the shards and the epoch's seed, which the loader passes to all
    ranks and workers. With a ``global_batch_size`` of n, global batch t consists of the samples at ``[t * n, (t + 1) *
    n)`` in that order; each rank takes its part of every batch, and its workers take turns. The global batches are
    therefore the same for any number of ranks and workers, and every rank has the same number of them: put ``.batch(n
    // ranks)`` after this stage, with no stage in between that drops samples. The stage splits the data itself, so the
    pipeline has no ``.sharding_filter()``.

    The shards must be uncompressed, and either local or in a store that supports range requests. A bounded number of
    them is open at a time.

    Yields:
        dict[str, bytes]: the samples, as from ``.group_samples()``. With ``remainder="pad"``, each also has the field
        ``__padding__``, a ``bool`` that is true if the sample only pads the last batch.

    Args:
        shards: a `Manifest`, which requires no access to any shard; a pattern or an iterable of URLs, whose indexes are
            read; or a mapping from names to such datasets, which are mixed.
        order: ``"global"`` shuffles all samples; ``"window"`` shuffles the shards, and then the samples of a few shards
            at a time, which suits remote shards and disks; ``"sequential"`` keeps the order.
        global_batch_size: the number of samples in a batch over all ranks; by default, one per rank. Loaders check it
            against the ``.batch()`` after this stage.
        lanes: the number of equal parts into which the dataset is divided, the same in every epoch and run. Each global
            batch has the same number of samples from each lane, in the same places. If the number of ranks divides the
            number of lanes, a rank therefore reads only the shards of its own lanes. Each lane is shuffled separately.
            Choose a divisor of ``global_batch_size`` that is at least as large as the largest number of ranks you
            expect.
        remainder: what to do with the samples after the last whole batch: ``"drop"`` them; ``"pad"`` the batch with the
            first samples of the epoch, or of each lane, marked by ``__padding__``, which ``.to_tuple()`` keeps only if
            it is named; or ``"keep"`` them and divide them between the ranks, some of which may then lack a batch.
        fields: the fields to read; by default, all. The data of other fields is not read.
        select: the samples to read; by default, all. A slice; an array of sample numbers in the order of the shards,
            where repeated numbers are read repeatedly; a mask with a Boolean for each sample; or a function that
            returns such numbers or a mask for the `ShardIndex` of a shard. The samples stay in the order of the shards,
            and other arguments and ``len()`` refer to the selected ones. For several datasets, pass a function, or a
            mapping from their names.
        weights: the relative frequencies of the datasets, by name. They are exact in every period of a few samples (for
            integers and decimal fractions) and in every epoch. When all samples of a dataset have been read, it is read
            again in a different order; the next epoch continues where this one ends. A dataset of weight 0 is not read.
            Without weights, an epoch has each sample once. The weights may also be a schedule, a list of points:
            ``(step, weights)`` sets the weights from a step of the run on, and ``(step, weights, "linear")`` changes
            them linearly from the previous point up to the step. A step is a global batch; the first point is step 0.
            Only a loader with a seed counts steps.
        join: another dataset, or a list of several, whose fields are added to the samples with the same keys. A `Join`
            says what to do with samples that have no counterpart; by default, they are an error.
        on_error: what to do if a sample cannot be read: ``"raise"``; or ``"warn"``, ``"skip"`` or an `ErrorBudget`, to
            count it and to read another sample of the epoch, marked by ``__padding__``, in its place, so that batches
            stay equal. With ``remainder="keep"``, it is skipped instead. A handler that returns False ends the epoch of
            this instance.
        epoch: the number of samples in an epoch, samples to exclude, batches of similar length, and the width of
            ``order="window"``.
        access: the location of the indexes, how shards are opened and cached, and the options of their store.

    Raises:
        EmptySourceError: there are no samples, none is selected, all are excluded, a dataset with a positive weight has
            none, or ``remainder`` is ``"drop"`` and there is less than a whole batch.
        IndexError: ``select`` contains the number of a sample that does not exist.
        MisalignedShardsError: samples have no counterpart in a joined dataset, although each must have one.
        DuplicateKeyError: two samples of a joined dataset have the same key, or two datasets the same field.
        ValueError: an argument is invalid; the ranks cannot share a batch evenly; or ``cache_bytes`` is less than the
            size of the shards that are read at a time: a window, or, for ``"global"``, a whole lane.
        SidecarError: an index is missing, stale or damaged, or its shard is compressed.
        ShardError: a shard cannot be read.
        ChangedShardError: a shard has changed since it was indexed.
        CacheError: ``cache_dir`` cannot be written.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": f"{n}"} for n in range(5)])
        >>> dp = IndexedSamples("{a,b}.tar", order="sequential", global_batch_size=4)
        >>> len(dp), [sample["__key__"] for sample in dp]
        (8, ['a0', 'a1', 'a2', 'a3', 'a4', 'b0', 'b1', 'b2'])
        >>> dataset = dp.map_style()
        >>> len(dataset), dataset[9]["cls"]
        (10, b'4')
    """

    argument_uses: ClassVar = dict.fromkeys(("shards", "weights", "global_batch_size", "fields", "on_error"), "free")

    def __init__(
        self,
        shards: Shards | Mapping[str, Shards],
        *,
        order: Order = "global",
        global_batch_size: int | None = None,
        lanes: int = 1,
        remainder: Remainder = "drop",
        fields: Collection[str] | None = None,
        select: Select | Mapping[str, Select] | None = None,
        weights: Weights | None = None,
        join: Shards | Join | Sequence[Shards | Join] = (),
        on_error: OnError = "raise",
        epoch: EpochOptions = EpochOptions(),  # noqa: B008  immutable
        access: AccessOptions = AccessOptions(),  # noqa: B008  immutable
    ) -> None:
        explain_samplers()
        check_choice("order", order, Order)
        check_choice("remainder", remainder, Remainder)
        check_on_error(on_error)
        global_batch_size = check_optional_integer("global_batch_size", global_batch_size, 1)
        check_fields(fields)
        lanes = check_integer("lanes", lanes, 1)
        if epoch.bucket_by is not None and global_batch_size is None:
            raise ValueError("bucket_by makes batches of samples of similar length, so it needs a global_batch_size")
        if epoch.pack is not None and global_batch_size is None:
            raise ValueError("pack plans the rows of each step, so it needs a global_batch_size, which counts rows")
        self.order = order
        self.global_batch_size = global_batch_size
        self.lanes = lanes
        self.remainder = remainder
        self.epoch = replace(epoch, exclude=None)  # exclusions do not affect the order
        self.fields = fields
        self.on_error = on_error
        self.groups: Groups = {}
        self._shuffles = True
        self._done, self._rest, self._position = 0, WHOLE_EPOCH, -1
        if isinstance(shards, Mapping) and not all(isinstance(name, str) and name for name in shards):
            raise ValueError(f"the datasets of a mixture need nonempty names, not {list(shards)!r:.200}")
        datasets = shards if isinstance(shards, Mapping) else {"": shards}
        listed = [join] if isinstance(join, str | os.PathLike | Manifest | Join) else join
        if not isinstance(listed, Iterable):
            raise TypeError(f"join must be a dataset, a Join, or a list of these, not {join!r:.200}")
        joined = [each if isinstance(each, Join) else Join(each) for each in listed]
        with spelled_for(IndexedSamples):
            others = [(shard_sizes(each.shards, access), each.missing) for each in joined]
            for sizes, _ in others:
                if not any(size for _, size in sizes):
                    raise EmptySourceError(f"A dataset of join= has {plural(len(sizes), 'shard')} but no samples")
            window = {"window": epoch.window_shards, "global": sys.maxsize if select is None else 1}.get(order, 1)
            self._shards = IndexedShards(
                {name: shard_sizes(dataset, access, window=window, lanes=lanes) for name, dataset in datasets.items()},
                select=select,
                join=[(IndexedShards({"": sizes}, fields=fields, access=access), missing) for sizes, missing in others],
                lengths=epoch.bucket_by,
                pack=epoch.pack,
                exclude=epoch.exclude,
                fields=fields,
                access=access,
            )
        self.exclusions, self._readers = self._shards.exclusions, ProcessReaders(self._shards)
        parts = self._shards.shards_of
        self.weights = None if weights is None else check_schedule(weights, list(parts), global_batch_size)
        counts = {name: int(self._shards.sizes[part].sum()) for name, part in parts.items()}
        points = self.weights or [(0, dict.fromkeys(parts, 1))]
        used = [name for name in parts if any(weights[name] for _, weights, *_ in points)]
        for name in used if self.weights else ():
            if not counts[name]:
                raise EmptySourceError(
                    f"The dataset {name!r} has a positive weight, but no samples, or none is selected. Remove it, or "
                    "set its weight to 0"
                )
        count = epoch.samples or sum(counts[name] for name in used)
        check_lanes(lanes, global_batch_size, count)
        if epoch.samples and weights is None:
            points = [(0, {"": 1})]
        is_mixed = weights is not None or epoch.samples is not None
        count -= count % lanes if is_mixed else 0  # all lanes advance equally per epoch
        facts = {name: (part.stop - part.start, counts[name]) for name, part in parts.items()}
        self._own_phase = Phase(count, global_batch_size or 1, facts, points if is_mixed else None)
        #: The phases of the run, the seed of the loader in its first epoch, and that of its order.
        self.timeline, self._first, self.run_seed = self.timeline_of([self._own_phase], ReceivedEpochs()), -1, 0
        self._rows_of: dict[tuple[int, int], int] = {}
        #: The number of the epoch.
        self.number = 0

    @property
    def dataset(self) -> IndexedShards:
        """The shards, with their names and their numbers of samples."""
        return self._shards

    def exclude(self, exclusions: Exclusions) -> None:
        """Exclude other samples from the next iteration on."""
        self.exclusions, self._shards = exclusions, self._shards.excluding(exclusions)
        self._readers.shards = self._shards

    def map_style(self) -> IndexedDataset:
        """Return a map-style dataset of all samples, in the order of the shards, for torch's samplers."""
        return IndexedDataset(self._shards)

    def __getitem__(self, number: int) -> Sample:
        """Return a sample by its number in the order of the shards."""
        return self._readers.read([number])[0]

    def __iter__(self) -> Iterator[Sample]:
        warn_of_copies(self)
        if is_first := self._instance.is_first:
            warn_of_costs(self._shards, self.order, self.lanes, self.epoch.window_shards, self._instance)
        order = self.order_of_epoch()
        if not self._loaded:
            self._part, self._planned = 0, ()
        (done, self._rest, again), self._loaded = self._loaded or (0, WHOLE_EPOCH, NONE_AWAITED), None
        if self.plan is not None:
            self._done, self._begun = done, (0, -1, ())
            if self._planned:
                self.plan.begin_at(*self._planned)
            yield from self._read_rows(self.plan)
            return
        first = np.array(sorted(each.start for each in again), np.int64)
        self._done, left = done, len(first)
        returning = {each.identity: holder for each, holder in again.items()}
        returning |= again.of_others(SamplePosition(0, each, each + 1) for each in self._rest.held)
        policy = ErrorPolicy(self.counted_errors, "IndexedSamples")
        replaces = self.remainder != "keep"
        marks = self.remainder == "pad" or (replaces and (bool(self.exclusions) or not policy.always_raises))
        with self._readers.open(self.counters) as reader:
            chunks = chain([first], self._positions(reader, self._share(self._rest), self._done))
            substitutes = Substitutes(self._shards, order, reader.start, are_read=replaces)
            for sample, self._position, is_substitute in read_epoch(
                reader, chunks, substitutes, policy, replaces_errors=replaces
            ):
                if sample is not None and marks:
                    sample[PADDING_MARK] = is_substitute or self._position >= len(order)
                if returning:
                    at = SamplePosition(0, self._position, self._position + 1)
                    holder = returning.pop(at.identity, None)
                    if left:
                        left -= 1
                    else:
                        self._done = done = done + 1
                        if self._position >= self._rest.start:
                            returning.clear()  # the others belong to other ranks or workers
                    if sample is not None:
                        yield from (sample,) if holder is None else holder.deliver(sample, at)
                    continue
                self._done = done = done + 1
                if sample is not None:
                    yield sample
            if is_first:
                substitutes.warn_of_unknown_keys()
        if policy.has_ended:
            policy.count_unread(self._share(self._rest), self._done + 1)
        policy.finish()

    def _positions(self, reader: DatasetReader, share: BatchShare, done: int) -> Iterator[Numbers]:
        """Yield the positions that are still to be read; before they end, open the first shards of the next epoch.

        This happens when the last window of each lane is half read, because other processes may still open its first
        shards.
        """
        left, seed = len(share) - done, self.next_seed
        part = self.epoch.window_shards * self.lanes / len(self._shards.sizes) if self.order == "window" else 0
        for chunk in share.positions(done):
            yield chunk
            left -= len(chunk)
            if reader.has_copies and seed is not None and left <= len(share) * min(part, 1) / 2:
                first = next(self._share().positions())
                self._readers.open_ahead(reader, self.order_of_epoch(following=True).find(first), self.counters)
                seed = None
