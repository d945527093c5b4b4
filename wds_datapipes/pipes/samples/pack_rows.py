"""The stage ``.pack_rows()``: join the samples of planned rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from wds_datapipes.arguments import check_fields
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import sources_of
from wds_datapipes.pipes.roles import Buffer
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.packing import Layout, RowFormat
from wds_datapipes.samples.row_joining import pack_rows
from wds_datapipes.types import Sample


class RowPacker(Buffer, FunctionStage[Sample]):
    """Join the samples of each row that `IndexedSamples` has planned (functional name: ``pack_rows``).

    `Pack`, in ``EpochOptions(pack=)``, plans the rows; the samples of a row arrive one after the other, and their field
    ``__row__`` says where they belong. Stages in between, such as decoders and tokenizers, see ordinary samples; they
    must keep that field and yield each sample once. Every rank gets the same number of rows in each step, so
    ``.batch(global_batch_size // ranks)`` follows.

    The space of samples that are excluded, cannot be read, or only pad the last step remains empty.

    Yields:
        dict: a row: ``__key__``, the ``list`` of the keys of its samples; the ``fields``, as tensors or arrays, like
            those of the samples; ``position_ids`` (int64), the position of each token in its sequence; and, depending
            on ``layout``, ``segment_ids`` (int64) or ``cu_seqlens`` (int32). Fields in ``lists`` become lists; others
            are dropped.

    Args:
        source: yields the samples.
        fields: the names of the fields to pack, such as those of tokens and labels. They are one-dimensional tensors,
            arrays or lists of numbers, and have the same length within a sample.
        layout: ``"segment_ids"`` gives each token the number of its sequence, from 1, or 0 for padding.
            ``"cu_seqlens"`` gives the offsets of the sequences and the end of the last one, in the form that
            variable-length attention kernels expect.
        lists: the names of other fields that a row has as a ``list`` of the values of its samples, such as images. If a
            long sample is split, its first part has its values.
        pad: the value with which each field is padded to the length of a row, by field name, or one value for all
            fields. By default, rows are not padded.

    Raises:
        MissingFieldError: a sample belongs to no row, or lacks one of the fields.
        SampleSizeError: a row is missing, lacks a sample or has it twice, its samples are longer than the index says
            and do not fit into it, its fields are not such arrays, or they cannot have the value of ``pad``.

    Examples:
        >>> from wds_datapipes import IndexedSamples
        >>> from wds_datapipes.index import EpochOptions, Pack
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{n}", "json": f"{[n] * n}"} for n in (3, 4, 2, 1)])
        >>> epoch = EpochOptions(pack=Pack(length=[3, 4, 2, 1], row=6))
        >>> samples = IndexedSamples(url, order="sequential", global_batch_size=2, epoch=epoch)
        >>> for row in samples.wds_decode().pack_rows("json", pad=0):
        ...     print(row["__key__"], row["json"], row["segment_ids"], row["position_ids"])
        ['4', '2'] [4 4 4 4 2 2] [1 1 1 1 2 2] [0 1 2 3 0 1]
        ['3', '1'] [3 3 3 1 0 0] [1 1 1 2 0 0] [0 1 2 0 0 0]
    """

    combines_samples = True
    function = staticmethod(pack_rows)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        *fields: str,
        lists: Collection[str] = (),
        layout: Layout = "segment_ids",
        pad: float | Mapping[str, float] | None = None,
    ) -> None:
        pads = pad if pad is None or isinstance(pad, Mapping) else dict.fromkeys(fields, pad)
        check_fields(lists, "lists")
        row_format = RowFormat(fields, 0, layout, pads, stage="pack_rows")
        if repeated := {*lists} & {*fields, "__key__", "position_ids", layout}:
            raise ValueError(f"lists names the field {min(repeated)!r}, which a row has anyway")
        super().__init__(source, row_format=row_format, lists=tuple(dict.fromkeys(lists)))

    def __len__(self) -> int:
        """Return the number of rows of an epoch in this process, which stages in between cannot change."""
        if (source := self.phased_source()) is None:
            raise TypeError("RowPacker has no length, because IndexedSamples does not come before it")
        return len(source)

    def items_of(self, source: Any) -> Iterable[Sample]:
        """Yield the rows, and check at the end that each row has come that was read."""
        planner = self.phased_source()
        return self.function(source, **self._options.value, rows_read=None if planner is None else planner.rows_read)

    def phased_source(self) -> Any:
        """Return the source that plans the rows, of which none may be missing; None if it is unknown."""
        stage = self.source
        while (found := declared(stage).phased_source()) is None:
            sources = [*sources_of(stage)]
            if len(sources) != 1:
                return None
            [stage] = sources
        return found

    def is_even(self) -> bool:
        """Whether it yields equally many items on each rank: rows are planned so."""
        return True
