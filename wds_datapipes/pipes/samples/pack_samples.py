"""The stage ``.pack_samples()``: pack token sequences into rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wds_datapipes.arguments import check_choice, check_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.samples.buffer import BufferingStage
from wds_datapipes.samples.packing import Layout, LongSamples, RowFormat, pack_samples
from wds_datapipes.types import Sample


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
