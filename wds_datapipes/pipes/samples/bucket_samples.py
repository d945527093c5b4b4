"""The stage ``.bucket_samples()``: batch samples of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_datapipes.arguments import check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.samples.buffer import BufferingStage
from wds_datapipes.samples.bucketing import Length, LengthBuckets, bucket_samples


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
