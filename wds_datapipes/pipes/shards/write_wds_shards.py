"""The stage that writes shards. It imports the writer when it is used, because most programs only read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from wds_datapipes.arguments import check_call
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.instance import instance_of_process
from wds_datapipes.pipes.stage import FunctionStage, register_stage
from wds_datapipes.types import ALONE, Sample, ShardInfo


@register_stage("write_wds_shards")
class SampleWriter(FunctionStage[ShardInfo]):
    """Writes samples to shards, as `ShardWriter` does (functional name: ``write_wds_shards``).

    This is the last stage of a pipeline; it writes while it is iterated. Values are encoded as by ``wds_encode``. If
    iteration stops early or raises an error, finished shards remain and unfinished ones are removed, with a
    warning unless an error is raised.

    Workers and ranks that share the data through ``sharding_filter`` write separate shards. In the pattern,
    ``{worker}`` and ``{rank}`` are replaced by numbers, and each writer counts from ``start_shard``. Writers with the
    same pattern interleave their numbers: the second of four workers writes the numbers 1, 5, 9 and so on. Some numbers
    may then be missing at the end; a directory or ``*`` lists the existing shards. Each writer has its own journal,
    whose path (``resume="PATH"``) may contain the same fields, so ``resume`` requires the same numbers of workers and
    ranks as before.

    Yields:
        ShardInfo: the name of each finished shard, its number of samples, its size in bytes, and, with ``digest=True``,
            its digest.

    Args:
        source: yields samples.
        pattern: the path or URL, with ``%06d`` or similar for the number.
        maxcount: the maximum number of samples in a shard.
        maxsize: the maximum size of a shard before compression, in bytes; a single sample may be larger.
        start_shard: the first number.
        on_error: ``"raise"``; or, to skip samples that cannot be encoded or would be read back differently,
            ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        options: other arguments of `ShardWriter`, except ``share``: ``resume``, ``compress``, ``encoder`` and so on.

    Raises:
        EncodeError: a value does not fit the field's name; or a sample would be read back differently.
        ShardWriteError: a shard cannot be written.
        StateError: ``resume`` is set, but the journal belongs to another conversion.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": f"{n:03d}", "txt": "a cat", "cls": n} for n in range(5)])
        >>> for shard in samples.write_wds_shards("train-%03d.tar", maxcount=3):
        ...     print(shard.url, shard.samples, shard.bytes)
        train-000.tar 3 7168
        train-001.tar 2 5120
    """

    is_stateless = False
    holds_items = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        pattern: str | os.PathLike[str],
        *,
        maxcount: float = 100_000,
        maxsize: float = 3e9,
        start_shard: int = 0,
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        from wds_datapipes.writing.shard_writer import ShardWriter

        written = {"maxcount": maxcount, "maxsize": maxsize, "start_shard": start_shard, **options}
        super().__init__(source, pattern=os.fspath(pattern), on_error=on_error, **written)
        # This checks all arguments; no file is opened before the first sample.
        if "share" in options:
            raise TypeError(
                ".write_wds_shards() takes no share=, because the loader tells each writer its rank and worker"
            )
        check_call(".write_wds_shards()", ShardWriter.__init__, (None, pattern), written, hidden=1)
        ShardWriter(pattern, **{**written, "resume": False}, share=ALONE).close()

    def check_position(self) -> None:
        """Refuse a position.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"{name_of(self)} has no position in the shards. Resume with write_wds_shards(resume=True), which keeps a "
            "journal of the finished shards"
        )

    def replay_obstacle(self, stages: Sequence[Any]) -> str:  # noqa: ARG002
        """Return why an epoch cannot be replayed."""
        return "would write its samples again"

    @staticmethod
    def function(source: Iterable[Sample], pattern: str, **options: Any) -> Iterator[ShardInfo]:
        """Write the samples and yield each finished shard."""
        from wds_datapipes.writing.shard_writer import write_wds_shards

        return write_wds_shards(source, pattern, **options)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        return {**super().function_options(), "share": instance_of_process(self.source)}
