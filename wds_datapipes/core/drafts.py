"""Drafts of samples: what a sample is to be made of, before any of its files is read."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from wds_datapipes.core.openers import open_url
from wds_datapipes.core.types import Sample
from wds_datapipes.errors import BadSource, ShardError

__all__ = ["CommandPart", "Draft", "FilePart", "Measured", "Part", "Source", "measure", "read_draft"]


@dataclass(frozen=True)
class FilePart:
    """The content of a local file."""

    path: str


@dataclass(frozen=True)
class CommandPart:
    """What a command prints, which bash runs."""

    command: str


Part: TypeAlias = bytes | FilePart | CommandPart
"""What the data of a field are: bytes, or where they come from."""


class Draft(NamedTuple):
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

    def draft(self, number: int, /) -> Draft:
        """Return what one of them is to be made of; in a forked process, too.

        Raises:
            BadSource: that cannot be said.
        """

    def close(self) -> None:
        """Close what is open."""


class Measured(NamedTuple):
    """How large a sample will be, as far as that is known without reading it."""

    #: The bytes of each field; those of a command count as none.
    sizes: list[int]
    #: Whether no field is what a command prints.
    is_exact: bool
    #: What differs, most likely, when a file has changed, or what it stands for: a number of 64 bits.
    stamp: int


def measure(draft: Draft) -> Measured:
    """Ask for the sizes of all files of a sample.

    Raises:
        BadSource: a file is not there, or is none.
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
        elif isinstance(part, CommandPart):
            is_exact = False
            sizes.append(0)
            facts = (part.command,)
        else:
            sizes.append(len(part))
            facts = (part,)
        digest.update(repr((field, facts)).encode("utf-8", "surrogatepass"))
    return Measured(sizes, is_exact, int.from_bytes(digest.digest(), "little"))


def read_draft(draft: Draft) -> Sample:
    """Read the files and run the commands of a sample.

    Raises:
        BadSource: one of them fails.
    """
    sample: Sample = {"__key__": draft.key}
    for field, part in draft.parts.items():
        if isinstance(part, FilePart):
            sample[field] = _content(part.path, field, draft)
        elif isinstance(part, CommandPart):
            sample[field] = _output(part.command, field, draft)
        else:
            sample[field] = part
    return sample


def _stat(path: str, field: str, draft: Draft) -> os.stat_result:
    try:
        found = os.stat(path)  # noqa: PTH116  of a string, millions of times
    except (OSError, ValueError) as error:
        raise _unreadable(path, field, draft, error) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no plain file"
        raise BadSource(f"{_file(path, field, draft)} is {kind}. Name a file")
    return found


def _content(path: str, field: str, draft: Draft) -> bytes:
    try:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123  the same
            return stream.readall()  # type: ignore[no-any-return, attr-defined, unused-ignore]  # it is a FileIO
    except OSError as error:
        raise _unreadable(path, field, draft, error) from None


def _output(command: str, field: str, draft: Draft) -> bytes:
    try:
        with open_url(f"pipe:{command}") as stream:
            return b"".join(iter(lambda: stream.read(1 << 20), b""))
    except ShardError as error:
        raise BadSource(f"The field {field!r} of {draft.origin} cannot be made: {error}") from None


def _unreadable(path: str, field: str, draft: Draft, error: Exception) -> BadSource:
    reason = getattr(error, "strerror", None) or str(error)
    what = "is a link to nothing, or to itself" if os.path.islink(path) else "cannot be read"  # noqa: PTH114
    return BadSource(f"{_file(path, field, draft)} {what}: {reason}. Put the file there, or leave the sample out")


def _file(path: str, field: str, draft: Draft) -> str:
    """Name a file, and the sample that it is for if the path does not tell that."""
    told = f"The file {path!r}"
    return told if draft.origin == path else f"{told}, for the field {field!r} of {draft.origin},"
