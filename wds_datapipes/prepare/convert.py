"""The conversion of many shards, in parallel, which goes on after any break."""

from __future__ import annotations

import inspect
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from typing import Any, Literal, NamedTuple, TypeAlias

from wds_datapipes.codecs.decoding import Decoder
from wds_datapipes.errors import (
    ConversionError,
    StateError,
)
from wds_datapipes.fingerprint.values import fingerprint
from wds_datapipes.index.build_many import build_indexes
from wds_datapipes.index.file_format import index_url
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.sinks import size_of
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, listed_shards
from wds_datapipes.prepare.shard_converter import ShardConverter, output_names, version_of
from wds_datapipes.prepare.shard_run import DETERMINISTIC_ERRORS, REQUESTS_AT_ONCE, ShardRun
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_names import journal_path
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["ConvertedShard", "convert_shards"]

LOG = logging.getLogger("wds_datapipes")

Function: TypeAlias = Callable[[Sample], "Sample | Iterable[Sample] | None"]
WholeShards: TypeAlias = "Callable[[Iterator[Sample]], Iterable[Sample]]"
IfChanged: TypeAlias = Literal["raise", "redo", "keep"]

#: How many failures a message tells.
TOLD = 10


class ConvertedShard(NamedTuple):
    """A shard that was converted, now or before.

    Attributes:
        source: the shard that was read.
        info: what was written.
        read: how many samples were read.
        is_new: whether this call has converted it.
        skipped: how many faults ``on_error`` has passed over: bad samples, and the rest of a shard that breaks off.
    """

    source: str
    info: ShardInfo
    read: int
    is_new: bool
    skipped: int = 0


def convert_shards(
    function: Function | WholeShards,
    shards: Shards,
    output: str | os.PathLike[str],
    *,
    whole_shards: bool = False,
    decode: Sequence[Decoder] | None = None,
    key_rule: KeyRule = first_dot,
    on_error: OnError = "raise",
    retries: int = 2,
    if_changed: IfChanged = "raise",
    executor: Executor | None = None,
    max_workers: int | None = None,
    on_result: Callable[[ConvertedShard], object] | None = None,
    journal: str | os.PathLike[str] | None = None,
    remove_old: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    output_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
    **options: Any,
) -> list[ConvertedShard]:
    """Map all samples of many shards, several shards at once, and write a shard for each.

    Each shard appears when it is whole, also one without samples, so that the numbers have no gaps. One that fails, or
    whose process is lost, is tried again after the others. What fails for good is named at the end, and the others are
    converted all the same.

    A journal has a line for each finished shard, and a second call converts only those that are missing: that have no
    line, or are not there with the size that they had. What an interrupted conversion and a second call write is the
    same, byte for byte, as that of one call, if the function does the same with the same sample. Two conversions cannot
    have one journal at a time.

    Args:
        function: gets a sample and returns a sample, ``None`` to drop it, or several samples, as a generator does.
        shards: a pattern as `ShardList` takes it, but for variables, or an iterable of URLs, such as a `ShardList`.
        output: a folder, with a slash at its end unless it is there, for shards of the same names; a pattern with
            ``{name}`` for the name without ``.tar`` and the like; or one with ``%06d`` for the number. Local folders
            are made. Shards that are there and not in the journal are written over.
        whole_shards: the function gets an iterator of all samples of a shard, and yields samples.
        decode: decode the fields before, as ``wds_decode`` does with these words and functions; ``[]`` for none but
            the basic ones. Without it, all fields are bytes.
        key_rule: splits names, when shards are read and written.
        on_error: what to do about samples that cannot be read, mapped or written, and about shards that break off, as
            in all stages. What is passed over is missing for good, as its shard counts as finished.
        retries: how often a shard is tried again, unless the error is one of the function or of what it returns, such
            as a TypeError or an EncodeError.
        if_changed: what to do if finished shards were made by another function or other options, or of another input:
            ``"raise"``, ``"redo"`` these, or ``"keep"`` them. A function is the same if its code, its defaults and what
            it has closed over are; the functions that it calls are not looked at. An input is the same if its name, its
            size and its date, or what its store tells in place of that, are.
        executor: any executor of `concurrent.futures`, such as Dask's ``client.get_executor()``, or ``mpi4py``'s. The
            function is pickled then. By default there are forked processes.
        max_workers: how many processes, if not one for each processor; 0 is this one itself. For an executor, how
            many shards it is given at once, of which it may work on fewer.
        on_result: is called here for each shard that is finished, in any order; first for those that were before.
        journal: the path of the journal, a local file; for local shards, it is beside them by default.
        remove_old: with numbered shards, remove those of an earlier run that had more of them, when all are converted.
            Otherwise they are an error, before anything is written.
        storage_options: passed to remote file systems.
        output_options: passed to those of the output instead, if they are others.
        limits: what the shards that are read may ask for, see `ReadLimits`.
        options: the other arguments of `TarWriter`: ``compress``, ``encoder``, ``index`` and so on. ``digest`` is true
            by default. With ``index=True``, shards that were finished before get an index too, if they have none.

    Returns:
        All shards, in the order of the input.

    Raises:
        ConversionError: some shards could not be converted; its ``failures`` has the error of each.
        StateError: finished shards were made of something else, or another process has the journal.
        ShardWriteError: the journal cannot be written.
        ValueError: several shards would have one name, or an input would be written over.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": str(n)} for n in range(3)])
        >>> def odd(sample):
        ...     return sample if int(sample["cls"]) % 2 else None
        >>> for shard in convert_shards(odd, "{a,b}.tar", "odd/"):
        ...     print(shard.source, shard.read, shard.info.url, shard.info.samples, shard.is_new)
        a.tar 3 odd/a.tar 1 True
        b.tar 3 odd/b.tar 1 True
        >>> [shard.is_new for shard in convert_shards(odd, "{a,b}.tar", "odd/")]
        [False, False]
    """
    check_on_error(on_error)
    if if_changed not in ("raise", "redo", "keep"):
        raise ValueError(f'if_changed is "raise", "redo" or "keep", not {if_changed!r}')
    if not callable(function):
        raise TypeError(f"convert_shards takes a function of a sample, not {function!r}")
    if retries < 0 or (max_workers is not None and max_workers < (executor is not None)):
        raise ValueError(f"retries and max_workers are numbers from 0, not {retries} and {max_workers}")
    urls = listed_shards(shards)
    pattern, places = output_names(urls, output)
    made_by = fingerprint(function, whole_shards, decode, key_rule)
    written_by = fingerprint({name: value for name, value in sorted(options.items()) if name != "index"})
    output_options = storage_options if output_options is None else output_options
    converter = ShardConverter(
        function,
        whole_shards=whole_shards,
        decode=decode,
        key_rule=key_rule,
        on_error=on_error,
        storage_options=storage_options,
        limits=limits,
        writing=_checked_options({"digest": True, **options, "key_rule": key_rule, "storage_options": output_options}),
    )
    path = journal_path(pattern.replace("{name}", "shards"), journal, 0, 1)
    results: dict[int, ConvertedShard] = {}
    failures: dict[str, BaseException] = {}

    def take(number: int, info: ShardInfo, read: int, skipped: int, is_new: bool) -> None:
        results[number] = ConvertedShard(urls[number], info, read, is_new, skipped)
        if on_result is not None:
            on_result(results[number])

    made_of = f"{made_by} {written_by}"
    with ShardRun(
        places, pattern, journal=path, of="convert_shards", remove_old=remove_old, storage_options=output_options
    ) as run:
        kept, others = run.find_finished(
            lambda number: None if if_changed == "keep" else f"{made_of} {version_of(urls[number], storage_options)}"
        )
        if others and if_changed == "raise":
            raise _changed_error(path, {urls[number]: identities for number, identities in others.items()})
        for number, shard in kept.items():
            take(number, shard.info, shard.given, shard.skipped, False)
        if options.get("index"):
            _index([places[number] for number in kept], key_rule, executor, max_workers, output_options)
        tasks = {number: (urls[number], places[number]) for number in range(len(urls)) if number not in kept}
        names = [redact(url) for url in urls]
        with closing(
            run.write(converter, tasks, executor=executor, max_workers=max_workers, retries=retries, names=names)
        ) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, BaseException):
                    failures[urls[number]] = outcome
                    continue
                run.record(number, outcome, f"{made_of} {outcome.version}")
                take(number, outcome.info, outcome.read, outcome.skipped, True)
        if failures:
            raise _conversion_error(failures, len(urls), retries)
        run.remove_old()
    return [results[number] for number in sorted(results)]


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse options of the writer that it does not have, or that make no sense, before the first shard."""
    unknown = sorted(set(options) - set(inspect.signature(TarWriter).parameters) | {"target"} & set(options))
    if unknown:
        raise TypeError(f"convert_shards has no argument {unknown[0]!r}, and neither has TarWriter")
    TarWriter(io.BytesIO(), **{**options, "index": False}).discard()
    return options


def _changed_error(path: str, others: Mapping[str, tuple[str, str]]) -> StateError:
    told = [f"{redact(url)} ({_difference(then, now)})" for url, (then, now) in list(others.items())[:TOLD]]
    more = f", and {len(others) - TOLD} more" if len(others) > TOLD else ""
    return StateError(
        f"The journal {path!r} has shards that were made otherwise: {', '.join(told)}{more}. Pass "
        f'if_changed="redo" to convert these again, if_changed="keep" to leave them as they are, or name another '
        f"output"
    )


def _index(
    places: Sequence[str],
    key_rule: KeyRule,
    executor: Executor | None,
    max_workers: int | None,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Write the indexes of finished shards that have none, as they were not asked for before."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        sizes = pool.map(lambda place: size_of(index_url(place), storage_options), places)
        lacking = [place for place, size in zip(places, sizes, strict=True) if size is None]
    settings: dict[str, Any] = {"key_rule": key_rule, "storage_options": storage_options}
    build_indexes(
        lacking, executor=executor, max_workers=1 if max_workers == 0 else max_workers, digest=True, **settings
    )


def _difference(then: str, now: str) -> str:
    names = ("another function", "other options", "the input has changed")
    parts = zip(names, then.split(" ", 2), now.split(" ", 2), strict=False)
    return ", ".join(name for name, before, after in parts if before != after)


def _conversion_error(failures: Mapping[str, BaseException], shards: int, retries: int) -> ConversionError:
    told = [f"{redact(url)}: {type(error).__name__}: {error}" for url, error in list(failures.items())[:TOLD]]
    more = [f"and {len(failures) - TOLD} more"] if len(failures) > TOLD else []
    was_tried_again = not all(isinstance(failure, DETERMINISTIC_ERRORS) for failure in failures.values())
    tries = f" in {retries + 1} attempts" if was_tried_again else ""
    error = ConversionError(
        f"{len(failures)} of {shards} shards were not converted{tries}. The others are "
        f"finished, and the same call converts only what is missing.\n" + "\n".join([*told, *more])
    )
    error.failures = dict(failures)
    error.__cause__ = next(iter(failures.values()))
    return error
