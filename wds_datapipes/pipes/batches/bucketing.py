"""The stage that makes batches of samples of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wds_datapipes.arguments import check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.batches.buffering import BufferingStage
from wds_datapipes.pipes.stage import position_reader_of, register_stage
from wds_datapipes.samples.bucketing import Length, LengthBuckets, bucket_samples


@register_stage("bucket_samples")
class SampleBucketer(BufferingStage[list[Any]]):
    """Batch samples of similar length, so that they need little padding (functional name: ``bucket_samples``).

    Samples wait in the bucket of their length until it has a batch. A bucket holds less than one batch, so the number
    of samples that are held is bounded. At the end of the epoch, the rest of each bucket is a batch, from the shortest
    lengths to the longest.

    torchdata's ``.max_token_bucketize()`` drops samples that are too long without a message, and always yields the
    shortest samples that it holds; ``.bucketbatch()`` knows no tokens. Both resume only by replay. This stage has a
    state: a run resumes with the same batches. Put it last, before ``.collate()``: a shuffle after it would have no
    position.

    The number of batches depends on the lengths, so ranks may have different numbers of them. ``.with_epoch(n)`` makes
    them equal; and `IndexedSamples` makes equal batches of similar length with ``bucket_by``.

    Yields:
        list: the samples of a batch, unchanged and in the order in which they were read.

    Args:
        source: yields samples, or anything else if ``length`` is a function.
        length: the length of a sample: the name of a field that is an integer or has a ``len()``; or a function of the
            sample that returns an integer.
        boundaries: the longest length of each bucket, in ascending order. Longer samples share another bucket. By
            default, there are four buckets between powers of two: 1, 2, ..., 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, and
            so on. Wider buckets leave more padding, and hold fewer samples.
        batch_size: the most samples in a batch.
        max_tokens: the most tokens in a padded batch: its longest length times its number of samples. One of
            ``batch_size`` and ``max_tokens`` is needed; with both, a batch respects both.
        drop_last: drop the batches that are not full at the end of the epoch.
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

    draws_globally = True

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
        super().__init__()
        check_on_error(on_error)
        if not isinstance(length, str) and not callable(length):
            raise TypeError(f"length must be the name of a field or a function of the sample, not {length!r}")
        self.source = source
        self.length = length
        self.boundaries = None if boundaries is None else tuple(np.asarray(boundaries).tolist())
        self.batch_size = check_optional_integer("batch_size", batch_size, 1)
        self.max_tokens = check_optional_integer("max_tokens", max_tokens, 1)
        self.drop_last = drop_last
        self.on_error = on_error
        self._buckets()  # checks the boundaries

    def _buckets(self) -> LengthBuckets:
        return LengthBuckets(self.boundaries, self.batch_size, self.max_tokens)

    def __iter__(self) -> Iterator[list[Any]]:
        yield from bucket_samples(
            self.source,
            self._buckets(),
            length_of=self.length,
            drop_last=self.drop_last,
            on_error=self.counted_errors,
            buffer=self._begin_buffer(),
            position=position_reader_of(self.source),
        )
