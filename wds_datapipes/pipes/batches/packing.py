"""The stage that packs sequences of tokens into rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_datapipes.arguments import check_choice, check_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.batches.buffering import BufferingStage
from wds_datapipes.pipes.stage import position_reader_of, register_stage
from wds_datapipes.samples.packing import Layout, LongSamples, RowFormat, pack_samples
from wds_datapipes.types import Sample


@register_stage("pack_samples")
class SamplePacker(BufferingStage[Sample]):
    """Pack token sequences of several samples into rows of at most a given length (functional name: ``pack_samples``).

    A row needs little or no padding, and tells its sequences apart, so that attention does not cross from one to
    another. Each sample goes to the open row in which it leaves the least room; a row is yielded when it is full, or
    when it is the fullest of too many. A sample is not cut, unless ``long_samples`` says so. Samples that only fill up
    a batch of `IndexedSamples`, whose ``__padding__`` is true, are left out.

    A run resumes with the same rows. Put it last, before ``.batch()``: a shuffle after it would have no position. The
    number of rows depends on the lengths; ``.with_epoch(n)`` gives all ranks the same number.

    Yields:
        dict: a row: ``__key__``, the ``list`` of the keys of its samples; the ``fields``, each a tensor or an array
        like those of the samples; ``position_ids`` (int64), the position of each token in its sequence; and, depending
        on ``layout``, ``segment_ids`` (int64) or ``cu_seqlens`` (int32). Other fields of the samples are left out.

    Args:
        source: yields samples.
        max_length: the most tokens in a row.
        fields: the name of the field to pack, or several names, such as of tokens and labels. They are tensors, arrays
            or lists of numbers, of one dimension, and have the same length in a sample.
        long_samples: what to do with samples longer than ``max_length``: ``"raise"`` an error, which ``on_error`` may
            skip; ``"truncate"`` them; or ``"split"`` them into several sequences.
        open_rows: the most rows that wait for more samples; more of them leave less room.
        layout: ``"segment_ids"`` gives each token the number of its sequence, from 1, or 0 for padding.
            ``"cu_seqlens"`` gives the offsets of the sequences and the end of the last one, as attention kernels for
            sequences of different lengths take them.
        pad: the value with which each field is filled up to ``max_length``, by its name, or one for all of them. By
            default, rows are not filled up.
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
        super().__init__()
        check_on_error(on_error)
        check_choice("long_samples", long_samples, LongSamples)
        self.source = source
        self.max_length = check_integer("max_length", max_length, 1)
        self.fields = (fields,) if isinstance(fields, str) or not isinstance(fields, Iterable) else tuple(fields)
        self.long_samples = long_samples
        self.open_rows = check_integer("open_rows", open_rows, 1)
        self.layout = layout
        self.pad = pad
        self.on_error = on_error
        self._row_format()  # checks the arguments

    @property
    def can_reshard(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether the rest of an epoch can be assigned to another number of workers."""
        return self.long_samples != "split"

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples, and how much of the last one was yielded."""
        return {**super().snapshot(), "cut": (self._loaded or self._buffer).cut}

    def _row_format(self) -> RowFormat:
        pad = self.pad
        if pad is not None and not isinstance(pad, Mapping):
            pad = dict.fromkeys(self.fields, pad)
        return RowFormat(self.fields, self.max_length, self.layout, pad)

    def __iter__(self) -> Iterator[Sample]:
        yield from pack_samples(
            self.source,
            self._row_format(),
            long_samples=self.long_samples,
            open_rows=self.open_rows,
            on_error=self.counted_errors,
            buffer=self._begin_buffer(),
            position=position_reader_of(self.source),
        )
