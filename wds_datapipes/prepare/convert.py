"""Convert many shards in parallel, and resume after any interruption."""

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
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.build_many import build_indexes
from wds_datapipes.index.file_format import index_url
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.sinks import size_of
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, resolve_shards
from wds_datapipes.prepare.shard_converter import ShardConverter, get_input_version, make_output_names
from wds_datapipes.prepare.shard_run import DETERMINISTIC_ERRORS, MAX_CONCURRENT_REQUESTS, ShardRun
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.shard_names import journal_path
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["ConvertedShard", "convert_shards"]

LOG = logging.getLogger("wds_datapipes")

Function: TypeAlias = Callable[[Sample], "Sample | Iterable[Sample] | None"]
WholeShards: TypeAlias = "Callable[[Iterator[Sample]], Iterable[Sample]]"
IfChanged: TypeAlias = Literal["raise", "redo", "keep"]

#: The most failures that a message lists.
MAX_LISTED = 10


class ConvertedShard(NamedTuple):
    """A shard converted by this call or an earlier one.

    Attributes:
        source: the shard that was read.
        info: the shard that was written.
        read: the number of samples read.
        is_new: whether this call converted the shard.
        skipped: the number of faults that ``on_error`` skipped: bad samples and the rest of truncated shards.
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
    """Map all samples of many shards in parallel, and write one shard for each.

    A shard appears when it is complete, even without samples, so that the numbers have no gaps. A shard that fails, or
    whose process dies, is retried after the others. Shards that fail for good raise an error at the end, after all
    others are converted.

    A journal records each finished shard, and a second call converts only those that are not in the journal, or do not
    exist with the recorded size. An interrupted and resumed conversion writes the same bytes as an uninterrupted one,
    provided that the function is deterministic. Two conversions cannot use the same journal at the same time.

    Args:
        function: maps a sample to a sample, ``None`` to drop it, or several samples, for example as a generator.
        shards: a pattern as in `ShardList`, but without variables, or an iterable of URLs, such as a `ShardList`.
        output: a folder for shards of the same names, with a slash at the end unless it exists; a pattern with
            ``{name}`` for the name without extensions such as ``.tar``; or one with ``%06d`` for the number. Local
            folders are created. Existing shards that are not in the journal are overwritten.
        whole_shards: the function gets an iterator of all samples of a shard, and yields samples.
        decode: decode the fields first, with these decoders as in ``wds_decode``; ``[]`` uses the basic decoders alone.
            By default, all fields are bytes.
        key_rule: splits member names into keys and fields, for reading and writing.
        on_error: how to handle samples that cannot be read, mapped or written, and truncated shards, as in all stages.
            Skipped samples are missing for good, as their shards count as finished.
        retries: how often a shard is retried, unless the error is deterministic, such as a TypeError of the function.
        if_changed: how to handle finished shards made with a different function, options or input: ``"raise"``,
            ``"redo"`` or ``"keep"`` them. Functions are compared by their code, defaults and closures, but not the
            functions that they call; inputs by name, size and modification time, or the ETag of their store.
        executor: any executor of ``concurrent.futures``, such as Dask's ``client.get_executor()``, or ``mpi4py``'s. The
            function is pickled for it. By default, processes are forked.
        max_workers: the number of worker processes, by default one per CPU; 0 converts in this process. With an
            executor, the number of shards submitted at once.
        on_result: called in this process for each finished shard, in any order, and first for those finished by an
            earlier call.
        journal: the local path of the journal; for local shards, it is next to them by default.
        remove_old: remove surplus numbered shards of an earlier, larger run after all are converted. By default, they
            raise an error before anything is written.
        storage_options: passed to remote file systems.
        output_options: passed to the file system of the output instead, if it differs.
        limits: the limits on memory and header sizes for reading, see `ReadLimits`.
        options: the other arguments of `TarWriter`: ``compress``, ``encoder``, ``index`` and so on. ``digest`` is true
            by default. With ``index=True``, shards finished earlier without an index get one, too.

    Returns:
        All shards, in the order of the input.

    Raises:
        ConversionError: some shards could not be converted; ``failures`` maps them to their errors.
        StateError: finished shards have changed inputs or options, or another process uses the journal.
        ShardWriteError: the journal cannot be written, or the output folder cannot be created.
        ValueError: several shards would have the same name, or an input would be overwritten.

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
        raise ValueError(f'if_changed must be "raise", "redo" or "keep", not {if_changed!r}')
    if not callable(function):
        raise TypeError(f"convert_shards takes a function of a sample, not {function!r}")
    if retries < 0 or (max_workers is not None and max_workers < (executor is not None)):
        raise ValueError(f"retries and max_workers must be at least 0, not {retries} and {max_workers}")
    urls = resolve_shards(shards)
    pattern, outputs = make_output_names(urls, output)
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
        writing=_check_options({"digest": True, **options, "key_rule": key_rule, "storage_options": output_options}),
    )
    path = journal_path(pattern.replace("{name}", "shards"), journal, 0, 1)
    results: dict[int, ConvertedShard] = {}
    failures: dict[str, BaseException] = {}

    def add_result(number: int, info: ShardInfo, read: int, skipped: int, is_new: bool) -> None:
        results[number] = ConvertedShard(urls[number], info, read, is_new, skipped)
        if on_result is not None:
            on_result(results[number])

    identity = f"{made_by} {written_by}"
    with ShardRun(
        outputs, pattern, journal=path, kind="convert_shards", remove_old=remove_old, storage_options=output_options
    ) as run:
        finished, changed = run.find_finished(
            lambda number: (
                None if if_changed == "keep" else f"{identity} {get_input_version(urls[number], storage_options)}"
            )
        )
        if changed and if_changed == "raise":
            raise _changed_error(path, {urls[number]: identities for number, identities in changed.items()})
        for number, shard in finished.items():
            add_result(number, shard.info, shard.given, shard.skipped, False)
        if options.get("index"):
            _index([outputs[number] for number in finished], key_rule, executor, max_workers, output_options)
        tasks = {number: (urls[number], outputs[number]) for number in range(len(urls)) if number not in finished}
        names = [redact(url) for url in urls]
        with closing(
            run.write(converter, tasks, executor=executor, max_workers=max_workers, retries=retries, names=names)
        ) as outcomes:
            for number, outcome in outcomes:
                if isinstance(outcome, BaseException):
                    failures[urls[number]] = outcome
                    continue
                run.record(number, outcome, f"{identity} {outcome.version}")
                add_result(number, outcome.info, outcome.read, outcome.skipped, True)
        if failures:
            raise _conversion_error(failures, len(urls), retries)
        run.remove_old()
    return [results[number] for number in sorted(results)]


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Reject unknown or invalid options of the writer before the first shard."""
    unknown = sorted(set(options) - set(inspect.signature(TarWriter).parameters) | {"target"} & set(options))
    if unknown:
        raise TypeError(f"convert_shards has no argument {unknown[0]!r}, nor does TarWriter")
    TarWriter(io.BytesIO(), **{**options, "index": False}).discard()
    return options


def _changed_error(path: str, others: Mapping[str, tuple[str, str]]) -> StateError:
    shown = [f"{redact(url)} ({_difference(then, now)})" for url, (then, now) in list(others.items())[:MAX_LISTED]]
    more = f", and {len(others) - MAX_LISTED} more" if len(others) > MAX_LISTED else ""
    return StateError(
        f"The journal {path!r} has shards with other inputs or options: {', '.join(shown)}{more}. Pass "
        f'if_changed="redo" to convert them again, if_changed="keep" to keep them, or choose another '
        f"output"
    )


def _index(
    outputs: Sequence[str],
    key_rule: KeyRule,
    executor: Executor | None,
    max_workers: int | None,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Write indexes for finished shards that have none."""
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        sizes = pool.map(lambda output: size_of(index_url(output), storage_options), outputs)
        missing = [output for output, size in zip(outputs, sizes, strict=True) if size is None]
    settings: dict[str, Any] = {"key_rule": key_rule, "storage_options": storage_options}
    build_indexes(
        missing, executor=executor, max_workers=1 if max_workers == 0 else max_workers, digest=True, **settings
    )


def _difference(then: str, now: str) -> str:
    names = ("another function", "other options", "the input has changed")
    parts = zip(names, then.split(" ", 2), now.split(" ", 2), strict=False)
    return ", ".join(name for name, before, after in parts if before != after)


def _conversion_error(failures: Mapping[str, BaseException], shards: int, retries: int) -> ConversionError:
    shown = [f"{redact(url)}: {type(error).__name__}: {error}" for url, error in list(failures.items())[:MAX_LISTED]]
    more = [f"and {len(failures) - MAX_LISTED} more"] if len(failures) > MAX_LISTED else []
    was_retried = not all(isinstance(failure, DETERMINISTIC_ERRORS) for failure in failures.values())
    tries = f" in {retries + 1} attempts" if was_retried else ""
    error = ConversionError(
        f"{len(failures)} of {shards} shards could not be converted{tries}. The others are finished, and calling this "
        f"again converts only the missing ones.\n" + "\n".join([*shown, *more])
    )
    for url, failure in failures.items():
        name = redact(url)
        error.failures[name if name not in error.failures else f"{name} ({len(error.failures)})"] = failure
    error.__cause__ = next(iter(failures.values()))
    return error
