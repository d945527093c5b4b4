"""Convert many shards in parallel and resume after interruptions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from wds_datapipes.arguments import check_choice, checks_calls
from wds_datapipes.codecs.decoding import Decoder
from wds_datapipes.errors import ConversionError, ShardOpenError, cause_of, plural
from wds_datapipes.hints import Message
from wds_datapipes.io.compression.formats import strip_shard_suffix
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.prefetch import READ_AHEAD_BYTES
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.parallel.map_shards import Shards, resolve_shards
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.shards.loading import TarOptions, read_shards
from wds_datapipes.signatures import spells_hints
from wds_datapipes.tools.prepare.job_options import DEFAULT_JOB, JobOptions
from wds_datapipes.tools.prepare.shard_run import (
    DETERMINISTIC_ERRORS,
    ConvertedShard,
    IfChanged,
    SampleWork,
    list_some,
    write_shards,
)
from wds_datapipes.types import Sample
from wds_datapipes.writing.options import DEFAULT_WRITING, WriteOptions
from wds_datapipes.writing.shard_names import check_pattern

__all__ = ["ConvertedShard", "IfChanged", "convert_shards", "make_output_names"]

Function: TypeAlias = Callable[[Sample], "Sample | Iterable[Sample] | None"]
WholeShards: TypeAlias = "Callable[[Iterator[Sample]], Iterable[Sample]]"

#: The retries per shard by default.
RETRIES = 2
#: The placeholder for the input's name in a pattern.
NAME = "{name}"


@dataclass(frozen=True)
class ShardSamples:
    """The samples of existing shards."""

    items: Sequence[str]
    options: WriteOptions
    job: JobOptions

    @property
    def _store(self) -> Mapping[str, Any] | None:
        """The storage options of the input."""
        return self.options.storage_options if self.job.input_options is None else self.job.input_options

    def version(self, item: str) -> str:
        """Return a shard's name, size, and ETag or modification time; an empty string if it cannot be opened."""
        try:
            facts = file_facts(item, storage_options=self._store)
        except ShardOpenError:
            return ""
        path = local_path(item)
        name = redact(item) if path is None else os.path.basename(path)  # noqa: PTH119  of a string
        return f"{name}:{facts.bytes}:{facts.etag or facts.mtime_ns}"

    def read(self, item: str, on_error: OnError) -> Iterator[Sample]:
        """Yield the samples of a shard."""
        reading = TarOptions(
            storage_options=self._store,
            on_error=on_error,
            read_ahead=READ_AHEAD_BYTES,
            limits=self.job.limits,
            end_marker=self.job.end_marker,
        )
        key_rule = self.options.key_rule or first_dot
        return group_samples(read_shards([item], reading), key_rule=key_rule, on_error=on_error)


@spells_hints
@checks_calls
def convert_shards(
    function: Function | WholeShards,
    shards: Shards,
    output: str | os.PathLike[str],
    *,
    whole_shards: bool = False,
    decode: Sequence[Decoder] | None = None,
    on_error: OnError = "raise",
    if_changed: IfChanged = "raise",
    executor: Executor | None = None,
    num_workers: int | None = None,
    on_result: Callable[[ConvertedShard], object] | None = None,
    options: WriteOptions = DEFAULT_WRITING,
    job: JobOptions = DEFAULT_JOB,
) -> list[ConvertedShard]:
    """Map all samples of many shards in parallel and write an output shard for each.

    A shard appears once it is complete, even without samples, so that the numbers have no gaps. A shard that fails, or
    whose process dies, is retried after the others. Shards that fail permanently raise an error at the end, after all
    others have been converted.

    A journal records each finished shard. A second call converts only shards that are not in the journal or do not
    exist with the recorded size. An interrupted and resumed conversion writes the same bytes as an uninterrupted one,
    provided that the function is deterministic. Two conversions cannot use the same journal at the same time.

    Args:
        function: maps a sample to a sample, to ``None`` to drop it, or to several samples, for example as a generator.
        shards: a pattern as in `ShardList`, but without variables, or an iterable of URLs, such as a `ShardList`.
        output: a folder for shards with the same names, with a trailing slash unless it exists; a pattern with
            ``{name}`` for the name without extensions such as ``.tar``; or a pattern with ``%06d`` for the number.
            Local folders are created. Existing shards that are not in the journal are overwritten.
        whole_shards: pass the function an iterator over all samples of a shard; it yields samples.
        decode: decode the fields first, with these decoders, as in ``wds_decode``; ``[]`` uses only the basic decoders.
            By default, all fields are bytes.
        on_error: how to handle truncated shards and samples that cannot be read, mapped or written, as in all stages.
            Skipped samples are missing permanently, because their shards count as finished. A handler is called in this
            process after the shard is written and cannot end it.
        if_changed: what to do with finished shards whose function, options or input have changed: ``"raise"`` an error,
            ``"redo"`` or ``"keep"`` them. Functions are compared by code, defaults and closures, but not by the
            functions that they call. Inputs are compared by name, size, and modification time or ETag.
        executor: any executor of ``concurrent.futures``, such as Dask's ``client.get_executor()`` or that of
            ``mpi4py``, for which the function is pickled. By default, processes are forked.
        num_workers: the number of worker processes, by default one per CPU; 0 converts in this process. With an
            executor, it is the number of shards submitted at once.
        on_result: called in this process for each finished shard, in any order, starting with those that an earlier
            call finished.
        options: how the bytes of the shards are written: ``WriteOptions(compress=, encoder=, index=...)``; its
            ``key_rule`` is also used for reading.
        job: how the work is done: ``JobOptions(journal=, retries=, remove_old=, end_marker=, limits=...)``.

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
    check_choice("if_changed", if_changed, IfChanged)
    if not callable(function):
        raise TypeError(f"convert_shards takes a function of a sample, not {function!r}")
    if num_workers is not None and num_workers < (executor is not None):
        raise ValueError(f"num_workers must be at least 0, and at least 1 with an executor, not {num_workers}")
    urls = resolve_shards(shards)
    pattern, outputs = make_output_names(urls, output)
    options = replace(options, digest=True if options.digest is None else options.digest)
    job = replace(job, retries=RETRIES if job.retries is None else job.retries)
    policy = ErrorPolicy(on_error, "convert_shards")
    return write_shards(
        ShardSamples(urls, options, job),
        outputs,
        pattern,
        SampleWork(function, decode, whole_shards),
        policy,
        options=options,
        job=job,
        journal=job.journal_of(pattern.replace("{name}", "shards"), by_default=True),
        if_changed=if_changed,
        error_of=lambda failures: _conversion_error(
            {urls[number]: failure for number, failure in failures.items()}, len(urls), job.retries or 0
        ),
        stops=False,
        label="Converting",
        on_result=on_result,
        executor=executor,
        num_workers=num_workers,
    )


def _conversion_error(failures: Mapping[str, BaseException], shards: int, retries: int) -> ConversionError:
    listed = list_some([Message(f"{redact(url)}: ", cause_of(error)) for url, error in failures.items()])
    was_retried = not all(isinstance(failure, DETERMINISTIC_ERRORS) for failure in failures.values())
    tries = f" in {plural(retries + 1, 'attempt')}" if was_retried else ""
    error = ConversionError(
        f"{len(failures):,} of {plural(shards, 'shard')} could not be converted{tries}. The others are finished, and "
        "calling this again converts only the missing ones.",
        *(part for line in listed for part in ("\n", line)),
    )
    for url, failure in failures.items():
        name = redact(url)
        error.failures[name if name not in error.failures else f"{name} ({len(error.failures)})"] = failure
    return error


def make_output_names(urls: Sequence[str], output: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Return the pattern of the output shards and their names.

    >>> make_output_names(["data/a.tar", "data/b.tar.gz"], "out/")
    ('out/{name}', ['out/a.tar', 'out/b.tar.gz'])
    >>> make_output_names(["data/a.tar", "data/b.tar.gz"], "out/{name}.tar.zst")[1]
    ['out/a.tar.zst', 'out/b.tar.zst']
    >>> make_output_names(["data/a.tar", "data/b.tar.gz"], "out/train-%04d.tar")[1]
    ['out/train-0000.tar', 'out/train-0001.tar']
    """
    pattern = os.fspath(output)
    path = local_path(pattern)
    if pattern.endswith("/") or (path is not None and os.path.isdir(path)):  # noqa: PTH112  of a string
        pattern = f"{pattern.rstrip('/')}/{NAME}" if pattern.strip("/") else f"/{NAME}"
        names = [pattern.replace(NAME, _base_name(url)) for url in urls]
    elif NAME in pattern:
        names = [pattern.replace(NAME, strip_shard_suffix(_base_name(url))) for url in urls]
    else:
        if "%" not in pattern:
            raise ValueError(
                f"Each shard has an output of its own, and {redact(pattern)!r} is a single name. Name a folder with a "
                f"slash at its end, as in {redact(pattern)}/, or number the outputs, as in out/train-%06d.tar"
            )
        check_pattern(pattern, maxcount=1, maxsize=1)
        names = [pattern % number for number in range(len(urls))]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(
            f"Several shards would be written to {redact(twice)!r}. Number them, as in output='out/train-%06d.tar'"
        )
    outputs = {_real(url): url for url in urls}
    if hit := next((name for name in names if _real(name) in outputs), None):
        raise ValueError(f"The shard {outputs[_real(hit)]!r} would be overwritten. Choose another output folder")
    return pattern, names


def _base_name(url: str) -> str:
    name = redact(url).partition("?")[0].rpartition("/")[2] if local_path(url) is None else url.rpartition("/")[2]
    if url.startswith("pipe:") or url == "-" or not name:
        raise ValueError(
            f"{redact(url)!r} has no file name to use for its output. Number them, as in output='out/train-%06d.tar'"
        )
    return name


def _real(url: str) -> str:
    path = local_path(url)
    if path is not None and "\0" in path:
        raise ValueError(f"no file can have the name {url!r}")
    return url if path is None else os.path.realpath(path)
