"""The plan for new shards: the order of the samples and the shard of each."""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.errors import EncodeError, SampleSourceError
from wds_datapipes.hints import REKEY
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.system import read_at
from wds_datapipes.tar.header_writer import END, TOO_LARGE, HeaderWriter
from wds_datapipes.tools.prepare.repeated_keys import find_repeated_keys
from wds_datapipes.tools.prepare.sample_spec import MeasuredSample, SampleSpec, Source, measure_sample
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.packer import KEEP_DOTS, TarSamplePacker, fault_of_key, has_dots

#: The number of specs to load before measuring their files, the number of threads, and the number of specs per task.
AT_ONCE, THREADS, BATCH = 8192, 16, 128


class SpecFile:
    """Specs of samples in an anonymous temporary file, which forked processes can read at any position."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  close closes it
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, spec: SampleSpec | None) -> None:
        """Add a spec, or ``None`` for a sample without one."""
        self._ends.append(self._ends[-1] + self._file.write(pickle.dumps(spec, pickle.HIGHEST_PROTOCOL)))

    def flush(self) -> None:
        """Write all specs to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, number: int) -> SampleSpec:
        """Read a spec."""
        begin, end = self._ends[number : number + 2]
        spec: SampleSpec = pickle.loads(read_at(self._file.fileno(), end - begin, begin))  # noqa: S301  ours
        return spec


class Plan(NamedTuple):
    """The shards to write: a few numbers per sample and a file with the specs."""

    #: The positions of the samples in the source, in the order of writing.
    order: array[int]
    #: The size of all fields of each sample in bytes, by its position in the source; -1 if unknown.
    payloads: array[int]
    #: The stamp of each sample, by its position in the source; see `MeasuredSample`.
    stamps: array[int]
    #: The position in ``order`` at which each shard ends.
    ends: list[int]
    #: The specs, by position in the source.
    specs: SpecFile

    def shard(self, number: int) -> array[int]:
        """Return the positions of the samples of a shard."""
        return self.order[self.ends[number - 1] if number else 0 : self.ends[number]]


def make_plan(
    source: Source,
    specs: SpecFile,
    *,
    maxcount: float,
    maxsize: float,
    rekey: str,
    seed: int | None,
    key_rule: KeyRule | None,
    policy: ErrorPolicy,
    storage_options: Mapping[str, Any] | None = None,
    on_measured: Callable[[int, int], object] | None = None,
) -> Plan:
    """Measure all samples and assign them to shards as `ShardWriter` does.

    Args:
        source: the samples.
        specs: a new file for their specs.
        maxcount: the maximum number of samples in a shard.
        maxsize: the maximum size of a shard in bytes.
        rekey: a pattern for new keys, or an empty string.
        seed: shuffle the samples with this seed.
        key_rule: splits member names into keys and fields when the shards are read.
        policy: handles samples that cannot be written.
        storage_options: options for the file systems of the samples.
        on_measured: called with the number of samples measured and the size of their fields.

    Raises:
        SampleSourceError: a file does not exist, two samples have the same key, or a key has invalid characters.
        EncodeError: a sample would not be read back unchanged, or a value cannot be encoded.
    """
    headers = HeaderWriter(**WriteOptions().tar_settings)
    packer = WriteOptions(encoder=False, key_rule=key_rule).packer()
    payloads, sizes, stamps, hashes = array("q"), array("q"), array("Q"), array("q")
    bad: set[int] = set()

    def reject(number: int, error: Exception, key: str = "") -> None:
        if not policy.handle(error, key=key):
            raise error
        bad.add(number)

    for number, (spec, found) in enumerate(_measure_all(source, rekey, storage_options)):
        specs.add(spec)
        size, payload, stamp = 0, 0, 0
        if spec is None or isinstance(found, Exception):
            assert isinstance(found, Exception)  # noqa: S101  a sample without a spec has an error
            reject(number, found, "" if spec is None else spec.key)
        else:
            payload, stamp = sum(found.sizes), found.stamp
            try:
                size = _size(spec, found, packer, headers, key_rule)
            except (SampleSourceError, EncodeError) as error:
                reject(number, error, spec.key)
            if on_measured is not None:
                on_measured(1, payload)
            payload = payload if found.is_exact else -1
        sizes.append(size)
        payloads.append(payload)
        stamps.append(stamp)
        hashes.append(0 if spec is None else hash(spec.key))
    specs.flush()
    good = np.delete(np.arange(len(specs)), list(bad))
    for number, key, first in find_repeated_keys(
        np.array(hashes, np.int64)[good], good, lambda number: [specs.read(number).key]
    ):
        both = f"Both {specs.read(first).location} and {specs.read(number).location} have the key {key!r}"
        reject(
            number,
            SampleSourceError(
                f"{both}, and samples with the same key would be mixed up. If they are one sample, put its lines of "
                "the recipe in a row, or use --all-files for its images. Otherwise rename one; or, for new keys, ",
                REKEY,
            ),
        )
    order = array("L", (number for number in range(len(specs)) if number not in bad))
    if seed is not None:
        Random(seed).shuffle(order)
    ends = _shard_ends((sizes[number] for number in order), maxcount, maxsize)
    return Plan(order, payloads, stamps, ends, specs)


def _measure_all(
    source: Source, rekey: str, storage_options: Mapping[str, Any] | None
) -> Iterator[tuple[SampleSpec | None, MeasuredSample | Exception]]:
    """Yield each sample in order, with its measured sizes or an error."""

    def measure(specs: list[SampleSpec | Exception]) -> list[MeasuredSample | Exception]:
        return [spec if isinstance(spec, Exception) else measure_one(spec) for spec in specs]

    def measure_one(spec: SampleSpec) -> MeasuredSample | Exception:
        try:
            return measure_sample(spec, storage_options)
        except SampleSourceError as error:
            return error

    def replace_key(number: int, spec: SampleSpec | Exception) -> SampleSpec | Exception:
        if not isinstance(spec, SampleSpec | Exception):
            raise TypeError(
                f"create_shards needs the SampleSpec of each sample, as find_images yields them, not {spec!r:.200}. To "
                "write samples, use ShardWriter"
            )
        if not rekey or isinstance(spec, Exception):
            return spec
        return spec._replace(key=rekey.format(number=number, key=spec.key, name=spec.key.rpartition("/")[2]))

    if not isinstance(source, Iterable):
        raise TypeError(f"source must be samples, such as the result of find_images, not {source!r:.200}")
    numbered = enumerate(source)
    with ThreadPoolExecutor(THREADS) as pool:  # remote stores have a latency for each file
        while specs := [replace_key(*each) for each in islice(numbered, AT_ONCE)]:
            batches = [specs[at : at + BATCH] for at in range(0, len(specs), BATCH)]
            for batch, found in zip(batches, pool.map(measure, batches), strict=True):
                for spec, facts in zip(batch, found, strict=True):
                    yield spec if isinstance(spec, SampleSpec) else None, facts


def _size(
    spec: SampleSpec, found: MeasuredSample, packer: TarSamplePacker, headers: HeaderWriter, key_rule: KeyRule | None
) -> int:
    """Return the size of a sample in an archive; reject a sample that would not be read back unchanged."""
    key = spec.key
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise SampleSourceError(f"the key of {spec.location} has text that is not UTF-8: {error}") from None
    if key_rule is not None and (fault := fault_of_key(key, key_rule)):
        if has_dots(key, key_rule):  # such names are common, so what to do comes first
            place = f"{spec.location} has a dot in its key {key!r}"
            raise EncodeError(f"{place}: for new keys, ", REKEY, "; to keep it, ", *KEEP_DOTS, f". {fault}")
        raise EncodeError(f"{spec.location}: {fault}. For new keys, ", REKEY)
    try:
        total = packer.pack({"__key__": key, **dict.fromkeys(spec.parts, b"")}).size
    except EncodeError as error:
        raise EncodeError(f"{spec.location}: ", str(error)) from None
    for field, size in zip(spec.parts, found.sizes, strict=True):
        total += size + -size % 512
        if size >= TOO_LARGE:
            total += len(headers.header(f"{key}.{field}", size)) - len(headers.header(f"{key}.{field}", 0))
    return total


def _shard_ends(sizes: Iterable[int], maxcount: float, maxsize: float) -> list[int]:
    """Return the end of each shard.

    >>> _shard_ends([512] * 5, 2, 1e9), _shard_ends([1024, 1024, 9000, 512], 9, 4096), _shard_ends([], 1, 1)
    ([2, 4, 5], [2, 3, 4], [])
    """
    ends: list[int] = []
    samples = total = at = 0
    for at, size in enumerate(sizes, 1):
        if samples and (samples >= maxcount or total + size + len(END) > maxsize):
            ends.append(at - 1)
            samples = total = 0
        samples += 1
        total += size
    return [*ends, at] if samples else ends
