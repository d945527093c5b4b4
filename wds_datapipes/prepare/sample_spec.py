"""Drafts of samples: what a sample is to be made of, before any of its files is read."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from wds_datapipes.errors import SampleSourceError, ShardError
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.remote.range_reader import FileFacts, file_facts
from wds_datapipes.types import Sample

__all__ = [
    "CommandPart",
    "FilePart",
    "MeasuredSample",
    "Part",
    "SampleSpec",
    "Source",
    "UrlPart",
    "measure",
    "read_draft",
]


@dataclass(frozen=True)
class FilePart:
    """The content of a local file."""

    path: str


@dataclass(frozen=True)
class UrlPart:
    """The content of a file that is not of this host."""

    url: str
    storage_options: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True)
class CommandPart:
    """What a command prints, which bash runs."""

    command: str


Part: TypeAlias = bytes | FilePart | UrlPart | CommandPart
"""What the data of a field are: bytes, or where they come from."""


class SampleSpec(NamedTuple):
    """A sample that is to be written.

    Attributes:
        key: its key, as its source has it.
        parts: its fields, in their order.
        origin: where it comes from, for messages: a path, or a row of a table.
    """

    key: str
    parts: dict[str, Part]
    origin: str


class Source(Protocol):
    """Samples that are not made yet, of which any can be asked for at any time."""

    def __len__(self) -> int:
        """Return how many there are."""

    def draft(self, number: int, /) -> SampleSpec:
        """Return what one of them is to be made of; in a forked process, too.

        Raises:
            SampleSourceError: that cannot be said.
        """

    def close(self) -> None:
        """Close what is open."""


class MeasuredSample(NamedTuple):
    """How large a sample will be, as far as that is known without reading it."""

    #: The bytes of each field; what is not known counts as none.
    sizes: list[int]
    #: Whether all are known, which that of what a command prints is not.
    is_exact: bool
    #: What differs, most likely, when a file has changed, or what it stands for: a number of 64 bits.
    stamp: int


def measure(draft: SampleSpec) -> MeasuredSample:
    """Ask for the sizes of all files of a sample.

    Raises:
        SampleSourceError: a file is not there, or is none.
    """
    sizes = []
    is_exact = True
    digest = hashlib.blake2b(digest_size=8)
    for field, part in draft.parts.items():
        facts: tuple[object, ...]
        if isinstance(part, FilePart):
            found = _stat(part.path, field, draft)
            sizes.append(found.st_size)
            facts = (part.path, found.st_size, found.st_mtime_ns)
        elif isinstance(part, UrlPart):
            known = _ask_size(part, field, draft)
            is_exact &= known.bytes is not None
            sizes.append(known.bytes or 0)
            facts = (redact(part.url), *known)  # the signature of a URL may be another one each time
        elif isinstance(part, CommandPart):
            is_exact = False
            sizes.append(0)
            facts = (part.command,)
        else:
            sizes.append(len(part))
            facts = (part,)
        digest.update(repr((field, facts)).encode("utf-8", "surrogatepass"))
    return MeasuredSample(sizes, is_exact, int.from_bytes(digest.digest(), "little"))


def read_draft(draft: SampleSpec) -> Sample:
    """Read the files and run the commands of a sample.

    Raises:
        SampleSourceError: one of them fails.
    """
    sample: Sample = {"__key__": draft.key}
    for field, part in draft.parts.items():
        if isinstance(part, FilePart):
            sample[field] = _read_part(part.path, field, draft)
        elif isinstance(part, UrlPart):
            sample[field] = _fetch_part(part.url, field, draft, storage_options=part.storage_options)
        elif isinstance(part, CommandPart):
            sample[field] = _fetch_part(f"pipe:{part.command}", field, draft)
        else:
            sample[field] = part
    return sample


def _stat(path: str, field: str, draft: SampleSpec) -> os.stat_result:
    try:
        found = os.stat(path)  # noqa: PTH116  of a string, millions of times
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, draft, error) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no plain file"
        raise SampleSourceError(f"{_file(path, field, draft)} is {kind}. Name a file")
    return found


def _read_part(path: str, field: str, draft: SampleSpec) -> bytes:
    try:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123  the same
            return stream.readall()  # type: ignore[no-any-return, attr-defined, unused-ignore]  # it is a FileIO
    except OSError as error:
        raise _unreadable(path, field, draft, error) from None


def _ask_size(part: UrlPart, field: str, draft: SampleSpec) -> FileFacts:
    try:
        return file_facts(part.url, storage_options=part.storage_options)
    except ShardError as error:
        raise _source_error(field, draft, error) from None


def _fetch_part(url: str, field: str, draft: SampleSpec, **options: Any) -> bytes:
    try:
        with open_url(url, **options) as stream:
            return b"".join(iter(lambda: stream.read(1 << 20), b""))
    except ShardError as error:
        raise _source_error(field, draft, error) from None


def _source_error(field: str, draft: SampleSpec, error: ShardError) -> SampleSourceError | ShardError:
    """Return what to raise: what concerns all files is no fault of a sample, and not passed over as one."""
    return (
        error
        if error.concerns_all
        else SampleSourceError(f"The field {field!r} of {draft.origin} cannot be made: {error}")
    )


def _unreadable(path: str, field: str, draft: SampleSpec, error: Exception) -> SampleSourceError:
    reason = getattr(error, "strerror", None) or str(error)
    what = "is a link to nothing, or to itself" if os.path.islink(path) else "cannot be read"  # noqa: PTH114  it is a text
    return SampleSourceError(
        f"{_file(path, field, draft)} {what}: {reason}. Put the file there, or leave the sample out"
    )


def _file(path: str, field: str, draft: SampleSpec) -> str:
    """Name a file, and the sample that it is for if the path does not tell that."""
    told = f"The file {path!r}"
    return told if draft.origin == path else f"{told}, for the field {field!r} of {draft.origin},"
