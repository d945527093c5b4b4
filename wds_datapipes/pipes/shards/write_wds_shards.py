"""The stage that writes shards. It imports the writer when it is used, because most programs only read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.instance import instance_of_process
from wds_datapipes.pipes.roles import Buffer
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.types import Sample, ShardInfo

if TYPE_CHECKING:
    from wds_datapipes.writing.options import WriteOptions
    from wds_datapipes.writing.shard_writer import OldShards


class SampleWriter(Buffer, FunctionStage[ShardInfo]):
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
        ShardInfo: the name of each finished shard, its number of samples, its size in bytes, and, with ``digest``,
            its digest.

    Args:
        source: yields samples.
        pattern: the path or URL, with ``%06d`` or similar for the number.
        maxcount: the maximum number of samples in a shard.
        maxsize: the maximum size of a shard before compression, in bytes; a single sample may be larger.
        post: called with the name of each finished shard, for example to upload it.
        start_shard: the first number.
        verbose: log a line for each shard to the logger ``wds_datapipes``, at the level INFO.
        opener: a function that returns a writable stream for a name; the writer closes it.
        on_error: ``"raise"``; or, to skip samples that cannot be encoded or would be read back differently,
            ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        old_shards: what to do with the additional shards of an earlier, longer run: ``"warn"``, ``"remove"`` them, or
            ``"keep"`` them.
        resume: keep a journal, and resume from it if it exists: ``True`` for a file next to local shards, or the path
            of a local file.
        options: how the bytes of the shards are written: ``WriteOptions(compress=, encoder=, index=...)``.

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

    def __init__(
        self,
        source: IterDataPipe[Sample],
        pattern: str | os.PathLike[str],
        *,
        maxcount: float = 100_000,
        maxsize: float = 3e9,
        post: Callable[[str], object] | None = None,
        start_shard: int = 0,
        verbose: bool = True,
        opener: Callable[[str], BinaryIO] | None = None,
        on_error: OnError = "raise",
        old_shards: OldShards = "warn",
        resume: bool | str | os.PathLike[str] = False,
        options: WriteOptions | None = None,
    ) -> None:
        from wds_datapipes.writing.options import DEFAULT_WRITING
        from wds_datapipes.writing.shard_writer import ShardWriter

        written: dict[str, Any] = {
            "maxcount": maxcount,
            "maxsize": maxsize,
            "post": post,
            "start_shard": start_shard,
            "verbose": verbose,
            "opener": opener,
            "old_shards": old_shards,
            "options": DEFAULT_WRITING if options is None else options,
        }
        super().__init__(source, pattern=os.fspath(pattern), on_error=on_error, resume=resume, **written)
        ShardWriter(pattern, **written).close()  # checks the arguments; no file is opened before the first sample

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
