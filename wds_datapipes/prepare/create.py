"""The creation of shards from files: a plan, and processes that each write whole shards of it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, Protocol

from wds_datapipes.codecs.decoding import Decoder
from wds_datapipes.errors import EmptySourceError, WorkerDiedError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.prepare.plan import check_new_key, make_plan
from wds_datapipes.prepare.sample_function import SampleMaker
from wds_datapipes.prepare.sample_spec import Source
from wds_datapipes.prepare.shard_maker import ShardMaker
from wds_datapipes.prepare.shard_run import ShardRun
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_names import NUMBER, check_pattern, journal_path
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["CreateProgress", "CreatedShard", "create_shards"]


class CreatedShard(NamedTuple):
    """A shard that was written, now or by an earlier call."""

    info: ShardInfo
    is_new: bool


class CreateProgress(Protocol):
    """Is told how the work goes on."""

    def looked(self, samples: int, size: int, /) -> object:
        """So many more samples were looked at, whose files have so many bytes."""

    def planned(self, shards: int, samples: int, /) -> object:
        """All samples were looked at: so many shards are to be written."""

    def wrote(self, shards: int, samples: int, size: int, /) -> object:
        """So much more was written."""


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
    watcher: CreateProgress | None = None,
    **options: Any,
) -> list[CreatedShard]:
    """Write the samples of a source to shards, several shards at once.

    All files are looked at first, and then each shard is planned: it has the same bytes, whoever writes it, and the
    same as `ShardWriter` would give it. Each appears when it is whole. When an error or Ctrl-C ends this, the finished
    ones stay, and nothing is left of others.

    Args:
        source: the samples.
        output: a pattern with ``%06d`` or the like. Without a place for the number there is one archive, of any size.
            Local folders are made.
        maxcount: how many samples a shard has at the most.
        maxsize: how many bytes, before it is compressed, with all headers; a single sample may be larger. What commands
            will print is not known before, and counts as nothing; of what a function makes anew, the files count that
            it is made of.
        function: gets each sample before it is written, and returns a sample, ``None`` to drop it, or several samples.
            Values are encoded by the names of their fields. Without it, all files are written as they are.
        decode: decode the fields before, as ``wds_decode`` does with these words and functions; ``[]`` for none but
            the basic ones. Without it, the function gets bytes.
        rekey: a pattern for new keys, of ``{number}``, which counts the samples of the source, ``{key}`` and
            ``{name}``, the last part of the key.
        seed: shuffle the samples; another seed gives another order.
        key_rule: how the shards will be read.
        on_error: what to do about samples that cannot be written, as in all stages. What is passed over while a shard
            is written is missing there, and changes no other shard.
        remove_old: remove the shards of an earlier run that had more of them, when the new ones are written. Otherwise
            they are an error, before anything is written.
        max_workers: how many processes write, if not one for each processor; 0 is this one itself.
        resume: keep a journal of finished shards beside them, and write only those that are missing, or would be others
            now.
        journal: the path of the journal, a local file, which has to be told for shards that are not local.
        watcher: is told how the work goes on.
        options: those of `TarWriter`: ``compress``, ``encoder``, ``index``, ``digest`` and ``storage_options``.

    Returns:
        All shards in their order.

    Raises:
        EmptySourceError: there is no sample.
        SampleSourceError: what a sample is to be made of cannot be read, or its function fails.
        UnwritableSampleError: a sample would be read back as another.
        ShardWriteError: a shard cannot be written.
        WorkerDiedError: a process has ended without a result.
        ValueError: an argument makes no sense.

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
        workers = 0  # one archive may be this process's standard output
    if workers < 0:
        raise ValueError(f"max_workers is a number from 0, not {workers}")
    if decode is not None and function is None:
        raise ValueError("decode is for a function, which gets the values. Without one, files are written as they are")
    make = None if function is None else SampleMaker(function, decode)
    writing = {"encoder": make is not None, "key_rule": key_rule, **options}
    TarWriter(io.BytesIO(), **{**writing, "index": False}).discard()  # refuses options before all files are looked at
    policy = ErrorPolicy(on_error, "create_shards")
    looked = None if watcher is None else watcher.looked
    plan = make_plan(
        source,
        maxcount=2**62 if is_one else maxcount,
        maxsize=float("inf") if is_one else maxsize,
        rekey=rekey,
        seed=seed,
        key_rule=key_rule,
        policy=policy,
        on_looked=looked,
    )
    if not plan.order:
        raise EmptySourceError(
            f"There is no sample to write to {text!r}, as there is none in its source that can be written"
        )
    places = [text if is_one else text % number for number in range(len(plan.ends))]
    storage_options = options.get("storage_options")
    path = journal_path(text, journal, 0, 1) if resume or journal else None
    work = ShardMaker(source, plan, places, rekey, make, writing, on_error)
    run_options: dict[str, Any] = {"of": "create_shards", "remove_old": remove_old, "storage_options": storage_options}
    with closing(work), ShardRun(places, text, journal=path, **run_options) as run:
        identities = {number: work.made_of(number) for number in range(len(places)) if path is not None}
        finished, _ = run.find_finished(identities.__getitem__)
        results = {number: CreatedShard(shard.info, False) for number, shard in finished.items()}
        if watcher is not None:
            watcher.planned(len(places), len(plan.order))
            for kept in results.values():
                watcher.wrote(1, kept.info.samples, kept.info.bytes)
        tasks = {number: (number,) for number in range(len(places)) if number not in results}
        look = None if watcher is None else partial(_report_progress, work, watcher, [0, 0])
        if not workers:
            work.on_sample = look
        with closing(run.write(work, tasks, max_workers=workers, look=look)) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, WorkerDiedError):
                    raise WorkerDiedError(f"{outcome}, while it wrote {work.place(number)}. Finished shards are there")
                if isinstance(outcome, BaseException):
                    raise outcome
                if look is not None:
                    look(1)
                for error in outcome.errors:
                    policy.goes_on(error)
                run.record(number, outcome, identities.get(number, ""))
                results[number] = CreatedShard(outcome.info, True)
        run.remove_old()
    policy.finish()
    return [results[number] for number in sorted(results)]


def _report_progress(work: ShardMaker, watcher: CreateProgress, reported: list[int], shards: int = 0) -> None:
    """Report the samples and bytes that were written since the last call."""
    samples, size = work.counts()
    watcher.wrote(shards, samples - reported[0], size - reported[1])
    reported[:] = samples, size
