"""Write test shards with Python's tarfile module."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Mapping


def build_shard(
    path: str | os.PathLike[str],
    samples: Iterable[Mapping[str, bytes | str]],
    *,
    tar_format: int = tarfile.USTAR_FORMAT,
    end_marker: bool = True,
) -> str:
    """Write a shard with Python's tarfile module, independently of this package.

    Args:
        path: the file to write; compressed if its name ends in ``gz``, ``bz2`` or ``xz``.
        samples: the samples, each with ``__key__`` and its fields as bytes or str, in the order of writing. Fields
            whose names begin with two underscores are not written.
        tar_format: one of tarfile's formats.
        end_marker: write the two blocks of zeros at the end of an archive and the padding of its last record.

    Returns:
        The path, as ``str``.

    Examples:
        >>> build_shard("a.tar", [{"__key__": "000", "txt": b"hello", "cls": b"7"}])
        'a.tar'
    """
    name = os.fspath(path)
    compression = next((kind for kind in ("gz", "bz2", "xz") if name.endswith(kind)), "")
    with tarfile.open(name, f"w:{compression}", format=tar_format) as archive:  # type: ignore[call-overload]  # a computed mode
        for sample in samples:
            for field, value in sample.items():
                if not field.startswith("__"):
                    member = tarfile.TarInfo(f"{sample['__key__']!s}.{field}")
                    data = value.encode() if isinstance(value, str) else value
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        end = archive.offset
    if not end_marker:
        if compression:
            raise ValueError(f"{name} is compressed, so its end marker cannot be removed")
        os.truncate(name, end)
    return name
