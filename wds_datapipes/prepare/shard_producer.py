"""Produce one shard in any process: read the samples of an input, map them, and write the results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from wds_datapipes.errors import EncodeError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import OnError, concerns_all, note
from wds_datapipes.parallel.executors import defer_exit
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_file import ShardFile


class Inputs(Protocol):
    """The inputs of shards, each of which gives the samples of one."""

    def read(self, item: Any, on_error: OnError) -> Iterator[Sample]:
        """Yield the samples of an input."""

    def version(self, item: Any) -> str:
        """Return a text that changes when the input changes."""


class WrittenShard(NamedTuple):
    """A shard written by a worker.

    Attributes:
        info: the shard.
        read: the number of samples read.
        errors: the skipped errors.
        version: the version of the input.
    """

    info: ShardInfo
    read: int
    errors: list[Exception]
    version: str


@dataclass(frozen=True)
class ShardProducer:
    """Writes a shard for an input, in any process.

    Attributes:
        inputs: reads the samples.
        function: maps a sample to a sample, ``None`` or several samples; ``None`` changes nothing.
        whole_shards: the function gets an iterator of all samples instead, and yields samples.
        raises: whether errors of samples are raised; otherwise they are returned with the shard.
        options: how shards are written.
    """

    inputs: Inputs
    function: Callable[..., Any] | None
    whole_shards: bool
    raises: bool
    options: WriteOptions

    def __repr__(self) -> str:
        """Show only the function, as executors log their tasks and the options may contain credentials."""
        return f"ShardProducer({getattr(self.function, '__qualname__', type(self.function).__name__)})"

    def __call__(self, item: Any, output: str, _attempt: str) -> WrittenShard:
        """Write a shard; ``_attempt`` prevents executors from returning a cached result."""
        try:
            return self._produce(item, output)
        except Exception as error:
            portable = _portable(error)
            if portable is error:
                raise
        raise portable  # without a cause that cannot be pickled

    def _produce(self, item: Any, output: str) -> WrittenShard:
        errors: list[Exception] = []

        def skip(error: Exception) -> bool:
            if self.raises or concerns_all(error):
                raise error
            errors.append(_portable(error))
            return True

        version = self.inputs.version(item)
        count = _Counted(self.inputs.read(item, "raise" if self.raises else skip))
        with ExitStack() as opened:
            with defer_exit():
                shard = opened.enter_context(ShardFile(output, self.options))
            for results in self._map(count, skip):
                try:
                    for packed in [shard.pack(each) for each in results]:  # all results of a sample, or none
                        shard.append(packed)
                except EncodeError as error:  # noqa: PERF203  each sample may fail
                    skip(error)
        assert shard.info is not None  # noqa: S101  closed without an error
        return WrittenShard(shard.info, count.count, errors, version)

    def _map(self, samples: Iterable[Sample], skip: Callable[[Exception], bool]) -> Iterator[list[Sample]]:
        """Yield the results of each sample."""
        if self.function is None or self.whole_shards:
            results = samples if self.function is None else self.function(iter(samples))
            for sample in results:
                yield check_results([sample], "a function of whole shards must yield samples, but it yielded")
            return
        for sample in samples:
            location = f"in the sample {sample.get('__key__')!r} of {redact(str(sample.get('__url__')))}"
            try:
                rule = f"the function must return a sample, samples or None, but {location} it returned"
                results = check_results(self.function(sample), rule)
            except Exception as error:  # noqa: BLE001  of the user's function
                note(error, location)
                skip(error)
            else:
                yield results


def check_results(made: Any, rule: str) -> list[Sample]:
    """Return the result of a function, which is a sample, ``None`` or several samples, as a list.

    Raises:
        TypeError: the result is not a sample; the message is ``rule`` followed by the type.
    """
    is_one = isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable)
    found: list[Any] = [] if made is None else [made] if is_one else list(made)
    for each in found:
        if not isinstance(each, Mapping):
            raise TypeError(f"{rule} {type(each).__name__}")
    return found


class _Counted:
    """Counts the samples of an iterable."""

    def __init__(self, source: Iterable[Sample]) -> None:
        self._source = source
        self.count = 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in self._source:
            self.count += 1
            yield sample


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled; one that cannot would look like a crashed worker."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  made here
    except Exception:  # noqa: BLE001  user classes may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
