"""Production of many shards in parallel: records finished shards in a journal and retries failures."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from wds_datapipes.codecs.decoding import Decoder
from wds_datapipes.errors import EncodeError, ShardWriteError, StateError, UnsafeInputError, plural, text_of
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.hints import KEEP, REDO, REMOVE_OLD, Message
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.output.sink import size_of
from wds_datapipes.io.urls import create_folder
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.parallel.executors import failure_of, start_workers
from wds_datapipes.parallel.map_shards import run_tasks
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.tools.prepare.job_options import JobOptions
from wds_datapipes.tools.prepare.shard_producer import ShardProducer, WrittenShard
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.user_warnings import warn_user
from wds_datapipes.writing.journal import FinishedShard, ShardJournal
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, find_old_shards, remove_old_shards

LOGGER = logging.getLogger("wds_datapipes")
IfChanged: TypeAlias = Literal["raise", "redo", "keep"]
#: The maximum number of failures in a message.
MAX_LISTED = 10

BUGS = (ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, NameError, SyntaxError, TypeError)
#: Errors of a function or its results that another attempt would only repeat.
DETERMINISTIC_ERRORS = (*BUGS, EncodeError, ImportError, NotImplementedError, UnsafeInputError)
#: The number of concurrent requests for the sizes of existing shards.
MAX_CONCURRENT_REQUESTS = 16
#: The options that determine the content of a shard.
IN_SHARDS = sorted({field.name for field in fields(WriteOptions)} - {"index", "storage_options"})


@hides_credentials
class ConvertedShard(NamedTuple):
    """A shard written by this call or an earlier one.

    Attributes:
        source: the shard that was read; "" for `create_shards`.
        info: the shard that was written.
        read: the number of samples read.
        is_new: whether this call wrote the shard.
        skipped: the number of errors that ``on_error`` skipped, for bad samples and truncated shards.
    """

    source: str
    info: ShardInfo
    read: int
    is_new: bool
    skipped: int = 0


class ShardRun:
    """The shards that one call writes, with its journal and workers.

    Args:
        items: the input of each shard.
        outputs: the path or URL of each shard.
        pattern: the pattern of the paths or URLs.
        producer: writes a shard.
        job: how often shards are retried, what happens to surplus ones, and whether progress is shown.
        journal: the path of the journal, if any.
        made_by: everything that determines the content of a shard, apart from its input and the options.

    Raises:
        ValueError: there are surplus shards and ``remove_old`` is false, or it is true and shards are not numbered.
        StateError: another process uses the journal.
        ShardWriteError: a folder cannot be created.
    """

    def __init__(
        self,
        items: Sequence[Any],
        outputs: Sequence[str],
        pattern: str,
        producer: ShardProducer,
        *,
        job: JobOptions,
        journal: str | None,
        made_by: object,
    ) -> None:
        self._items, self._outputs, self._producer, self._job = items, outputs, producer, job
        self._options = options = producer.options
        is_numbered = NUMBER.search(pattern) is not None
        if job.remove_old and not is_numbered:
            raise ValueError(
                f"Surplus shards can be removed only if shards are numbered, but {redact(pattern)!r} has no "
                "placeholder for a number, such as %06d"
            )
        self._old = find_old_shards(pattern, len(outputs), 1, options.storage_options) if is_numbered else []
        if self._old and not job.remove_old:
            described = describe_old_shards(self._old)
            raise ValueError(Message(f"{described}. Nothing was written. Remove them, or ", REMOVE_OLD))
        self._made_by = fingerprint((made_by, {name: getattr(options, name) for name in IN_SHARDS}))
        files = [*outputs] if journal is None else [*outputs, journal]
        for folder in {Path(local).parent for file in files if (local := local_path(file)) is not None}:
            try:
                create_folder(folder)
            except OSError as error:  # noqa: PERF203  a few folders
                raise ShardWriteError(
                    f"The folder {str(folder)!r} cannot be created: {error.strerror}. Choose another output"
                ) from error
        facts = {"read": int, "skipped": int, "made_by": str, "version": object}
        self._journal = None if journal is None else ShardJournal(journal, {"of": "shards of a conversion"}, facts)

    def find_finished(self, *, keep_changed: bool) -> tuple[dict[int, ConvertedShard], dict[int, str]]:
        """Return the finished shards that are up to date, and why each of the others is not.

        Args:
            keep_changed: accept shards whose function, options or input have changed.
        """
        finished = () if self._journal is None else self._journal.finished
        lines = {_name(shard.info.url): shard for shard in finished}  # the last record of each name counts
        recorded = [number for number, output in enumerate(self._outputs) if _name(output) in lines]

        def compare(number: int) -> str | None:
            shard = lines[_name(self._outputs[number])]
            if size_of(self._outputs[number], self._options.storage_options) != shard.info.bytes:
                return None
            if not keep_changed and shard.facts["made_by"] != self._made_by:
                return "another function or other options"
            has_changed = not keep_changed and shard.facts["version"] != self._producer.version_of(self._items[number])
            return "the input has changed" if has_changed else ""

        same: dict[int, ConvertedShard] = {}
        changed: dict[int, str] = {}
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            for number, difference in zip(recorded, pool.map(compare, recorded), strict=True):
                if difference:
                    changed[number] = difference
                elif difference is not None:
                    shard = lines[_name(self._outputs[number])]
                    info = shard.info._replace(url=self._outputs[number])
                    same[number] = self._converted(number, info, shard.facts, is_new=False)
        return same, changed

    def produce(
        self,
        finished: Mapping[int, ConvertedShard],
        policy: ErrorPolicy,
        on_failure: Callable[[int, BaseException], object],
        on_result: Callable[[ConvertedShard], object] | None = None,
        *,
        label: str,
        executor: Executor | None = None,
        num_workers: int | None = None,
    ) -> list[ConvertedShard]:
        """Write the shards that are not finished, and return all that exist then, in order.

        Args:
            finished: the finished shards.
            policy: handles the errors of samples that workers skipped.
            on_failure: called with the number of a shard and its error if all attempts fail; may raise it.
            on_result: called for each shard, in any order, starting with the finished ones.
            label: the label of the progress bar.
            executor: any executor of ``concurrent.futures``; by default, processes are forked.
            num_workers: the number of workers, by default one per CPU; 0 works in this process.
        """
        call, results = secrets.token_hex(8), dict[int, ConvertedShard]()

        def add(number: int, shard: ConvertedShard) -> None:
            results[number] = shard
            new_samples, new_bytes = (shard.read, shard.info.bytes) if shard.is_new else (0, 0)
            meter.add(shards=1, samples=new_samples, size=new_bytes)
            if on_result is not None:
                on_result(shard)

        def make_task(number: int, attempt: int) -> tuple[tuple[int, int], tuple[Any, ...]]:
            return (number, attempt), (self._items[number], self._outputs[number], f"{call}-{attempt}")

        with ProgressMeter(label, len(self._outputs), shown=self._job.progress) as meter:
            for number, shard in finished.items():
                add(number, shard)
            waiting = deque(make_task(number, 1) for number in range(len(self._outputs)) if number not in finished)
            # A worker that inherited the journal would keep it locked until it exits.
            private = [] if self._journal is None else [self._journal.fileno()]
            workers = start_workers(
                self._producer, len(waiting), executor=executor, num_workers=num_workers, private=private
            )
            with closing(run_tasks(workers, waiting)) as done:
                for (number, attempt), task in done:
                    failure = failure_of(task)
                    if failure is None:
                        result = self._finish(number, task.result(), policy)
                        if isinstance(result, ConvertedShard):
                            add(number, result)
                        else:
                            on_failure(number, result)
                    elif attempt > (self._job.retries or 0) or isinstance(failure, DETERMINISTIC_ERRORS):
                        on_failure(number, failure)
                    else:
                        name, kind = redact(str(self._items[number])), type(failure).__name__
                        text = Message(f"{name} could not be converted and will be retried: {kind}: ", text_of(failure))
                        LOGGER.warning(text)
                        waiting.append(make_task(number, attempt + 1))
        return [results[number] for number in sorted(results)]

    def remove_old(self) -> None:
        """Remove surplus shards of an earlier run; call this after writing all new shards."""
        remove_old_shards(self._old, self._options.storage_options)

    def _finish(self, number: int, written: WrittenShard, policy: ErrorPolicy) -> ConvertedShard | Exception:
        """Handle the skipped errors of a shard and record it in the journal."""
        policy.tried += written.read
        try:
            for error in written.errors:
                policy.handle(error)
        except Exception as error:  # noqa: BLE001  the policy may raise anything
            return error
        facts = {"read": written.read, "skipped": len(written.errors)}
        if self._journal is not None:
            made_by = {"made_by": self._made_by, "version": written.version}
            self._journal.add(FinishedShard(number, written.info, {**facts, **made_by}))
        return self._converted(number, written.info, facts, is_new=True)

    def _converted(self, number: int, info: ShardInfo, facts: Mapping[str, Any], *, is_new: bool) -> ConvertedShard:
        item = self._items[number]
        return ConvertedShard(item if isinstance(item, str) else "", info, facts["read"], is_new, facts["skipped"])

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()


class ShardInputs(Protocol):
    """What shards are made of: existing shards, or the planned parts of a source."""

    @property
    def items(self) -> Sequence[Any]:
        """The input of each shard."""

    def version(self, item: Any) -> str:
        """Return a string that changes when an input changes."""

    def read(self, item: Any, on_error: OnError) -> Iterator[Sample]:
        """Yield the samples of an input."""


class SampleWork(NamedTuple):
    """What happens to the samples of each input; see `ShardProducer`."""

    function: Callable[..., Any] | None
    decode: Sequence[Decoder] | None
    whole_shards: bool = False


def write_shards(
    inputs: ShardInputs,
    outputs: Sequence[str],
    pattern: str,
    work: SampleWork,
    policy: ErrorPolicy,
    *,
    options: WriteOptions,
    job: JobOptions,
    journal: str | None,
    if_changed: IfChanged,
    error_of: Callable[[Mapping[int, BaseException]], BaseException],
    stops: bool,
    label: str,
    on_result: Callable[[ConvertedShard], object] | None = None,
    executor: Executor | None = None,
    num_workers: int | None = None,
) -> list[ConvertedShard]:
    """Write a shard for each input, unless the journal has it, and return all of them, in order.

    Args:
        inputs: the inputs.
        outputs: the path or URL of the shard of each.
        pattern: the pattern of the paths or URLs.
        work: what happens to the samples.
        policy: handles the errors of samples.
        options: how shards are written.
        job: how the work is done.
        journal: the path of the journal, if any.
        if_changed: what to do with finished shards whose work, options or input have changed.
        error_of: returns the error to raise for the failures of shards, by number.
        stops: whether the first failure ends the work; otherwise, the others are written first.
        label: the label of the progress bar.
        on_result: called for each shard, in any order, starting with the finished ones.
        executor: any executor of ``concurrent.futures``; by default, processes are forked.
        num_workers: the number of workers, by default one per CPU; 0 works in this process.

    Raises:
        StateError: finished shards have changed, or another process uses the journal.
    """
    failures: dict[int, BaseException] = {}

    def collect(number: int, failure: BaseException) -> None:
        failures[number] = failure
        if stops:
            raise_failures()

    def raise_failures() -> None:
        first = next(iter(failures.values()))
        error = error_of(failures)
        if error is first:
            raise error
        raise error from first

    producer = ShardProducer(
        inputs.read,
        inputs.version,
        work.decode,
        work.function,
        work.whole_shards,
        policy.always_raises,
        options,
        job.limits,
    )
    run = ShardRun(inputs.items, outputs, pattern, producer, job=job, journal=journal, made_by=tuple(work))
    with closing(run):
        finished, changed = run.find_finished(keep_changed=if_changed == "keep")
        if changed and if_changed == "raise":
            raise _changed_error(journal, {str(inputs.items[number]): why for number, why in changed.items()})
        results = run.produce(
            finished, policy, collect, on_result, label=label, executor=executor, num_workers=num_workers
        )
        if failures:
            raise_failures()
        run.remove_old()
    policy.finish()
    warn_if_all_dropped(results)
    return results


def _changed_error(path: str | None, others: Mapping[str, str]) -> StateError:
    listed = ", ".join(list_some([f"{redact(url)} ({difference})" for url, difference in others.items()]))
    return StateError(
        f"The journal {path!r} has shards with other inputs or options: {listed}. To convert them again, ",
        REDO,
        "; to keep them, ",
        KEEP,
        "; or choose another output",
    )


def list_some(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and how many more there are."""
    return [*texts[:MAX_LISTED], *([f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else [])]


def warn_if_all_dropped(shards: Sequence[ConvertedShard]) -> None:
    """Warn if new shards are empty because a function has dropped every sample."""
    new = [shard for shard in shards if shard.is_new]
    dropped = sum(shard.read - shard.skipped for shard in new)
    if dropped > 0 and not any(shard.info.samples for shard in new):
        warn_user(
            f"The function dropped all {plural(dropped, 'sample')}, which leaves {plural(len(new), 'new shard')} "
            "without any. A function drops a sample by returning None: return the sample to keep it"
        )


def _name(output: str) -> str:
    """Return the name of a shard without credentials and without its folder, whose spelling may differ."""
    return redact(output).rpartition("/")[2]
