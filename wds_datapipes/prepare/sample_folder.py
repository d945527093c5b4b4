"""Samples as files in a folder, for programs that do not read shards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wds_datapipes.codecs import describe_value
from wds_datapipes.codecs.field_chain import name_field
from wds_datapipes.errors import EncodeError, SampleSourceError
from wds_datapipes.io.openers import redact
from wds_datapipes.types import Sample

__all__ = ["describe_sample", "read_many", "read_one", "write_sample"]

#: The file names of a single sample, and of one of several samples.
ONE = re.compile(r"sample\.(.+)", re.DOTALL)
MANY = re.compile(r"sample-([0-9]+)\.(.+)", re.DOTALL)
#: The file with the key.
KEY = "__key__"
#: The longest file name on Linux.
NAME_BYTES = 255


def write_sample(sample: Mapping[str, Any], folder: str) -> None:
    """Write the fields of a sample to an empty folder as ``sample.jpg`` and so on, and its key as ``sample.__key__``.

    Raises:
        EncodeError: the name of a field is not a valid file name. Nothing outside the folder is ever written.
        TypeError: a field is not bytes.
    """
    for field, value in sample.items():
        if field[:2] == "__" and field != KEY:
            continue
        if not isinstance(value, bytes if field != KEY else str):
            described = name_field(sample, field)  # type: ignore[arg-type]
            raise TypeError(f"{described} is {describe_value(value)}, but commands take bytes")
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        name = f"sample.{field}"
        if "/" in name or "\0" in name or len(_name_bytes(name)) > NAME_BYTES:
            shown = repr(field) if len(field) <= 100 else f"{field[:100]!r}... with {len(field):,} characters"
            key = str(sample.get(KEY))
            raise EncodeError(
                f"The field {shown} of sample {key[:200]!r} cannot be a file for the command: file names have at most "
                f"{NAME_BYTES} bytes, without slashes and zero bytes. Rename it first"
            )
        # Never overwrite a file because of a name in an archive.
        with open(Path(folder, name), "xb") as file:  # noqa: PTH123
            file.write(data)


def read_one(sample: Mapping[str, Any], folder: str) -> Sample | None:
    """Return the files in the folder as a sample, with the fields of ``sample`` first, or ``None`` if there are none.

    Raises:
        SampleSourceError: an entry is not a regular file.
    """
    files = {found[1]: name for name in os.listdir(folder) if (found := ONE.fullmatch(name))}  # noqa: PTH208  names
    return _load_sample(sample, folder, files, str(sample[KEY]))


def read_many(sample: Mapping[str, Any], folder: str) -> list[Sample]:
    """Return the samples stored as ``sample-000000.jpg`` and so on, in numeric order.

    Each key comes from ``sample-000000.__key__``, or is that of ``sample`` with the number appended.

    Raises:
        SampleSourceError: an entry is not a regular file.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in os.listdir(folder):  # noqa: PTH208  names
        if found := MANY.fullmatch(name):
            groups.setdefault(found[1], {})[found[2]] = name
    made = [
        _load_sample(sample, folder, groups[digits], f"{sample[KEY]}/{int(digits):06d}")
        for digits in sorted(groups, key=lambda digits: (int(digits), digits))
    ]
    return [each for each in made if each is not None]


def _load_sample(sample: Mapping[str, Any], folder: str, files: Mapping[str, str], key: str) -> Sample | None:
    """Load a sample from files; ``files`` maps fields to file names."""
    fields: dict[str, bytes] = {}
    order = [field for field in sample if field in files]
    for field in [*order, *sorted(set(files) - set(order))]:
        data = _read_file(sample, folder, files[field])
        lower = field.lower()
        if field == KEY:
            key = data.decode("utf-8", "surrogateescape").rstrip("\n") or key
        elif lower in fields:
            raise SampleSourceError(
                f"{_describe_file(sample, files[field])} in addition to another file for the field {lower!r}"
            )
        elif field[:2] != "__":
            fields[lower] = data
    return {KEY: key, "__url__": sample.get("__url__", ""), **fields} if fields else None


def _read_file(sample: Mapping[str, Any], folder: str, name: str) -> bytes:
    path = Path(folder, name)
    # An unpacked archive may contain a link to any file of this host.
    if path.is_symlink() or not path.is_file():
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "not a regular file"
        raise SampleSourceError(
            f"{_describe_file(sample, name)}, which is {kind}. The fields of a sample are regular files. Name other "
            f"files so that they do not start with 'sample'"
        )
    return path.read_bytes()


def _describe_file(sample: Mapping[str, Any], name: str) -> str:
    return f"For {describe_sample(sample)}, the command wrote {name!r}"


def describe_sample(sample: Mapping[str, Any]) -> str:
    """Describe a sample by its key and shard."""
    return f"the sample {sample.get(KEY)!r} of {redact(str(sample.get('__url__', '')))}"


def _name_bytes(name: str) -> bytes:
    try:
        return os.fsencode(name)
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogatepass")
