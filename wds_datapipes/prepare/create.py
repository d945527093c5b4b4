"""Create shards from a source of samples: plan them first, then write them in parallel."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from wds_datapipes.codecs.decoding import Decoder
from wds_datapipes.errors import EmptySourceError, WorkerDiedError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.prepare.plan import check_new_key, make_plan
from wds_datapipes.prepare.sample_spec import Source
from wds_datapipes.prepare.shard_maker import SampleMaker, ShardMaker
from wds_datapipes.prepare.shard_run import ShardRun
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_names import NUMBER, check_pattern, journal_path
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["CreateProgress", "CreatedShard", "create_shards"]


class CreatedShard(NamedTuple):
    """A shard written by this call or an earlier one."""

    info: ShardInfo
    is_new: bool


class CreateProgress(Protocol):
    """Receives progress reports."""

    def on_measured(self, samples: int, size: int, /) -> object:
        """More samples were measured, with files of ``size`` bytes in total."""

    def on_planned(self, shards: int, samples: int, /) -> object:
        """The plan is complete: all samples were assigned to shards."""

    def on_written(self, shards: int, samples: int, size: int, /) -> object:
        """More shards, samples and bytes were written."""


def create_shards(
    source: Source,
    output: str | os.PathLike[str],
    *,
    maxcount: int = 100_000,
    maxsize: float = 3e9,
    function: Callable[[Sample], Sample | Iterable[Sample] | None] | None = None,
    decode: Sequence[Decoder] | None = None,
    rekey: str = "",
    seed: int | None = None,
    key_rule: KeyRule = first_dot,
    on_error: OnError = "raise",
    remove_old: bool = False,
    max_workers: int | None = None,
    resume: bool = False,
    journal: str | os.PathLike[str] | None = None,
    progress: CreateProgress | None = None,
    **options: Any,
) -> list[CreatedShard]:
    """Write the samples of a source to shards in parallel.

    All samples are measured and assigned to shards first, so each shard has the same bytes regardless of the number of
    workers, and the same as from `ShardWriter`. A shard appears when it is complete: after an error or Ctrl-C, finished
    shards remain, and no partial ones.

    Args:
        source: the samples.
        output: a pattern such as ``%06d.tar``. Without a placeholder for the number, one archive of any size is
            written. Local folders are created.
        maxcount: the maximum number of samples in a shard.
        maxsize: the maximum size of a shard in bytes, including headers and before compression; a single sample may be
            larger. The output of commands counts as 0 bytes; with a function, the size of its input counts.
        function: maps each sample to a sample, ``None`` to drop it, or several samples. Values are encoded by the names
            of their fields. Without a function, files are written unchanged.
        decode: decode the fields first, with these decoders as in ``wds_decode``; ``[]`` uses the basic decoders alone.
            By default, the function gets bytes.
        rekey: a pattern for new keys with ``{number}``, the position in the source, ``{key}``, and ``{name}``, the last
            part of the key.
        seed: shuffle the samples with this seed.
        key_rule: splits member names into keys and fields when the shards are read.
        on_error: how to handle samples that cannot be written, as in all stages. A sample skipped during writing is
            missing from its shard; other shards are not affected.
        remove_old: remove surplus shards of an earlier, larger run after the new ones are written. By default, they
            raise an error before anything is written.
        max_workers: the number of worker processes, by default one per CPU; 0 writes in this process.
        resume: record finished shards in a journal next to them, and write only those that are missing or outdated.
        journal: the local path of the journal, required for remote shards.
        progress: receives progress reports.
        options: options of `TarWriter`: ``compress``, ``encoder``, ``index``, ``digest`` and ``storage_options``.

    Returns:
        All shards, in order.

    Raises:
        EmptySourceError: the source has no samples.
        SampleSourceError: the files of a sample cannot be read, or the function fails.
        EncodeError: a sample would not be read back unchanged.
        ShardWriteError: a shard cannot be written.
        WorkerDiedError: a process ended without a result.
        ValueError: an argument is invalid.

    Examples:
        >>> from pathlib import Path
        >>> from wds_datapipes.prepare.sources.image_folder import find_images
        >>> for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        ...     Path("pets", name).parent.mkdir(parents=True, exist_ok=True)
        ...     _ = Path("pets", name).write_bytes(b"not really an image")
        >>> [(shard.info.url, shard.info.samples) for shard in create_shards(find_images("pets"), "%d.tar", maxcount=2)]
        [('0.tar', 2), ('1.tar', 1)]
        >>> [(sample["__key__"], sample["cls"]) for sample in ShardList("1.tar").load_wds_shards().group_samples()]
        [('dog/1', b'1')]
    """
    check_on_error(on_error)
    if rekey:
        check_new_key(rekey)
    text = os.fspath(output)
    is_one = not NUMBER.search(text)
    if not is_one:
        check_pattern(text, maxcount=maxcount, maxsize=maxsize)
    workers = len(os.sched_getaffinity(0)) if max_workers is None else max_workers
    if is_one or (max_workers is None and workers == 1):
        workers = 0  # a single archive may be standard output
    if workers < 0:
        raise ValueError(f"max_workers must be at least 0, not {workers}")
    if decode is not None and function is None:
        raise ValueError(
            "decode requires a function, which gets the decoded values. Without one, files are written unchanged"
        )
    make = None if function is None else SampleMaker(function, decode)
    writing = {"encoder": make is not None, "key_rule": key_rule, **options}
    TarWriter(io.BytesIO(), **{**writing, "index": False}).discard()  # rejects invalid options early
    policy = ErrorPolicy(on_error, "create_shards")
    on_measured = None if progress is None else progress.on_measured
    plan = make_plan(
        source,
        maxcount=2**62 if is_one else maxcount,
        maxsize=float("inf") if is_one else maxsize,
        rekey=rekey,
        seed=seed,
        key_rule=key_rule,
        policy=policy,
        on_measured=on_measured,
    )
    if not plan.order:
        raise EmptySourceError(f"There are no samples to write to {text!r}: the source has none that can be written")
    outputs = [text if is_one else text % number for number in range(len(plan.ends))]
    storage_options = options.get("storage_options")
    path = journal_path(text, journal, 0, 1) if resume or journal else None
    work = ShardMaker(source, plan, outputs, rekey, make, writing, on_error)
    run_options: dict[str, Any] = {
        "kind": "create_shards",
        "remove_old": remove_old,
        "storage_options": storage_options,
    }
    with ShardRun(outputs, text, journal=path, **run_options) as run:
        identities = {number: work.compute_identity(number) for number in range(len(outputs)) if path is not None}
        finished, _ = run.find_finished(identities.__getitem__)
        results = {number: CreatedShard(shard.info, False) for number, shard in finished.items()}
        if progress is not None:
            progress.on_planned(len(outputs), len(plan.order))
            for shard in results.values():
                progress.on_written(1, shard.info.samples, shard.info.bytes)
        tasks = {number: (number,) for number in range(len(outputs)) if number not in results}
        with closing(run.write(work, tasks, max_workers=workers)) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, WorkerDiedError):
                    raise WorkerDiedError(
                        f"{outcome}, while writing {work.describe_output(number)}. Finished shards remain"
                    )
                if isinstance(outcome, BaseException):
                    raise outcome
                if progress is not None:
                    progress.on_written(1, outcome.info.samples, outcome.info.bytes)
                for error in outcome.errors:
                    policy.handle(error)
                run.record(number, outcome, identities.get(number, ""))
                results[number] = CreatedShard(outcome.info, True)
        run.remove_old()
    policy.finish()
    return [results[number] for number in sorted(results)]
