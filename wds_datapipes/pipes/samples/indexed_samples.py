"""The source that reads samples by index."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import numpy as np

from wds_datapipes.arguments import check_choice, check_fields, check_integer, check_optional_integer
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import EmptySourceError, plural
from wds_datapipes.index.format.index_lookup import shard_sizes
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.index.format.options import AccessOptions, EpochOptions, Join
from wds_datapipes.index.order.batch_share import WHOLE_EPOCH, BatchShare, Remainder, RestOfEpoch, rest_of_epoch
from wds_datapipes.index.order.exclusions import Exclusions
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.lanes import check_lanes
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.sample_order import LaneOrder, Order
from wds_datapipes.index.order.select import Select
from wds_datapipes.index.order.substitutes import Substitutes
from wds_datapipes.index.order.weight_schedule import Weights, check_schedule
from wds_datapipes.index.read.dataset_reader import DatasetReader, ProcessReaders
from wds_datapipes.index.read.epoch import read_epoch
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.pipes.foreign_calls import explain_samplers
from wds_datapipes.pipes.groups import Groups
from wds_datapipes.pipes.instance import instance_in
from wds_datapipes.pipes.samples.indexed_dataset import IndexedDataset
from wds_datapipes.pipes.samples.indexed_phases import PhasedSamples
from wds_datapipes.pipes.sharding import SplittingStage, warn_of_copies
from wds_datapipes.pipes.stage import SnapshotStage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.received_epochs import ReceivedEpochs
from wds_datapipes.samples.fields import PADDING_MARK
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import Resharding, SamplePosition
from wds_datapipes.signatures import spelled_for
from wds_datapipes.types import Instance, Sample
from wds_datapipes.user_warnings import warn_user

#: The stage warns if it must sort more samples than this for each one that it yields; sorting 256 takes about 0.1 ms.
MANY_SORTED = 256


Shards: TypeAlias = "Manifest | str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""The shards of a dataset: a manifest, a pattern, or URLs."""


class IndexedSamples(PhasedSamples, SeededStage, SplittingStage[Sample], SnapshotStage[Sample]):
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

    shares_seed = True
    has_position = True
    can_reshard = True
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
        #: The number of the epoch.
        self.number = 0

    def set_shuffle(self, shuffle: bool = True) -> IndexedSamples:
        """Turn shuffling on or off; loaders call this."""
        self._shuffles = shuffle
        return self

    def phased_source(self) -> IndexedSamples:
        """Return the stage, which has the phases and exclusions of a run."""
        return self

    def can_rotate(self) -> bool:
        """Whether `rotate_assignment` can give it another worker's share; batches have fixed shares."""
        return False

    def is_even(self) -> bool:
        """Whether the ranks stay in step."""
        return not self._leaves_holes

    @property
    def _leaves_holes(self) -> bool:
        """Whether it leaves out samples that are excluded or cannot be read, instead of replacing them."""
        return self.remainder == "keep" and (self.on_error != "raise" or bool(self.exclusions))

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

    def __len__(self) -> int:
        """Return the number of samples of an epoch in this process."""
        if self._leaves_holes:
            what = "exclude=" if self.exclusions else f"on_error={self.on_error!r}"
            raise TypeError(f"IndexedSamples has no length, because {what} may skip samples")
        return len(self._share())

    def __iter__(self) -> Iterator[Sample]:
        warn_of_copies(self)
        if is_first := self._instance.is_first:
            self._warn_of_costs()
        order = self.order_of_epoch()
        (done, self._rest, again), self._loaded = self._loaded or (0, WHOLE_EPOCH, NONE_AWAITED), None
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

    def _warn_of_costs(self) -> None:
        """Warn if a worker sorts far more samples than it yields, or reads from more shards than it keeps open."""
        ranks = self._instance.ranks
        others = self._instance.count // self.lanes
        if self._shards.lengths is not None and others >= MANY_SORTED and ranks > self.lanes:
            warn_user(
                f"bucket_by sorts whole windows of a lane. With lanes={self.lanes}, a worker of {ranks} ranks sorts "
                f"about {others} samples for each one that it yields, which takes about {others / 2000:.1f} ms. Choose "
                f"at least lanes={ranks}"
            )
        lanes, most = -(-self.lanes // ranks), self._shards.most_open
        shards = lanes * min(self.epoch.window_shards, len(self._shards.sizes) // self.lanes + 1)
        if self.lanes > 1 and self.order == "window" and shards > most:
            warn_user(
                f"Each rank has {lanes} of {self.lanes} lanes, so its batches have samples of {shards} shards, but "
                f"each of its workers keeps {most} open: most samples open a shard again. Choose smaller windows with "
                f"EpochOptions(window_shards=), fewer lanes, or AccessOptions(open_shards={shards})"
            )

    def order_of_epoch(self, *, following: bool = False) -> LaneOrder:
        """Return the order of the epoch whose seed was set last, or of the following one, if its seed is known.

        Raises:
            RuntimeError: weights change by step, but the loader does not count steps.
        """
        order = self.order if self._shuffles else "sequential"
        if following:
            seed, number = self.next_seed or 0, self.number + 1
        else:
            seed, known = 0 if order == "sequential" else self.take_seed(), self.take_epoch()
            if known is not None and self._first not in (-1, known.first):  # another run begins
                self.load_phases([])
            self._check_schedule(known)
            self.run_seed, self.number = seed, 0
            if known is not None:
                self.run_seed, self.number = self.first_seed or 0, known.number
                self.timeline = self.timeline_of(self.timeline.phases, known.received)
            number = self.number
        return self._shards.order_of(self.timeline, number, order, self.epoch, seed=seed, run=self.run_seed)

    def _check_schedule(self, epoch: Epoch | None) -> None:
        """Check that the steps of a run are known if its weights change by step."""
        if all(len(phase.points or ()) <= 1 for phase in self.timeline.phases):
            return
        if epoch is None:
            raise RuntimeError(
                "The weights change by step, but the steps of the run are not counted here. Read with "
                "StatefulShards, or with DataLoader2, ShardReadingService and a seed, and without a later stage "
                "that restarts IndexedSamples, such as .with_epoch() or .mix_samples(). To set the length of an "
                "epoch, pass epoch=EpochOptions(samples=n); to mix, pass all datasets to IndexedSamples"
            )
        if not epoch.received.follows:
            raise RuntimeError(
                f"The weights change by step, so each epoch must follow the previous one, but set_epoch() has selected "
                f"epoch {epoch.number}. Call it with the number of the next epoch, or not at all"
            )

    def _share(self, rest: RestOfEpoch = WHOLE_EPOCH) -> BatchShare:
        """Return the share of this instance in the rest of an epoch."""
        return self._share_of(self._instance, rest)

    @property
    def _instance(self) -> Instance:
        return instance_in(self.groups)

    def _share_of(self, instance: Instance, rest: RestOfEpoch) -> BatchShare:
        return BatchShare(self._count, self.batch_of(instance.ranks), self.remainder, instance, rest, self.lanes)

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the last sample yielded."""
        return lambda: SamplePosition(0, self._position, self._position + 1)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of samples that this instance has yielded in the epoch, and the number of ranks."""
        done, rest, _ = self._loaded or (self._done, self._rest, NONE_AWAITED)
        state: dict[str, Any] = {"yielded": done, "ranks": self._instance.ranks}
        if rest != WHOLE_EPOCH:
            state["rest"] = rest.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`, or ``{}`` if only the samples of ``again`` remain.
            again: the samples that later stages have buffered; they are yielded first.
        """
        rest = RestOfEpoch.from_state(state.get("rest"))
        self._loaded = state.get("yielded", 0), rest, again

    def is_alike_on_ranks(self, state: Mapping[str, Any], instance: Instance) -> bool:
        """Whether the same worker on every rank has this state; the position in the epoch determines it."""
        share = self._share_of(instance, RestOfEpoch.from_state(state.get("rest")))
        return share.is_alike_on_ranks(state["yielded"])

    def reshard_states(self, resharding: Resharding) -> list[dict[str, Any]]:
        """Return the states from which a different number of instances resumes; they share the rest of the epoch."""
        known = [state or {} for state in resharding.states]
        # An instance that has not begun does not know the number. If none has begun, nothing depends on it.
        ranks = next((state["ranks"] for state in known if state.get("yielded")), 1)
        rest = RestOfEpoch.from_state(next((state["rest"] for state in known if "rest" in state), None))
        workers = len(known) // ranks
        shares = [
            (self._share_of(Instance(number % ranks, ranks, number // ranks, workers), rest), state.get("yielded", 0))
            for number, state in enumerate(known)
        ]
        held = chain.from_iterable(map(resharding.waiting, range(len(known))))
        left = rest_of_epoch(shares, [position.start for position in held])
        return [{"yielded": 0, "rest": left.state_dict()} for _ in resharding.own]
