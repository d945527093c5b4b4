"""Index files of Megatron Energon.

An index is an array of little-endian 64-bit numbers: the offsets of the first headers of all samples, and that of the
end marker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wds_datapipes.errors import CorruptSidecarError, StaleSidecarError, UnsupportedSidecarError
from wds_datapipes.index.build import DEFAULT_OPTIONS, build_index
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.small_files import read_sidecar, write_sidecar

#: Energon's split of names: the directory may have dots, but the key after it has none.
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")


def energon_rule(name: str) -> tuple[str, str] | None:
    """Split a member's name as Energon does.

    >>> energon_rule("v1.2/a.seg.png"), energon_rule("README"), energon_rule("d/.hidden.png")
    (('v1.2/a', 'seg.png'), None, ('d/', 'hidden.png'))
    """
    match = NAME.match(name)
    return (match[1], match[2]) if match else None


def energon_index_url(url: str) -> str:
    """Return the name of the index of a shard: that of the shard, without its last suffix, and ``.tar.idx``.

    >>> energon_index_url("data/train-000.tar"), energon_index_url("a.b.tgz")
    ('data/train-000.tar.idx', 'a.b.tar.idx')
    """
    scheme, _ = split_scheme(url)
    path, mark, query = url.partition("?") if scheme in ("http", "https") else (url, "", "")
    dot = path.rfind(".", path.rfind("/") + 2)
    return f"{path if dot < 0 else path[:dot]}.tar.idx{mark}{query}"


def write_energon_index(
    url: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write the index of a shard for Energon, and return its name.

    Args:
        url: the shard, a path or a URL.
        path: the file to write; by default, the one next to the shard that Energon expects.
        options: how the shard is indexed; names are always split as Energon does.
        storage_options: passed to a remote file system.

    Raises:
        UnsupportedSidecarError: the shard is compressed or has no samples.
        ShardError: the shard cannot be read.
        DuplicateKeyError: a field occurs twice in a sample.
        MissingSidecarError: the index cannot be written.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "jpg": "one"}, {"__key__": "y", "jpg": "two"}])
        >>> import numpy
        >>> numpy.fromfile(write_energon_index(url), "<u8")
        array([   0, 1024, 2048], dtype=uint64)
    """
    shard = os.fspath(url)
    target = os.fspath(path) if path is not None else energon_index_url(shard)
    build_energon_index(shard, target, options, storage_options)
    return target


def read_energon_index(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    options: IndexOptions = DEFAULT_OPTIONS,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex:
    """Read an index of Energon, and verify it against the shard's headers.

    Args:
        path: the index.
        url: its shard.
        options: how the shard is indexed; names are always split as Energon does.
        storage_options: passed to remote file systems.

    Returns:
        The index, with keys and fields as Energon splits names.

    Raises:
        MissingSidecarError: the index cannot be read.
        CorruptSidecarError: the file is not an index of Energon.
        StaleSidecarError: the index does not match the shard; the message names the sample.
        ShardError: the shard cannot be read.
    """
    name, shard = redact(os.fspath(path)), os.fspath(url)
    content = read_sidecar(os.fspath(path), storage_options)
    if len(content) % 8 or not content:
        raise CorruptSidecarError(
            f"{name} is not an index of Energon: its size of {len(content)} bytes is not a multiple of 8"
        )
    offsets = np.frombuffer(content, "<u8")
    index = _index_shard(shard, options, storage_options)
    found = index.columns["sample_offsets"].astype("<u8")
    for number, (expected, actual) in enumerate(zip(offsets.tolist(), found.tolist(), strict=False)):
        if expected != actual:
            what = f"sample {number}" if number + 1 < len(offsets) else "the end"
            found_there = (
                f"sample {number} ({index[number].key!r}) begins" if number < len(index) else "the samples end"
            )
            raise StaleSidecarError(
                f"{name} says that {what} is at byte {expected} of {redact(shard)}, but {found_there} at byte "
                f"{actual}. Build it again"
            )
    if len(offsets) != len(found):
        raise StaleSidecarError(
            f"{name} has {len(offsets) - 1} samples, but {redact(shard)} has {len(index)}. Build it again"
        )
    return index


def build_energon_index(
    url: str, path: str, options: IndexOptions, storage_options: Mapping[str, Any] | None
) -> ShardIndex:
    """Write the index of a shard for Energon, and return it as a `ShardIndex`."""
    index = _index_shard(url, options, storage_options)
    if not len(index):
        raise UnsupportedSidecarError(f"{redact(url)} has no samples, and Energon does not accept an empty shard")
    write_sidecar(path, index.columns["sample_offsets"].astype("<u8").tobytes(), storage_options)
    return index


def _index_shard(url: str, options: IndexOptions, storage_options: Mapping[str, Any] | None) -> ShardIndex:
    """Index a shard with Energon's rule."""
    as_energon = replace(options, key_rule=energon_rule, lowercase=False)
    index = build_index(url, as_energon, on_repeated_key="ignore", storage_options=storage_options)
    index.check_random_access()
    return index
