"""Production of one shard in any process: reads the samples of an input, maps them and writes the results."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from wds_datapipes.codecs.decoding import Decoder, DecoderChain
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.errors import EncodeError
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.on_error.policy import OnError, concerns_all, note
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.types import Sample, ShardInfo
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_file import ShardFile


@hides_credentials
class WrittenShard(NamedTuple):
    """A shard written by a worker.

    Attributes:
        info: the shard.
        read: the number of samples read.
        errors: the errors that were skipped.
        version: the version of the input.
    """

    info: ShardInfo
    read: int
    errors: list[Exception]
    version: str


@dataclass(frozen=True)
class ShardProducer:
    """Writes the shard for an input, in any process.

    Attributes:
        read: yields the samples of an input, given an error policy.
        version_of: returns a string that changes when an input changes.
        decode: the decoders of the fields; without them, all fields are bytes.
        function: maps a sample to a sample, ``None`` or several samples; without a function, samples are unchanged.
        whole_shards: whether the function takes an iterator of all samples instead and yields samples.
        raises: whether errors of samples are raised; otherwise, they are returned with the shard.
        options: how shards are written.
        limits: the limits for decoding.
    """

    read: Callable[[Any, OnError], Iterator[Sample]]
    version_of: Callable[[Any], str]
    decode: Sequence[Decoder] | None
    function: Callable[..., Any] | None
    whole_shards: bool
    raises: bool
    options: WriteOptions
    limits: ReadLimits

    def __repr__(self) -> str:
        """Show only the function: executors log their tasks, and the options may contain credentials."""
        return f"ShardProducer({getattr(self.function, '__qualname__', type(self.function).__name__)})"

    def __call__(self, item: Any, output: str, _attempt: str) -> WrittenShard:
        """Write a shard; ``_attempt`` prevents executors from returning a cached result."""
        try:
            return self._produce(item, output)
        except Exception as error:
            portable = _portable(error)
            if portable is error:
                raise
        raise portable  # without the cause, which cannot be pickled

    def _produce(self, item: Any, output: str) -> WrittenShard:
        errors: list[Exception] = []

        def skip(error: Exception) -> bool:
            if self.raises or concerns_all(error):
                raise error
            errors.append(_portable(error))
            return True

        read = 0

        def count_samples() -> Iterator[Sample]:
            nonlocal read
            on_error: OnError = "raise" if self.raises else skip
            samples = self.read(item, on_error)
            if self.decode is not None:
                samples = convert_samples(samples, DecoderChain(self.decode, {}, limits=self.limits), on_error)
            for sample in samples:
                read += 1
                yield sample

        version = self.version_of(item)
        with ExitStack() as opened:
            with defer_interrupts(signal.SIGTERM):
                shard = opened.enter_context(ShardFile(output, self.options))
            for results in self._map(count_samples(), skip):
                try:
                    for packed in [shard.pack(each) for each in results]:  # all results of a sample, or none
                        shard.append(packed)
                except EncodeError as error:  # noqa: PERF203  each sample may fail
                    skip(error)
        assert shard.info is not None  # noqa: S101  closed without an error
        return WrittenShard(shard.info, read, errors, version)

    def _map(self, samples: Iterable[Sample], skip: Callable[[Exception], bool]) -> Iterator[list[Sample]]:
        """Yield the results of each sample."""
        if self.function is None or self.whole_shards:
            results = samples if self.function is None else self.function(iter(samples))
            for sample in results:
                yield _check_results([sample], "a function of whole shards must yield samples, but it yielded")
            return
        for sample in samples:
            location = f"in the sample {sample.get('__key__')!r} of {redact(str(sample.get('__url__')))}"
            try:
                rule = f"the function must return a sample, samples or None, but {location} it returned"
                results = _check_results(self.function(sample), rule)
            except Exception as error:  # noqa: BLE001  the user's function may raise anything
                note(error, location)
                skip(error)
            else:
                yield results


def _check_results(made: Any, rule: str) -> list[Sample]:
    """Return the result of a function (a sample, ``None`` or several samples) as a list."""
    is_one = isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable)
    found: list[Any] = [] if made is None else [made] if is_one else list(made)
    for each in found:
        if not isinstance(each, Mapping):
            raise TypeError(f"{rule} {type(each).__name__}")
    return found


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled; otherwise it would look like a crashed worker."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  pickled here
    except Exception:  # noqa: BLE001  user classes may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
