"""Samples of an epoch by position, with substitutes for excluded and unreadable samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import TRIES, Chunk
from wds_datapipes.index.order.substitutes import Substitutes
from wds_datapipes.index.read.dataset_reader import DatasetReader
from wds_datapipes.on_error.policy import ErrorPolicy, note
from wds_datapipes.types import Sample


def read_epoch(
    reader: DatasetReader,
    chunks: Iterable[Numbers],
    substitutes: Substitutes,
    policy: ErrorPolicy,
    *,
    replaces_errors: bool = True,
) -> Iterator[tuple[Sample | None, int, bool]]:
    """Yield the samples at some positions of an epoch, their positions, and whether they are substitutes.

    If the policy skips errors, another sample of the epoch replaces each unreadable one, as it does each excluded one.
    Iteration ends at the first error for which a handler returns False.

    Args:
        reader: reads the samples.
        chunks: arrays of positions; positions beyond the end of the epoch are padding.
        substitutes: finds the samples to read.
        policy: what to do with samples that cannot be read.
        replaces_errors: whether these are replaced; otherwise, there is None at their positions.

    Raises:
        ShardError: neither a sample nor a substitute for it can be read.
        SidecarError: an index is missing or damaged.
        EmptySourceError: all or nearly all samples are excluded.
    """
    waiting = deque[int]()  # the positions of the samples that are being read
    begun = 0

    def find() -> Iterator[Chunk]:
        nonlocal begun
        for chunk in chunks:
            for positions, found in substitutes.locate(chunk):
                waiting.extend(positions.tolist())
                begun += len(positions)
                yield found

    holes, errors = substitutes.holes, substitutes.errors
    for item in reader.stream(find()):
        position = waiting.popleft()
        if is_hole := position in holes:
            holes[position] -= 1
            if not holes[position]:
                del holes[position]
        if (is_hole and errors) or isinstance(item, Exception):
            shard = substitutes.shard_of(position)
            item = errors.get(shard, item)
        if not isinstance(item, Exception):
            yield item, position, is_hole
            continue
        policy.tried = begun - len(waiting)
        if not policy.handle(item, url=reader.url_of(shard)):
            return
        yield _read_substitute(reader, substitutes, position, item) if replaces_errors else None, position, True
        del item  # its frames refer to this one


def _read_substitute(reader: DatasetReader, substitutes: Substitutes, position: int, error: Exception) -> Sample:
    """Return another sample of the epoch; raise the error if there is none."""
    for number in range(1, TRIES + 1):
        for item in reader.stream([substitutes.find_others(np.array([position]), number)]):
            if isinstance(item, dict):
                return item  # errors of other samples are reported at their own positions
    note(error, f"{TRIES} other samples of the epoch were tried as substitutes, but none could be read")
    raise error
