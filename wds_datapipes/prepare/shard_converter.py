"""Convert one shard: read, map, write."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from wds_datapipes.codecs.decoding import Decoder, wds_decode
from wds_datapipes.counters import Counters
from wds_datapipes.errors import EncodeError, ShardOpenError
from wds_datapipes.io.compression.formats import strip_shard_suffix
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.prefetch import READ_AHEAD_BYTES
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.io.remote.range_reader import file_facts
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy, OnError, note
from wds_datapipes.parallel.executors import defer_exit
from wds_datapipes.prepare.shard_maker import check_results
from wds_datapipes.prepare.shard_run import WrittenShard
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.types import Sample
from wds_datapipes.writing.shard_names import check_pattern
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["ShardConverter", "get_input_version", "make_output_names"]

#: The placeholder for the name of the input in a pattern.
NAME = "{name}"


class ShardConverter:
    """Converts a shard, in any process; see `convert_shards`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        whole_shards: bool,
        decode: Sequence[Decoder] | None,
        key_rule: KeyRule,
        on_error: OnError,
        storage_options: Mapping[str, Any] | None,
        limits: ReadLimits,
        writing: Mapping[str, Any],
    ) -> None:
        self._function, self._whole_shards, self._decode = function, whole_shards, decode
        self._key_rule, self._on_error = key_rule, on_error
        self._storage_options, self._limits, self._writing = storage_options, limits, writing

    def __repr__(self) -> str:
        """Show only the function, as executors log their tasks and the options may contain credentials."""
        return f"ShardConverter({getattr(self._function, '__qualname__', type(self._function).__name__)})"

    def __call__(self, url: str, output: str, _attempt: str) -> WrittenShard:
        """Convert a shard; ``_attempt`` prevents executors from returning a cached result."""
        try:
            return self._convert(url, output)
        except Exception as error:
            portable = _portable(error)
            if portable is error:
                raise
        raise portable  # without a cause that cannot be pickled

    def _convert(self, url: str, output: str) -> WrittenShard:
        version = get_input_version(url, self._storage_options)
        counted: Any = CountedErrors(self._on_error, Counters())
        policy = ErrorPolicy(counted, "convert_shards")
        shards = read_shards(
            [url],
            ReadOptions(
                storage_options=self._storage_options,
                on_error=counted,
                read_ahead=READ_AHEAD_BYTES,
                limits=self._limits,
            ),
        )
        samples: Iterable[Sample] = group_samples(shards, key_rule=self._key_rule, on_error=counted)
        if self._decode is not None:
            samples = wds_decode(samples, *self._decode, on_error=counted, limits=self._limits)
        count = _Counted(samples)
        results = self._function(iter(count)) if self._whole_shards else policy.counted(count)
        with ExitStack() as opened:
            with defer_exit():
                shard = opened.enter_context(TarWriter(output, **self._writing))
            for sample in results:
                if not self._write(shard, sample, policy):
                    break
        policy.finish()
        assert shard.info is not None  # noqa: S101  closed without an error
        return WrittenShard(shard.info, count.count, policy.counters.entries, version)

    def _write(self, shard: TarWriter, sample: Any, policy: ErrorPolicy) -> bool:
        """Write all results of a sample, or none of them, and return whether to continue."""
        try:
            for packed in [shard.pack(each) for each in self._results(sample)]:
                shard.append(packed)
        except (EncodeError, _FunctionError) as error:
            return policy.handle(error.error if isinstance(error, _FunctionError) else error, sample)
        return True

    def _results(self, sample: Any) -> Sequence[Sample]:
        """Return the results of a sample."""
        if self._whole_shards:
            return check_results([sample], "a function of whole shards must yield samples, but it yielded")
        location = f"in the sample {sample.get('__key__')!r} of {redact(str(sample.get('__url__')))}"
        try:
            rule = f"the function must return a sample, samples or None, but {location} it returned"
            return check_results(self._function(sample), rule)
        except Exception as error:
            note(error, location)
            if self._on_error == "raise":
                raise
            raise _FunctionError(error) from error


class _FunctionError(Exception):
    """Carries an error of the user's function past those of the writer."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


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


def get_input_version(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Return name, size and ETag or modification time of a shard, or an empty string if it cannot be opened."""
    try:
        facts = file_facts(url, storage_options=storage_options)
    except ShardOpenError:
        return ""
    path = local_path(url)
    name = redact(url) if path is None else os.path.basename(path)  # noqa: PTH119  of a string
    return f"{name}:{facts.bytes}:{facts.etag or facts.mtime_ns}"


def make_output_names(urls: Sequence[str], output: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Return the pattern of the output shards, and the name of each.

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
    return url if path is None else os.path.realpath(path)
