"""Index files of NVIDIA DALI's WebDataset reader, in the format of its ``wds2idx``.

    v1.2 <number of samples>
    <extension> <offset> <size> <name>[ <extension> <offset> <size> <name>]...    one line per sample

Offsets are those of the data. Version 1.1 has no names. Words are separated by white space, without quoting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from wds_datapipes.errors import CorruptSidecarError, StaleSidecarError, UnsupportedSidecarError
from wds_datapipes.index.build import build_index
from wds_datapipes.index.builder import IndexBuilder
from wds_datapipes.index.interop.member_table import MemberTable, ShardMember
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.small_files import read_sidecar, write_sidecar
from wds_datapipes.samples.grouping import OnDuplicate
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.tar.headers import EndMarker

__all__ = ["DaliVersion", "dali_index_url", "dali_text", "read_dali_index", "write_dali_index"]

DaliVersion: TypeAlias = Literal["v1.1", "v1.2"]

#: The number of words per component, by version.
WORDS = {"v1.1": 3, "v1.2": 4}
#: The characters that separate words in C++.
BLANKS = frozenset(" \t\n\v\f\r")
WORD = re.compile(r"[^ \t\n\v\f\r]+")
#: The maximum number of digits of an offset or size.
MAX_DIGITS = 19


def dali_index_url(url: str) -> str:
    """Return the name that DALI expects: that of the shard up to the first dot of its base name, with ``.idx``.

    >>> dali_index_url("data/train-000.tar"), dali_index_url("a/b.c.tar"), dali_index_url(".x.tar")
    ('data/train-000.idx', 'a/b.idx', '.x.idx')
    """
    scheme, _ = split_scheme(url)
    path, mark, query = url.partition("?") if scheme in ("http", "https") else (url, "", "")
    dot = path.find(".", path.rfind("/") + 2)
    return f"{path if dot < 0 else path[:dot]}.idx{mark}{query}"


def write_dali_index(
    url: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    version: DaliVersion = "v1.2",
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write the index of a shard for DALI's ``fn.readers.webdataset``, and return its name.

    The offsets are correct for every kind of archive, including those with long names and PAX headers. Files that
    belong to no sample are left out.

    Args:
        url: the shard, a path or a URL.
        path: the file to write; by default, the one next to the shard that DALI expects.
        version: the version of the format; ``"v1.1"`` has no names.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to a remote file system.

    Raises:
        UnsupportedSidecarError: the format cannot describe the shard: a name has a blank, there are no samples, or the
            shard is compressed.
        ShardError: the shard cannot be read.
        DuplicateKeyError: a field occurs twice in a sample.

    Examples:
        >>> from pathlib import Path
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "jpg": "one", "cls": "1"}])
        >>> print(Path(write_dali_index(url)).read_text(), end="")
        v1.2 1
        jpg 512 3 x.jpg cls 1536 1 x.cls
    """
    shard = os.fspath(url)
    target = os.fspath(path) if path is not None else dali_index_url(shard)
    index = build_index(
        shard, lowercase=False, on_repeated_key="ignore", end_marker=end_marker, storage_options=storage_options
    )
    write_sidecar(target, dali_text(index, version, archive=redact(shard)), storage_options)
    return target


def dali_text(index: ShardIndex, version: DaliVersion = "v1.2", *, archive: str = "The shard") -> bytes:
    """Return an index in DALI's format.

    Raises:
        UnsupportedSidecarError: the format cannot represent the index.
    """
    if version not in WORDS:
        raise ValueError(f'version must be "v1.1" or "v1.2", not {version!r}')
    index.check_random_access()
    if index.facts.key_rule != "first_dot":
        raise UnsupportedSidecarError(
            f"{archive} was indexed with the rule {index.facts.key_rule}, but DALI splits names at the first dot"
        )
    if not len(index):
        raise UnsupportedSidecarError(f"{archive} has no samples, and DALI does not accept an empty index")
    lines = [f"{version} {len(index)}"]
    for number, sample in enumerate(index):
        words = []
        for name, (_, offset, size) in zip(index.names(number) or [], sample.entries, strict=True):
            extension = name[len(sample.key) + 1 :]
            if not extension or not BLANKS.isdisjoint(name):
                raise UnsupportedSidecarError(
                    f"{archive} holds the member {name!r}, which an index of DALI cannot represent: its words are "
                    f"separated by blanks and must not be empty. Rename the member"
                )
            words += [extension, str(offset), str(size), name][: WORDS[version]]
        lines.append(" ".join(words))
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")


def read_dali_index(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "raise",
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex:
    """Read an index of DALI's ``wds2idx`` or `write_dali_index`, and verify it against the shard's headers.

    ``wds2idx`` writes wrong offsets for some archives: in DALI 2.4 for those with GNU long names, in earlier versions
    for those with PAX headers.

    Args:
        path: the index.
        url: its shard.
        lowercase: convert field names to lower case.
        on_duplicate: what to do if a field occurs twice in a sample.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to remote file systems.

    Returns:
        The index of the samples that the file lists, which may not be all.

    Raises:
        MissingSidecarError: the index cannot be read.
        CorruptSidecarError: the file is damaged or not an index of DALI.
        StaleSidecarError: the index does not match the shard; the message names the line.
        ShardError: the shard cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "jpg": "one", "cls": "1"}])
        >>> read_dali_index(write_dali_index(url), url) == build_index(url)
        True
    """
    name, shard = redact(os.fspath(path)), os.fspath(url)
    lines = list(_parse_components(read_sidecar(os.fspath(path), storage_options), name))
    members = MemberTable(shard, end_marker=end_marker, storage_options=storage_options)
    builder = IndexBuilder(
        lowercase=lowercase, on_duplicate=on_duplicate, on_repeated_key="ignore", archive=redact(shard)
    )
    reached, last = -1, None
    for number, components in enumerate(lines, 2):
        line = f"Line {number} of {name}"
        found = [_matching_member(members, component, line) for component in components]
        key = _only_key(found, line)
        if any(before.offset >= after.offset for before, after in pairwise([ShardMember("", 0, reached, 0), *found])):
            raise StaleSidecarError(f"{line} has members in another order than the shard. Build the index again")
        if key == last:
            raise StaleSidecarError(f"{line} repeats the sample {key!r} of the line before. Build the index again")
        reached, last = found[-1].offset, key
        for member in found:
            builder.add(*member)
    return builder.finish(end=members.scan.end, facts=members.facts)


def _parse_components(content: bytes, name: str) -> Iterator[list[tuple[str, int, int, str | None]]]:
    """Yield the components of each sample: extension, offset, size, and name or None."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    version, count = [*WORD.findall(lines[0]), "", ""][:2]
    if version not in WORDS or not _is_number(count):
        raise CorruptSidecarError(
            f"{name} is not an index of DALI: its first line is {lines[0][:40]!r}, not 'v1.2 NUMBER'"
        )
    # A truncated line may look like one with fewer components, so the last one must end with a line feed.
    if not 0 < int(count) < len(lines) - 1:
        raise CorruptSidecarError(
            f"{name} is damaged: it should have {int(count)} samples, but has {len(lines) - 2} complete lines. Build "
            f"it again"
        )
    step = WORDS[version]
    for number, line in enumerate(lines[1 : int(count) + 1], 2):
        words = WORD.findall(line)
        numbers = [
            words[at] for first in range(0, len(words), step) for at in (first + 1, first + 2) if at < len(words)
        ]
        if not words or len(words) % step or not all(map(_is_number, numbers)):
            raise CorruptSidecarError(
                f"Line {number} of {name} is {line[:60]!r}, not groups of {step} words: extension, offset, size"
                f"{', name' if step == 4 else ''}. Build it again"
            )
        yield [
            (words[at], int(words[at + 1]), int(words[at + 2]), words[at + 3] if step == 4 else None)
            for at in range(0, len(words), step)
        ]


def _matching_member(members: MemberTable, component: tuple[str, int, int, str | None], line: str) -> ShardMember:
    """Return the member of a component, or raise if they do not match."""
    extension, offset, size, expected = component
    member = members.member_at(offset, size, line)
    parts = first_dot(member.name)
    if parts is None:
        raise StaleSidecarError(
            f"{line} has the member {member.name!r}, which belongs to no sample, as its name has no extension"
        )
    if parts[1] != extension or expected not in (None, member.name):
        text = f".{extension}" if expected is None else expected
        raise StaleSidecarError(
            f"{line} says that {text!r} is at byte {offset}, but the member there is {member.name!r}. Build the index "
            f"again"
        )
    return member


def _only_key(found: list[ShardMember], line: str) -> str:
    keys = {(first_dot(member.name) or ("", ""))[0] for member in found}
    if len(keys) > 1:
        raise StaleSidecarError(
            f"{line} has members of several samples: {', '.join(map(repr, sorted(keys)))}. Build the index again"
        )
    return min(keys)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS
