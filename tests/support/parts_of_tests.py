"""The files of tests that one of several machines runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def files_of_part(files: Iterable[Path], part: str) -> set[Path]:
    """Return the files of a part such as ``1/4``: each fourth of the distinct files, from the first on."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"--part is K/N with K from 1 to N, such as 1/4, not {part}")
    return {*[*dict.fromkeys(files)][number - 1 :: count]}
