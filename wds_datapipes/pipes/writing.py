"""The stage that writes shards."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

from torch import distributed
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.sharding import groups_of, place_in, splitters
from wds_datapipes.pipes.stage import OpaqueValue, Stage, register_stage
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.journal import compare_journals
from wds_datapipes.writing.shard_names import check_pattern, deal_numbers, journals_of_all
from wds_datapipes.writing.shard_writer import ShardWriter, write_wds_shards

__all__ = ["SampleWriter"]


@register_stage("write_wds_shards")
class SampleWriter(Stage[ShardInfo]):
    """Writes samples to shards, as `ShardWriter` does (functional name: ``write_wds_shards``).

    It is the end of a pipeline, which has to be iterated to be written. Values are encoded as ``wds_encode`` does.
    A loader that breaks off, or an error, leaves the finished shards, and nothing of the others.

    In several workers and ranks, which share the data by ``sharding_filter``, each writes shards of its own. Where the
    pattern has ``{worker}`` and ``{rank}``, these become numbers, and each counts from ``start_shard``. What the
    pattern does not tell apart takes turns: of four workers, the second writes the numbers 1, 5, 9 and so on. Then
    numbers may be missing at the end; a directory or ``*`` lists the shards that there are. A ``journal`` may have the
    fields too. Each writer has its own, so ``resume=True`` goes on with as many workers and ranks as before, and
    another number of them is an error.

    Yields:
        ShardInfo: of each shard, when it is finished: its name, how many samples and bytes it has, and its digest.

    Args:
        source: samples.
        pattern: path or URL with ``%06d`` or the like for the number.
        maxcount: how many samples a shard has at the most.
        maxsize: how many bytes a shard has at the most before it is compressed; a single sample may be larger.
        start_shard: the first number.
        on_error: ``"raise"``; or, to pass over samples that cannot be encoded or would be read back as others,
            ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        options: the other arguments of `ShardWriter`: ``resume``, ``compress``, ``encoder``, ``post`` and so on.

    Raises:
        EncodeError: a value is not what the field's name says.
        UnwritableSampleError: a sample would be read back as another.
        ShardWriteError: a shard cannot be written.
        StateError: a conversion is resumed, and was another one.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": f"{n:03d}", "txt": "a cat", "cls": n} for n in range(5)])
        >>> for shard in samples.write_wds_shards("train-%03d.tar", maxcount=3):
        ...     print(shard.url, shard.samples, shard.bytes)
        train-000.tar 3 7168
        train-001.tar 2 5120
    """

    def __init__(
        self,
        source: IterDataPipe[Sample],
        pattern: str | os.PathLike[str],
        *,
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        start_shard: int = 0,
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        self.source = source
        self.pattern = check_pattern(pattern, maxcount=maxcount, maxsize=maxsize)
        self.maxcount = maxcount
        self.maxsize = maxsize
        self.start_shard = start_shard
        self.on_error = on_error
        unknown = sorted(set(options) - set(inspect.signature(ShardWriter).parameters))
        if unknown or "step" in options:
            raise TypeError(f"write_wds_shards takes the arguments of ShardWriter but step, and no {unknown or 'step'}")
        # Out of sight of torch: there may be credentials, and functions that do not pickle.
        self._options = OpaqueValue(options)
        # Checks all arguments; nothing is opened before the first sample.
        limits = {"maxcount": maxcount, "maxsize": maxsize, "start_shard": start_shard}
        ShardWriter(pattern, **limits, **{**options, "resume": False}).close()  # type: ignore[arg-type]  # mypy mixes the types

    def __iter__(self) -> Iterator[ShardInfo]:
        place = _place_among_all(self.source)
        pattern, start_shard, step = deal_numbers(self.pattern, self.start_shard, **place)
        options = dict(self._options.value)
        if options.get("resume"):
            # With another number of writers, each would get other samples, also one with the same pattern and step.
            writers = f"{place['workers']} workers on each of {place['ranks']} ranks"
            tag = options.get("version_tag")
            options["version_tag"] = f"{tag}; {writers}" if tag else writers
            compare_journals(
                journals_of_all(self.pattern, options.get("journal")),
                {"step": step, "version_tag": options["version_tag"]},
            )
        if (journal := options.get("journal")) is not None:
            options["journal"], _, _ = deal_numbers(os.fspath(journal), 0, **place)
        yield from write_wds_shards(
            self.source,
            pattern,
            maxcount=self.maxcount,
            maxsize=self.maxsize,
            start_shard=start_shard,
            step=step,
            on_error=self.on_error,
            **options,
        )


def _place_among_all(pipe: IterDataPipe[Any]) -> dict[str, int]:
    """Return rank and worker, and how many of each there are, as a stage that splits the data knows or torch does."""
    groups = next((groups for stage in splitters(pipe) if (groups := groups_of(stage))), None)
    if groups:
        place = place_in(groups)
        instances, _ = groups.get(SHARDING_PRIORITIES.DEFAULT, (0, 0))
        ranks, _ = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
        ranks = max(instances // place.workers, 1) if instances else ranks
        return {"rank": place.rank, "ranks": ranks, "worker": place.worker, "workers": place.workers}
    info = get_worker_info()
    found = {"rank": 0, "ranks": 1, "worker": info.id if info else 0, "workers": info.num_workers if info else 1}
    if distributed.is_available() and distributed.is_initialized():
        found.update(rank=distributed.get_rank(), ranks=distributed.get_world_size())
    return found
