"""Index files of NVIDIA DALI's WebDataset reader, in the format of its ``wds2idx``.

    v1.2 <number of samples>
    <extension> <offset> <size> <name>[ <extension> <offset> <size> <name>]...    one line per sample

Offsets are those of the data. Version 1.1 has no names. Words are separated by white space, without quoting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

from wds_datapipes.arguments import check_choice
from wds_datapipes.errors import CorruptSidecarError, StaleSidecarError, UnsupportedSidecarError
from wds_datapipes.index.build import DEFAULT_OPTIONS, build_index
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.small_files import read_sidecar, write_sidecar

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
    options: IndexOptions = DEFAULT_OPTIONS,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write the index of a shard for DALI's ``fn.readers.webdataset``, and return its name.

    The offsets are correct for every kind of archive, including those with long names and PAX headers. Files that
    belong to no sample are left out.

    Args:
        url: the shard, a path or a URL.
        path: the file to write; by default, the one next to the shard that DALI expects.
        version: the version of the format; ``"v1.1"`` has no names.
        options: how the shard is indexed.
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
    as_written = replace(options, lowercase=False)
    index = build_index(shard, as_written, on_repeated_key="ignore", storage_options=storage_options)
    write_sidecar(target, dali_text(index, version, archive=redact(shard)), storage_options)
    return target


def dali_text(index: ShardIndex, version: DaliVersion = "v1.2", *, archive: str = "The shard") -> bytes:
    """Return an index in DALI's format.

    Raises:
        UnsupportedSidecarError: the format cannot represent the index.
    """
    check_choice("version", version, DaliVersion)
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
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex:
    """Read an index of DALI's ``wds2idx`` or `write_dali_index`, and verify it against the shard's headers.

    ``wds2idx`` writes wrong offsets for some archives: in DALI 2.4 for those with GNU long names, in earlier versions
    for those with PAX headers.

    Args:
        path: the index.
        url: its shard.
        options: how the shard is indexed.
        storage_options: passed to remote file systems.

    Returns:
        The index of the shard.

    Raises:
        MissingSidecarError: the index cannot be read.
        CorruptSidecarError: the file is not an index of DALI.
        StaleSidecarError: the index does not match the shard; the message names the line.
        UnsupportedSidecarError: the format cannot describe the shard.
        ShardError: the shard cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "jpg": "one", "cls": "1"}])
        >>> read_dali_index(write_dali_index(url), url) == build_index(url)
        True
    """
    name, shard = redact(os.fspath(path)), os.fspath(url)
    lines = read_sidecar(os.fspath(path), storage_options).decode("utf-8", "surrogateescape").split("\n")
    version, count = [*WORD.findall(lines[0]), "", ""][:2]
    if version not in WORDS or not (count.isascii() and count.isdigit() and len(count) <= MAX_DIGITS):
        raise CorruptSidecarError(
            f"{name} is not an index of DALI: its first line is {lines[0][:40]!r}, not 'v1.2 NUMBER'"
        )
    index = build_index(shard, options, on_repeated_key="ignore", storage_options=storage_options)
    expected = dali_text(index, version, archive=redact(shard)).decode("utf-8", "surrogateescape").split("\n")
    # The last line ends with a line feed, after which there may be anything.
    for number, (found, right) in enumerate(zip_longest(lines[: int(count) + 2], expected, fillvalue=""), 1):
        if WORD.findall(found) != WORD.findall(right) and number < len(expected):
            raise StaleSidecarError(
                f"Line {number} of {name} is {found[:200]!r}, and that of {redact(shard)} is {right[:200]!r}. Build "
                "the index again"
            )
    return index
