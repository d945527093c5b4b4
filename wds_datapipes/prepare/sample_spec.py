"""Sample specs: the key of a sample and the origin of each field, before any file is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from wds_datapipes.errors import SampleSourceError, ShardError
from wds_datapipes.io.openers import open_url, redact, split_scheme
from wds_datapipes.io.remote.remote_file import FileFacts, file_facts
from wds_datapipes.types import Sample


@dataclass(frozen=True)
class FilePart:
    """The content of a local file."""

    path: str


@dataclass(frozen=True)
class UrlPart:
    """The content of a remote file, or the standard output of a bash command (``pipe:COMMAND``)."""

    url: str


Part: TypeAlias = bytes | FilePart | UrlPart
"""The data of a field: bytes, or where to read them."""


class SampleSpec(NamedTuple):
    """A sample to write.

    Attributes:
        key: the key, as in the source.
        parts: the data of each field, in order.
        location: the origin of the sample for messages: a path, or a row of a table.
    """

    key: str
    parts: dict[str, Part]
    location: str


def make_spec(key: str, fields: Iterable[tuple[str, Part]], location: str, described: str) -> SampleSpec:
    """Return the spec of a sample.

    Raises:
        SampleSourceError: two parts have the same field; ``described`` is the sample for the message.
    """
    parts: dict[str, Part] = {}
    for field, part in fields:
        if field in parts:
            raise SampleSourceError(f"{described} would have two fields {field!r}. Rename or remove one of them")
        parts[field] = part
    return SampleSpec(key, parts, location)


def encode_text(text: str, described: str) -> bytes:
    """Encode text as UTF-8.

    Raises:
        SampleSourceError: that is impossible; ``described`` is where it is for the message.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SampleSourceError(f"{described} has text that is not UTF-8: {error}") from None


class Source(Protocol):
    """Samples to write, in order."""

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each sample, or the error of one that has no valid spec."""


class MeasuredSample(NamedTuple):
    """The size of a sample, as far as known without reading it."""

    #: The size of each field in bytes; an unknown size counts as 0.
    sizes: list[int]
    #: Whether all sizes are known; that of a command's output is not.
    is_exact: bool
    #: A 64-bit hash of the key, the names, sizes and modification times that changes when a file changes.
    stamp: int


def measure_sample(spec: SampleSpec, storage_options: Mapping[str, Any] | None = None) -> MeasuredSample:
    """Look up the sizes of all files of a sample.

    Raises:
        SampleSourceError: a file does not exist, or is not a regular file.
    """
    sizes: list[int | None] = []
    digest = hashlib.blake2b(repr(spec.key).encode("utf-8", "surrogatepass"), digest_size=8)
    for field, part in spec.parts.items():
        facts: tuple[object, ...]
        if isinstance(part, FilePart):
            found = _stat(part.path, field, spec)
            sizes.append(found.st_size)
            facts = (part.path, found.st_size, found.st_mtime_ns)
        elif isinstance(part, UrlPart) and split_scheme(part.url)[0] == "pipe":
            sizes.append(None)
            facts = (part.url,)
        elif isinstance(part, UrlPart):
            known = _ask_size(part.url, field, spec, storage_options)
            sizes.append(known.bytes)
            facts = (redact(part.url), *known)  # a signed URL may have a new signature each time
        else:
            sizes.append(len(part))
            facts = (part,)
        digest.update(repr((field, facts)).encode("utf-8", "surrogatepass"))
    return MeasuredSample([size or 0 for size in sizes], None not in sizes, int.from_bytes(digest.digest(), "little"))


def read_sample(spec: SampleSpec, storage_options: Mapping[str, Any] | None = None) -> Sample:
    """Read the files and run the commands of a sample.

    Raises:
        SampleSourceError: a file cannot be read, or a command fails.
    """
    sample: Sample = {"__key__": spec.key}
    for field, part in spec.parts.items():
        if isinstance(part, FilePart):
            sample[field] = _read_part(part.path, field, spec)
        elif isinstance(part, UrlPart):
            sample[field] = _fetch_part(part.url, field, spec, storage_options)
        else:
            sample[field] = part
    return sample


def _stat(path: str, field: str, spec: SampleSpec) -> os.stat_result:
    try:
        found = os.stat(path)  # noqa: PTH116  faster than Path, called millions of times
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, spec, error) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise SampleSourceError(f"{_file(path, field, spec)} is {kind}. Name a file")
    return found


def _read_part(path: str, field: str, spec: SampleSpec) -> bytes:
    try:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123  faster than Path
            return stream.readall()  # type: ignore[no-any-return, attr-defined, unused-ignore]  # a FileIO
    except OSError as error:
        raise _unreadable(path, field, spec, error) from None


def _ask_size(url: str, field: str, spec: SampleSpec, storage_options: Mapping[str, Any] | None) -> FileFacts:
    try:
        return file_facts(url, storage_options=storage_options)
    except ShardError as error:
        raise _source_error(field, spec, error) from None


def _fetch_part(url: str, field: str, spec: SampleSpec, storage_options: Mapping[str, Any] | None) -> bytes:
    try:
        with open_url(url, storage_options=storage_options) as stream:
            return b"".join(iter(lambda: stream.read(1 << 20), b""))
    except ShardError as error:
        raise _source_error(field, spec, error) from None


def _source_error(field: str, spec: SampleSpec, error: ShardError) -> SampleSourceError | ShardError:
    """Wrap an error of a single sample; return an error that concerns all files as it is, so that it is not skipped."""
    return (
        error
        if error.concerns_all
        else SampleSourceError(f"The field {field!r} of {spec.location} cannot be read: {error}")
    )


def _unreadable(path: str, field: str, spec: SampleSpec, error: Exception) -> SampleSourceError:
    reason = getattr(error, "strerror", None) or str(error)
    problem = "is a broken or circular link" if os.path.islink(path) else "cannot be read"  # noqa: PTH114  a string
    return SampleSourceError(f"{_file(path, field, spec)} {problem}: {reason}. Provide the file, or remove the sample")


def _file(path: str, field: str, spec: SampleSpec) -> str:
    """Describe a file, and its sample unless the path already identifies it."""
    described = f"The file {path!r}"
    return described if spec.location == path else f"{described}, for the field {field!r} of {spec.location},"
