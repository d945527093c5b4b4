"""Stages that hold samples back to shuffle them, or to combine or split them, such as by similar lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import numpy as np

from wds_datapipes.arguments import check_choice, check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.stage import EngineStage, FunctionStage, SnapshotStage, position_reader_of, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.batching import unbatch_samples
from wds_datapipes.samples.bucketing import Length, LengthBuckets, bucket_samples
from wds_datapipes.samples.packing import Layout, LongSamples, RowFormat, pack_samples
from wds_datapipes.samples.position_buffer import SampleBuffer
from wds_datapipes.samples.shuffling import ShuffleState, shuffle_samples
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import SamplePosition, unpack_positions
from wds_datapipes.types import Sample

T_co = TypeVar("T_co", covariant=True)


class BufferingStage(FunctionStage[T_co], SnapshotStage[T_co]):
    """Base class of stages whose function holds samples back and records their positions."""

    is_stateless = False
    rereads_samples = True
    can_reshard = True
    holds_items = True

    def __init__(self, source: Any, /, **options: Any) -> None:
        super().__init__(source, **options)
        self._state = self._progress({})

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples.

        Raises:
            StateError: an earlier stage is declared stateless, but yields several items for a sample.
        """
        progress = self._current()
        if progress.is_ambiguous:
            raise StateError(
                f"{name_of(self)} records its buffered items by their positions, but an earlier stage that is declared "
                "stateless yields several items for one sample. Do not declare that stage stateless"
            )
        return {"waiting": progress.contents()}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state from which the next iteration resumes.

        Args:
            state: the result of `state_dict`, or ``{}`` if only the samples of ``again`` remain.
            again: the samples that later stages have buffered; they are yielded first.

        Raises:
            StateError: the state is corrupt.
        """
        waiting = unpack_positions(state.get("waiting", ()))
        is_distinct = len({position.identity for position in waiting}) == len(waiting)
        if not is_distinct or any(-1 < position.end <= position.start for position in waiting):
            raise StateError(f"The state of {name_of(self)} is corrupt: it lists a buffered sample twice, or none")
        self._loaded = self._progress(state, waiting, again)

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the (first) sample of the last item yielded."""
        return None if position_reader_of(self.source) is None else (lambda: self._state.at)

    def _progress(
        self,
        state: Mapping[str, Any],
        waiting: Iterable[SamplePosition] = (),
        again: Awaited = NONE_AWAITED,  # noqa: ARG002 - no stage after a batch buffers samples
    ) -> Any:
        """Return the progress stored in a state, or that at the beginning of an epoch."""
        return SampleBuffer(waiting, state.get("cut", 0))

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        known = {"buffer": self._start_progress(self._progress({})), "position": position_reader_of(self.source)}
        return {**super().function_options(), **known}


@register_stage("shuffle_samples")
class SampleShuffler(SeededStage, BufferingStage[Sample]):
    """Shuffle samples through a buffer of bounded size (functional name: ``shuffle_samples``).

    Each sample is yielded exactly once. Put this stage before decoding, while samples are small. As with torch's
    ``.shuffle()``, the seed comes from the loader and differs in each epoch and worker. ``DataLoader(shuffle=False)``
    disables shuffling.

    Yields:
        Any: the items of ``source``, unchanged, in random order.

    Args:
        source: yields samples, or anything else.
        buffer_size: the number of samples in the buffer; 1 keeps the order.
        initial: the number of samples to buffer before the first is yielded. After that, two are read for each one
            yielded until the buffer is full. By default, ``buffer_size``; a smaller number starts sooner, but mixes the
            first samples less.
        max_bytes: the maximum total size of the values in the buffer (bytes, arrays, tensors and images), in bytes.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> sorted(IterableWrapper(range(5)).shuffle_samples(3))
        [0, 1, 2, 3, 4]
    """

    function = staticmethod(shuffle_samples)
    _enabled = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        buffer_size: int,
        *,
        initial: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        buffer_size = check_integer("buffer_size", buffer_size)
        initial = buffer_size if initial is None else initial
        if not 1 <= initial <= buffer_size:
            raise ValueError(f"shuffle_samples needs 1 <= initial <= buffer_size, not {initial} and {buffer_size}")
        self.initial = initial
        super().__init__(source, buffer_size=buffer_size, max_bytes=check_optional_integer("max_bytes", max_bytes, 0))
        self._rng = Random()

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples, the number of draws, and the current size of the buffer."""
        state = self._current()
        return {"draws": state.draws, "room": state.room, **super().snapshot()}

    def set_shuffle(self, shuffle: bool = True) -> SampleShuffler:
        """Turn shuffling on or off; loaders call this."""
        self._enabled = shuffle
        return self

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        self._rng.seed(self.take_seed())

    def __len__(self) -> int:
        """Return the number of items of an epoch in this process."""
        return len(self.source)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        known = super().function_options()
        if not self._enabled:
            known["buffer_size"] = 1
        return {"state": known.pop("buffer"), "rng": self._rng, **known}

    def _progress(
        self, state: Mapping[str, Any], waiting: Iterable[SamplePosition] = (), again: Awaited = NONE_AWAITED
    ) -> ShuffleState:
        loaded = ShuffleState(state.get("room", self.initial if self._enabled else 1), waiting)
        loaded.draws = operator.index(state.get("draws", 0))
        loaded.again = again
        return loaded


@register_stage("bucket_samples")
class SampleBucketer(BufferingStage[list[Any]]):
    """Batch samples of similar length, so that they need little padding (functional name: ``bucket_samples``).

    Samples wait in the bucket for their length until it can form a batch. A bucket holds less than a batch, so the
    number of waiting samples is bounded. At the end of the epoch, the rest of each bucket becomes a batch, from the
    shortest lengths to the longest.

    torchdata's ``.max_token_bucketize()`` silently drops samples that are too long, and always yields the shortest
    samples that it holds; ``.bucketbatch()`` does not count tokens. Both resume only by replay. This stage has a state:
    a run resumes with the same batches. Put it last, before ``.collate()``, because a shuffle after it would have no
    position.

    The number of batches depends on the lengths, so it may differ between ranks. ``.with_epoch(n)`` makes the numbers
    equal. Alternatively, `IndexedSamples` makes equal batches of samples of similar length with ``bucket_by``.

    Yields:
        list: the samples of a batch, unchanged and in the order in which they were read.

    Args:
        source: yields samples, or anything else if ``length`` is a function.
        length: the length of a sample: the name of a field that is an integer or has a ``len()``, or a function of the
            sample that returns an integer.
        boundaries: the longest length of each bucket, in ascending order. Longer samples share another bucket. By
            default, there are four buckets between powers of two: 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, and
            so on. Wider buckets cause more padding, but hold fewer samples.
        batch_size: the maximum number of samples in a batch.
        max_tokens: the maximum number of tokens in a padded batch: its longest length times its number of samples.
            Either ``batch_size`` or ``max_tokens`` is required; if both are given, both limits apply.
        drop_last: drop incomplete batches at the end of the epoch.
        on_error: what to do with samples without a valid length, or longer than ``max_tokens``: ``"raise"``; or, to
            skip them, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a sample does not have the field ``length``.
        SampleSizeError: a length is not an integer, is negative, or exceeds ``max_tokens``.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> texts = IterableWrapper(["a", "bcde", "f", "g", "hijkl", "mno"])
        >>> list(texts.bucket_samples(len, batch_size=2))
        [['a', 'f'], ['g'], ['mno'], ['bcde'], ['hijkl']]
        >>> list(texts.bucket_samples(len, boundaries=[2, 5], max_tokens=10))
        [['bcde', 'hijkl'], ['a', 'f', 'g'], ['mno']]
    """

    combines_samples = True
    draws_globally = True
    function = staticmethod(bucket_samples)

    def __init__(
        self,
        source: IterDataPipe[Any],
        length: Length,
        *,
        boundaries: Sequence[int] | None = None,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        drop_last: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        if not isinstance(length, str) and not callable(length):
            raise TypeError(f"length must be the name of a field or a function of the sample, not {length!r}")
        limits = None if boundaries is None else tuple(np.asarray(boundaries).tolist())
        batch_size = check_optional_integer("batch_size", batch_size, 1)
        buckets = LengthBuckets(limits, batch_size, check_optional_integer("max_tokens", max_tokens, 1))
        super().__init__(source, buckets=buckets, length_of=length, drop_last=drop_last, on_error=on_error)
        self.batch_size = batch_size


@register_stage("pack_samples")
class SamplePacker(BufferingStage[Sample]):
    """Pack token sequences of several samples into rows of at most a given length (functional name: ``pack_samples``).

    Rows need little or no padding. They mark their sequences, so that attention does not cross from one sequence to
    another. Each sample goes to the open row in which it leaves the least space. A row is yielded when it is full, or
    when it is the fullest of too many open rows. Samples are not cut unless ``long_samples`` says so. Samples that only
    pad a batch of `IndexedSamples`, whose ``__padding__`` is true, are dropped.

    A run resumes with the same rows. Put this stage last, before ``.batch()``, because a shuffle after it would have no
    position. The number of rows depends on the lengths; ``.with_epoch(n)`` gives all ranks the same number.

    Yields:
        dict: a row: ``__key__``, the ``list`` of the keys of its samples; the ``fields``, as tensors or arrays, like
            those of the samples; ``position_ids`` (int64), the position of each token in its sequence; and, depending
            on ``layout``, ``segment_ids`` (int64) or ``cu_seqlens`` (int32). Other fields of the samples are dropped.

    Args:
        source: yields samples.
        max_length: the maximum number of tokens in a row.
        fields: the name of the field to pack, or several names, such as those of tokens and labels. The fields are
            one-dimensional tensors, arrays or lists of numbers, and have the same length within a sample.
        long_samples: what to do with samples longer than ``max_length``: ``"raise"`` an error, which ``on_error`` may
            skip; ``"truncate"`` them; or ``"split"`` them into several sequences.
        open_rows: the maximum number of rows that wait for more samples; more rows waste less space.
        layout: ``"segment_ids"`` gives each token the number of its sequence, from 1, or 0 for padding.
            ``"cu_seqlens"`` gives the offsets of the sequences and the end of the last one, in the form that
            variable-length attention kernels expect.
        pad: the value with which each field is padded to ``max_length``, by field name, or one value for all fields. By
            default, rows are not padded.
        on_error: what to do with samples that cannot be packed: ``"raise"``; or, to skip them, ``"warn"``, ``"skip"``,
            an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a sample does not have one of the fields.
        SampleSizeError: a sample is too long, its fields have different lengths or more than one dimension, or their
            types differ from those of other samples.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> texts = [[11, 12, 13], [21, 22, 23, 24], [31, 32], [41]]
        >>> samples = IterableWrapper([{"__key__": str(n), "tokens": text} for n, text in enumerate(texts)])
        >>> for row in samples.pack_samples(6, "tokens", pad=0):
        ...     print(row["__key__"], row["tokens"], row["segment_ids"], row["position_ids"])
        ['1', '2'] [21 22 23 24 31 32] [1 1 1 1 2 2] [0 1 2 3 0 1]
        ['0', '3'] [11 12 13 41  0  0] [1 1 1 2 0 0] [0 1 2 0 0 0]
        >>> [row["cu_seqlens"].tolist() for row in samples.pack_samples(6, "tokens", layout="cu_seqlens")]
        [[0, 4, 6], [0, 3, 4]]
    """

    combines_samples = True
    function = staticmethod(pack_samples)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        max_length: int,
        fields: str | Sequence[str],
        *,
        long_samples: LongSamples = "raise",
        open_rows: int = 64,
        layout: Layout = "segment_ids",
        pad: float | Mapping[str, float] | None = None,
        on_error: OnError = "raise",
    ) -> None:
        check_choice("long_samples", long_samples, LongSamples)
        names = (fields,) if isinstance(fields, str) or not isinstance(fields, Iterable) else tuple(fields)
        pads = pad if pad is None or isinstance(pad, Mapping) else dict.fromkeys(names, pad)
        super().__init__(
            source,
            row_format=RowFormat(names, check_integer("max_length", max_length, 1), layout, pads),
            long_samples=long_samples,
            open_rows=check_integer("open_rows", open_rows, 1),
            on_error=on_error,
        )

    @property
    def can_reshard(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether the rest of an epoch can be assigned to a different number of workers."""
        return bool(self._options.value["long_samples"] != "split")

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples, and how much of the last one has been yielded."""
        return {**super().snapshot(), "cut": self._current().cut}


@register_stage("unbatch_samples")
class SampleUnbatcher(EngineStage[Any]):
    """Split collated batches into samples (functional name: ``unbatch_samples``).

    This is the inverse of torch's ``.collate()``. A batch is a dict, a tuple or a list of columns, or a single column.
    A column is a tensor, an array or a list whose first dimension is the batch, so a list or a tuple inside a batch is
    a single column.

    torch's ``.unbatch()`` splits lists of samples, as from ``.batch()`` or from a function that splits a sample into
    several. A pipeline with either stage resumes by replay.

    After a loader, use it to shuffle the samples of all workers in the main process; see `LoaderBatches`.

    Yields:
        Any: samples of the same type as the batch, such as dicts or tuples. Numbers in a tensor become tensors without
            dimensions. Values are views of the batch, whose memory is released with its last sample.

    Args:
        source: yields batches.

    Raises:
        ValueError: the columns of a batch have different lengths.
        TypeError: a batch contains a value that is not a column.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> batches = IterableWrapper([{"__key__": ["a", "b"], "cls": [3, 4]}])
        >>> list(batches.unbatch_samples())
        [{'__key__': 'a', 'cls': 3}, {'__key__': 'b', 'cls': 4}]
    """

    holds_items = True

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from unbatch_samples(self.source)
