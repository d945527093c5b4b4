"""A sample as files of a folder, for programs that know nothing of shards, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wds_datapipes.codecs.codec import describe_value
from wds_datapipes.codecs.decoding import place_in
from wds_datapipes.errors import SampleCommandError, UnwritableSampleError
from wds_datapipes.io.openers import redact
from wds_datapipes.types import Sample

__all__ = ["place_of", "read_many", "read_one", "write_sample"]

#: What files are called, and those of one of several samples.
ONE = re.compile(r"sample\.(.+)", re.DOTALL)
MANY = re.compile(r"sample-([0-9]+)\.(.+)", re.DOTALL)
#: The file with the key.
KEY = "__key__"
#: The longest name of a file that Linux takes.
NAME_BYTES = 255


def write_sample(sample: Mapping[str, Any], folder: str) -> None:
    """Write the fields of a sample to an empty folder: ``sample.jpg`` and so on, and its key as ``sample.__key__``.

    Raises:
        UnwritableSampleError: the name of a field is no name of a file. Nothing outside of the folder is ever written.
        TypeError: a field is not bytes.
    """
    for field, value in sample.items():
        if field[:2] == "__" and field != KEY:
            continue
        if not isinstance(value, bytes if field != KEY else str):
            raise TypeError(f"{place_in(sample, field)} holds {describe_value(value)}, and commands get bytes")  # type: ignore[arg-type]  # it is only looked at
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        name = f"sample.{field}"
        if "/" in name or "\0" in name or len(_name_bytes(name)) > NAME_BYTES:
            shown = repr(field) if len(field) <= 100 else f"{field[:100]!r}... with {len(field):,} characters"
            key = str(sample.get(KEY))
            raise UnwritableSampleError(
                f"The field {shown} of sample {key[:200]!r} cannot be a file for the command: names of files have at "
                f"most {NAME_BYTES} bytes, and neither a slash nor a zero byte. Give it another name first"
            )
        # It has to be new: no name from an archive writes to what is there.
        with open(Path(folder, name), "xb") as file:  # noqa: PTH123  Path has no mode "x" that is quicker to read
            file.write(data)


def read_one(sample: Mapping[str, Any], folder: str) -> Sample | None:
    """Return what is in the folder as a sample, with the fields of ``sample`` first; ``None`` if there is none.

    Raises:
        SampleCommandError: something is not a file.
    """
    files = {found[1]: name for name in os.listdir(folder) if (found := ONE.fullmatch(name))}  # noqa: PTH208  names
    return _sample_of_files(sample, folder, files, str(sample[KEY]))


def read_many(sample: Mapping[str, Any], folder: str) -> list[Sample]:
    """Return the samples that are in the folder as ``sample-000000.jpg`` and so on, in the order of their numbers.

    Each has the key in its ``sample-000000.__key__``, or that of ``sample`` with its number.

    Raises:
        SampleCommandError: something is not a file.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in os.listdir(folder):  # noqa: PTH208  names alone are wanted
        if found := MANY.fullmatch(name):
            groups.setdefault(found[1], {})[found[2]] = name
    made = [
        _sample_of_files(sample, folder, groups[digits], f"{sample[KEY]}/{int(digits):06d}")
        for digits in sorted(groups, key=lambda digits: (int(digits), digits))
    ]
    return [each for each in made if each is not None]


def _sample_of_files(sample: Mapping[str, Any], folder: str, files: Mapping[str, str], key: str) -> Sample | None:
    """Make a sample of files; ``files`` are their names by those of their fields."""
    fields: dict[str, bytes] = {}
    order = [field for field in sample if field in files]
    for field in [*order, *sorted(set(files) - set(order))]:
        data = _read_file(sample, folder, files[field])
        lower = field.lower()
        if field == KEY:
            key = data.decode("utf-8", "surrogateescape").rstrip("\n") or key
        elif lower in fields:
            raise SampleCommandError(f"{_left_file(sample, files[field])}, and another file of the field {lower!r}")
        elif field[:2] != "__":
            fields[lower] = data
    return {KEY: key, "__url__": sample.get("__url__", ""), **fields} if fields else None


def _read_file(sample: Mapping[str, Any], folder: str, name: str) -> bytes:
    path = Path(folder, name)
    # A link would be followed to any file, and an archive that the command has unpacked may hold one.
    if path.is_symlink() or not path.is_file():
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "no regular file"
        raise SampleCommandError(
            f"{_left_file(sample, name)}, which is {kind}. The fields of a sample are regular files; give what is none "
            f"of them a name that does not begin with 'sample'"
        )
    return path.read_bytes()


def _left_file(sample: Mapping[str, Any], name: str) -> str:
    return f"For {place_of(sample)}, the command has left {name!r}"


def place_of(sample: Mapping[str, Any]) -> str:
    """Name a sample and its shard."""
    return f"the sample {sample.get(KEY)!r} of {redact(str(sample.get('__url__', '')))}"


def _name_bytes(name: str) -> bytes:
    try:
        return os.fsencode(name)
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogatepass")
