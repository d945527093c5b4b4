"""DALI indexes: the file for each shard that ``fn.readers.webdataset`` of DALI reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import UnsupportedSidecarError
from wds_datapipes.index.format.builder import DEFAULT_OPTIONS, build_index
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.file_systems import is_web
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.sidecars import write_sidecar

#: The characters that separate words in a DALI index.
BLANKS = frozenset(" \t\n\v\f\r")


@checks_calls
def write_dali_index(
    url: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    options: IndexOptions = DEFAULT_OPTIONS,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex:
    """Write the index of a shard for DALI's ``fn.readers.webdataset``, as DALI's ``wds2idx`` does.

    The offsets are correct for every kind of archive, including those with long names and PAX headers. Files that
    belong to no sample are left out.

    Args:
        url: the shard, a path or a URL.
        path: the file to write; by default, the one that DALI expects next to the shard.
        options: how the shard is indexed.
        storage_options: passed to a remote file system.

    Returns:
        The index of the shard, with field names as they are written.

    Raises:
        UnsupportedSidecarError: the format cannot describe the shard: a name has a blank, there are no samples, or the
            shard is compressed.
        ShardError: the shard cannot be read.
        DuplicateKeyError: a field occurs twice in a sample.

    Examples:
        >>> from pathlib import Path
        >>> from wds_datapipes.testing import build_shard
        >>> _ = write_dali_index(build_shard("a.tar", [{"__key__": "x", "jpg": "one", "cls": "1"}]))
        >>> print(Path("a.idx").read_text(), end="")
        v1.2 1
        jpg 512 3 x.jpg cls 1536 1 x.cls
    """
    shard = os.fspath(url)
    indexing = replace(options, lowercase=False)
    index = build_index(shard, indexing, on_repeated_key="ignore", storage_options=storage_options)
    index.check_random_access()
    if not len(index):
        raise UnsupportedSidecarError(f"{redact(shard)} has no samples, and DALI does not accept an empty index")
    if index.facts.key_rule != "first_dot":
        raise UnsupportedSidecarError(
            f"{redact(shard)} was indexed with the rule {index.facts.key_rule}, but DALI splits names at the first dot"
        )
    lines = [f"v1.2 {len(index)}"]
    for sample in index:
        words = []
        for extension, offset, size in sample.entries:
            name = f"{sample.key}.{extension}"
            if not extension or not BLANKS.isdisjoint(name):
                raise UnsupportedSidecarError(
                    f"{redact(shard)} has the member {name!r}, but the words of a DALI index are separated by blanks "
                    "and must not be empty. Rename the member"
                )
            words.append(f"{extension} {offset} {size} {name}")
        lines.append(" ".join(words))
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    write_sidecar(dali_index_url(shard) if path is None else os.fspath(path), text, storage_options)
    return index


def dali_index_url(url: str) -> str:
    """Return the name that DALI expects: the name of the shard up to the first dot of its base name, with ``.idx``.

    >>> dali_index_url("data/train-000.tar"), dali_index_url("a/b.c.tar"), dali_index_url(".x.tar")
    ('data/train-000.idx', 'a/b.idx', '.x.idx')
    """
    scheme, _ = split_scheme(url)
    path, mark, query = url.partition("?") if is_web(scheme) else (url, "", "")
    dot = path.find(".", path.rfind("/") + 2)
    return f"{path if dot < 0 else path[:dot]}.idx{mark}{query}"
