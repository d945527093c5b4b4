"""Sample specs: the key of a sample and the origin of each field, before any file is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.errors import SampleSourceError, ShardError
from wds_datapipes.io.openers import open_url, redact, split_scheme
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.types import Sample


@dataclass(frozen=True)
class FilePart:
    """The content of a local file, or of a part of it.

    Attributes:
        path: the file.
        offset: where the part begins, in bytes.
        size: the size of the part in bytes; by default, it ends where the file ends.
    """

    path: str
    offset: int = 0
    size: int | None = None


@hides_credentials
@dataclass(frozen=True)
class UrlPart:
    """The content of a remote file, or the standard output of a bash command (``pipe:COMMAND``)."""

    url: str


Part: TypeAlias = bytes | FilePart | UrlPart
"""The data of a field: bytes, or where to read them."""


@hides_credentials
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


Source: TypeAlias = Iterable[SampleSpec | Exception]
"""The samples to write, in order: the spec of each, or an error for a sample without a valid spec."""


class MeasuredSample(NamedTuple):
    """The size of a sample, as far as it is known before reading the sample."""

    #: The size of each field in bytes; an unknown size counts as 0.
    sizes: list[int]
    #: Whether all sizes are known; the output size of a command is not.
    is_exact: bool
    #: A 64-bit hash of the key, names, sizes and modification times, which changes when a file changes.
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
            with _explained(field, part, spec):
                found = os.stat(part.path)  # noqa: PTH116  faster than Path, called millions of times
                if not stat.S_ISREG(found.st_mode):
                    raise ValueError("it is a folder" if stat.S_ISDIR(found.st_mode) else "it is not a regular file")
                if found.st_size < (end := part.offset + (part.size or 0)):
                    raise ValueError(f"it ends at byte {found.st_size:,}, before byte {end:,}")
            sizes.append(found.st_size - part.offset if part.size is None else part.size)
            facts = (part.path, found.st_size, found.st_mtime_ns)
            facts = facts if part.offset == 0 and part.size is None else (*facts, part.offset, part.size)
        elif isinstance(part, UrlPart) and split_scheme(part.url)[0] == "pipe":
            sizes.append(None)
            facts = (part.url,)
        elif isinstance(part, UrlPart):
            with _explained(field, part, spec):
                known = file_facts(part.url, storage_options=storage_options)
            sizes.append(known.bytes)
            facts = (redact(part.url), *known)  # without a signature, which may change
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
        if isinstance(part, bytes):
            sample[field] = part
            continue
        with _explained(field, part, spec):
            if isinstance(part, FilePart):
                with open(part.path, "rb", buffering=0) as file:  # noqa: PTH123  faster than Path
                    if part.offset:
                        file.seek(part.offset)
                    if part.size is not None:
                        sample[field] = b"".join(_read_exactly(file, part.size))
                        continue
                    sample[field] = file.readall()  # type: ignore[attr-defined, unused-ignore]  # a FileIO
            else:
                with open_url(part.url, storage_options=storage_options) as stream:
                    sample[field] = b"".join(iter(partial(stream.read, 1 << 20), b""))
    return sample


def _read_exactly(file: Any, size: int) -> Iterator[bytes]:
    while size:
        data = file.read(size)
        if not data:
            raise ValueError(f"it ends {size:,} bytes too early")
        yield data
        size -= len(data)


@contextmanager
def _explained(field: str, part: FilePart | UrlPart, spec: SampleSpec) -> Iterator[None]:
    """Add the sample and field to the errors of a file; errors that concern all files are raised unchanged."""
    try:
        yield
    except (OSError, ValueError, ShardError) as error:
        if isinstance(error, ShardError) and error.concerns_all:
            raise
        place = f"The field {field!r} of {spec.location} cannot be read"
        if isinstance(error, ShardError):
            raise SampleSourceError(f"{place}: ", str(error)) from None
        path = part.path if isinstance(part, FilePart) else part.url
        reason = getattr(error, "strerror", None) or str(error)
        link = ", a broken or circular link" if os.path.islink(path) else ""  # noqa: PTH114  a string
        raise SampleSourceError(
            f"{place}: the file {path!r}{link}: {reason}. Provide the file, or remove the sample"
        ) from None
