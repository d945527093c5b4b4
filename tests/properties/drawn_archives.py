"""Random archives, and those of given members, written by Python's tarfile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

NOISE = Random(0).randbytes(1 << 18)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

#: Sizes around a block, and around every power of two that may be a threshold of the reader.
SIZES = st.one_of(
    st.integers(0, 1100),
    st.sampled_from([0, 1, 511, 512, 513, 1023, 1024, 1025]),
    st.builds(lambda power, more: 2**power + more, st.integers(11, 17), st.sampled_from([-513, -512, -1, 0, 1, 512])),
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 12
    + [tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
    + [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)

#: The format of an archive, and the name, kind and size of each member.
Recipe = tuple[str, list[tuple[str, bytes, int]]]


def recipes(names: st.SearchStrategy[str], max_size: int = 24) -> st.SearchStrategy[Recipe]:
    """Draw archives whose members have drawn names."""
    return st.tuples(st.sampled_from(list(FORMATS)), st.lists(st.tuples(names, KINDS, SIZES), max_size=max_size))


def written(recipe: Recipe) -> bytes:
    """Write an archive."""
    tar_format, members = recipe
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[tar_format], encoding="utf-8") as tar:
        for number, (name, kind, size) in enumerate(members):
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = name[::-1] if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            member.size = size if member.isreg() else 0
            member.mtime = size / 8  # PAX requires a header for fractions
            try:
                tar.addfile(member, io.BytesIO(NOISE[number : number + size]))
            except ValueError:
                assert tar_format == "ustar"  # the name does not fit
    return buffer.getvalue()


def write_members(path: Path | str, members: Iterable[Any], form: str = "ustar", *, mtime: float = 1) -> str:
    """Write members, which are names that they contain, pairs of a name and bytes, or ``TarInfo`` objects."""
    with tarfile.open(path, "w", format=FORMATS[form]) as tar:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                tar.addfile(each)
                continue
            name, data = (each, each.encode()) if isinstance(each, str) else each
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), mtime
            tar.addfile(member, io.BytesIO(data))
    return str(path)
