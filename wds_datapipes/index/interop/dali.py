"""Index files of NVIDIA DALI's WebDataset reader, as its ``wds2idx`` makes them.

    v1.2 <number of samples>
    <extension> <offset> <size> <name>[ <extension> <offset> <size> <name>]...    one line for each sample

The offset is that of the data. Version 1.1 has no names. Words are separated by white space, without quoting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from wds_datapipes.errors import CorruptSidecarError, UnsupportedSidecarError, WrongSidecarError
from wds_datapipes.index.build import build_index
from wds_datapipes.index.builder import IndexBuilder
from wds_datapipes.index.interop.shard_members import ShardMember, ShardMembers
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.small_files import read_sidecar, write_sidecar
from wds_datapipes.samples.grouping import OnDuplicate
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.tar.headers import EndMarker

__all__ = ["DaliVersion", "dali_index_url", "dali_text", "read_dali_index", "write_dali_index"]

DaliVersion: TypeAlias = Literal["v1.1", "v1.2"]

#: How many words a component has, by the version.
WORDS = {"v1.1": 3, "v1.2": 4}
#: What separates words for C++.
BLANKS = frozenset(" \t\n\v\f\r")
WORD = re.compile(r"[^ \t\n\v\f\r]+")
#: No offset or size has more digits.
MAX_DIGITS = 19


def dali_index_url(url: str) -> str:
    """Return the name that DALI expects: the shard's, up to the first dot of its base name, with ``.idx``.

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

    The offsets are right for every kind of archive, with long names and PAX headers too. Files that are in no sample
    are left out.

    Args:
        url: the shard, a path or a URL.
        path: the file to write, if not the one that DALI expects next to the shard.
        version: of the format; ``"v1.1"`` has no names.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to a remote file system.

    Raises:
        UnsupportedSidecarError: the format cannot describe the shard: a name has a blank, or there is no sample, or the
            shard is compressed.
        ShardError: the shard cannot be read.
        DuplicateFieldError: a field occurs twice in a sample.

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
        UnsupportedSidecarError: the format cannot say it.
    """
    if version not in WORDS:
        raise ValueError(f'The version is "v1.1" or "v1.2", not {version!r}')
    index.check_random_access()
    if index.facts.key_rule != "first_dot":
        raise UnsupportedSidecarError(
            f"{archive} was indexed by the rule {index.facts.key_rule}, and DALI splits names at the first dot"
        )
    if not len(index):
        raise UnsupportedSidecarError(f"{archive} has no samples, and DALI takes no index without any")
    lines = [f"{version} {len(index)}"]
    for number, sample in enumerate(index):
        words = []
        for name, (_, offset, size) in zip(index.names(number) or [], sample.entries, strict=True):
            extension = name[len(sample.key) + 1 :]
            if not extension or not BLANKS.isdisjoint(name):
                raise UnsupportedSidecarError(
                    f"{archive} holds the member {name!r}, and an index of DALI cannot, as blanks separate its words "
                    f"and none may be missing. Rename it"
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

    ``wds2idx`` writes wrong offsets for some archives: in DALI 2.4 for those with GNU long names, in earlier ones for
    those with PAX headers.

    Args:
        path: the index.
        url: its shard.
        lowercase: call fields by their lower-case names.
        on_duplicate: what to do where a field occurs twice in a sample.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to remote file systems.

    Returns:
        The index of the samples that it names, which need not be all.

    Raises:
        MissingSidecarError: it cannot be read.
        CorruptSidecarError: it is no index of DALI, or is damaged.
        WrongSidecarError: it says something of the shard that is not so; the message tells the line.
        ShardError: the shard cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "jpg": "one", "cls": "1"}])
        >>> read_dali_index(write_dali_index(url), url) == build_index(url)
        True
    """
    where, shard = redact(os.fspath(path)), os.fspath(url)
    lines = list(_parse_components(read_sidecar(os.fspath(path), storage_options), where))
    members = ShardMembers(shard, end_marker=end_marker, storage_options=storage_options)
    builder = IndexBuilder(
        lowercase=lowercase, on_duplicate=on_duplicate, on_repeated_key="ignore", archive=redact(shard)
    )
    reached, last = -1, None
    for number, components in enumerate(lines, 2):
        line = f"Line {number} of {where}"
        found = [_matching_member(members, component, line) for component in components]
        key = _only_key(found, line)
        if any(before.offset >= after.offset for before, after in pairwise([ShardMember("", 0, reached, 0), *found])):
            raise WrongSidecarError(f"{line} has members in another order than the shard. Build the index again")
        if key == last:
            raise WrongSidecarError(f"{line} has the sample {key!r} once more, as the line before. Build it again")
        reached, last = found[-1].offset, key
        for member in found:
            builder.add(*member)
    return builder.finish(end=members.scan.end, facts=members.facts)


def _parse_components(content: bytes, where: str) -> Iterator[list[tuple[str, int, int, str | None]]]:
    """Yield the components of each sample: extension, offset, size, and name, if given."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    version, count = [*WORD.findall(lines[0]), "", ""][:2]
    if version not in WORDS or not _is_number(count):
        raise CorruptSidecarError(
            f"{where} is no index of DALI: its first line is {lines[0][:40]!r}, not 'v1.2 NUMBER'"
        )
    # A line that was cut may look like one of fewer components, so the last one needs its end as well.
    if not 0 < int(count) < len(lines) - 1:
        raise CorruptSidecarError(
            f"{where} is damaged: it shall have {int(count)} samples, and has {len(lines) - 2} whole lines for them. "
            f"Build it again"
        )
    step = WORDS[version]
    for number, line in enumerate(lines[1 : int(count) + 1], 2):
        words = WORD.findall(line)
        numbers = [
            words[at] for first in range(0, len(words), step) for at in (first + 1, first + 2) if at < len(words)
        ]
        if not words or len(words) % step or not all(map(_is_number, numbers)):
            raise CorruptSidecarError(
                f"Line {number} of {where} is {line[:60]!r}, and not groups of {step} words: extension, offset, size"
                f"{', name' if step == 4 else ''}. Build it again"
            )
        yield [
            (words[at], int(words[at + 1]), int(words[at + 2]), words[at + 3] if step == 4 else None)
            for at in range(0, len(words), step)
        ]


def _matching_member(members: ShardMembers, component: tuple[str, int, int, str | None], line: str) -> ShardMember:
    """Return the member of a component, if it matches."""
    extension, offset, size, name = component
    member = members.at(offset, size, line)
    parts = first_dot(member.name)
    if parts is None:
        raise WrongSidecarError(
            f"{line} has the member {member.name!r}, which is in no sample, as its name has no field"
        )
    if parts[1] != extension or name not in (None, member.name):
        told = f".{extension}" if name is None else name
        raise WrongSidecarError(
            f"{line} says that {told!r} is at byte {offset}, and the member there is {member.name!r}. Build it again"
        )
    return member


def _only_key(found: list[ShardMember], line: str) -> str:
    keys = {(first_dot(member.name) or ("", ""))[0] for member in found}
    if len(keys) > 1:
        raise WrongSidecarError(
            f"{line} has members of several samples: {', '.join(map(repr, sorted(keys)))}. Build it again"
        )
    return min(keys)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS
