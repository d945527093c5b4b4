"""Names of written shards: how they are numbered and how several writers share the numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from glob import escape, glob
from typing import Any

from wds_datapipes.hints import RESUME, Hint, Message
from wds_datapipes.index.format.index_file import index_url
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.output.sink import remove_file, size_of
from wds_datapipes.types import Instance

#: The field for the number in a pattern.
NUMBER = re.compile(r"%[-+ 0#]*\d*[diu]")
#: The other fields of a pattern, after `re.escape`.
FIELDS = re.compile(r"\\\{(rank|worker)\\\}")


def check_pattern(pattern: str | os.PathLike[str], *, maxcount: float, maxsize: float) -> str:
    """Check a pattern and the limits of shards; return the pattern as a string.

    Raises:
        ValueError: an argument is invalid.
    """
    text = os.fspath(pattern)
    try:
        different = text % 0 != text % 1
    except (TypeError, ValueError):
        different = False
    if not different:
        raise ValueError(
            f"A pattern for shards must have exactly one placeholder for the number, as in 'train-%06d.tar', not "
            f"{redact(text)!r}. Double other percent signs"
        )
    if not maxcount >= 1:
        raise ValueError(f"maxcount must be at least 1 sample, not {maxcount!r}")
    if not maxsize > 0:
        raise ValueError(f"maxsize must be a positive number of bytes, not {maxsize!r}")
    return text


def fill_pattern(pattern: str, writer: Instance) -> str:
    """Return a pattern with the numbers of the rank and the worker filled in."""
    return pattern.replace("{rank}", str(writer.rank)).replace("{worker}", str(writer.worker))


def shard_numbers(pattern: str, writer: Instance) -> tuple[int, int]:
    """Return a writer's first number and the step to the next one.

    Writers that share a pattern, even after `fill_pattern`, use every n-th number.

    >>> shard_numbers("train-%06d.tar", Instance(worker=1, workers=4))
    (1, 4)
    >>> shard_numbers("train-{worker}-%06d.tar", Instance(rank=2, ranks=8, worker=1, workers=4))
    (2, 8)
    """
    first, step = (0, 1) if "{worker}" in pattern else (writer.worker, writer.workers)
    return (first, step) if "{rank}" in pattern else (first + step * writer.rank, step * writer.ranks)


def find_old_shards(
    pattern: str, number: int, step: int = 1, storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the existing shards with the names of a writer's next shards, starting at ``number``, without gaps.

    After a writer's last shard, they come from an earlier run with more shards, and a pattern such as ``*`` would match
    them too.
    """
    found: list[str] = []
    while size_of(url := pattern % number, storage_options) is not None:
        found.append(url)
        number += step
    return found


def remove_old_shards(urls: list[str], storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove shards and their indexes, the last one first, so that an interruption leaves no gap."""
    for url in reversed(urls):
        remove_file(index_url(url), storage_options)
        remove_file(url, storage_options)


def describe_old_shards(urls: list[str]) -> str:
    """Return the beginning of a message about shards of an earlier run."""
    if len(urls) == 1:
        return f"{redact(urls[0])!r} is from an earlier run and would be read with the new shards"
    return (
        f"{redact(urls[0])!r} and the shards up to {redact(urls[-1])!r} are from an earlier run and would be read "
        f"with the new shards"
    )


def journal_path(
    pattern: str, journal: str | os.PathLike[str] | None, first: int, step: int, *, hint: Hint = RESUME
) -> str:
    """Return the path of a writer's journal: the given path, or one next to the shards.

    Args:
        pattern: the pattern of the shards.
        journal: the path that the user has chosen, if any.
        first: the number of the writer's first shard.
        step: the difference between its numbers.
        hint: advice to choose a path.

    Raises:
        ValueError: the shards are not local, but no path was given.
    """
    stem, ending = _journal_name(pattern, journal, hint)
    return f"{stem}-{first}-of-{step}{ending}" if step > 1 else f"{stem}{ending}"


def find_journals(pattern: str, journal: str | os.PathLike[str] | None) -> list[str]:
    """Return the journals of all writers that share a pattern.

    Fields for the rank and the worker match any number.
    """
    stem, ending = _journal_name(pattern, journal)
    any_stem = escape(stem).replace("{rank}", "*").replace("{worker}", "*")
    found = {*glob(f"{any_stem}{escape(ending)}"), *glob(f"{any_stem}-*-of-*{escape(ending)}")}  # noqa: PTH207  strings
    is_one = re.compile(FIELDS.sub(r"\\d+", re.escape(stem)) + r"(-\d+-of-\d+)?" + re.escape(ending)).fullmatch
    return sorted(filter(is_one, found))


def _journal_name(pattern: str, journal: str | os.PathLike[str] | None, hint: Hint = RESUME) -> tuple[str, str]:
    """Return the parts of a journal's name before and after its writer's number."""
    if journal is not None:
        return os.fspath(journal), ""
    path = local_path(pattern)
    if path is None:
        raise ValueError(
            Message(f"{redact(pattern)!r} is not a local path, but a journal must be a local file. Choose one: ", hint)
        )
    return NUMBER.sub("shards", path), ".journal"


def find_overwritten(pattern: str, urls: Iterable[str]) -> str | None:
    """Return the first of some shards whose name matches a pattern with any number, or None.

    >>> find_overwritten("./train-%06d.tar", ["val-000000.tar", "train-000012.tar"])
    'train-000012.tar'
    """
    target = local_path(pattern)
    begin, end = (
        re.escape(text.replace("%%", "%")) for text in NUMBER.split(_absolute_name(target or pattern), maxsplit=1)
    )
    is_name = re.compile(rf"{begin} *[-+]?\d+ *{end}").fullmatch
    for url in urls:
        path = local_path(url)
        names = {url} if path is None else {_absolute_name(path), os.path.realpath(path)}
        if (path is None) is (target is None) and any(map(is_name, names)):
            return url
    return None


def _absolute_name(path: str) -> str:
    """Return the absolute path of a local file, with the symbolic links of its folder resolved, or an unchanged URL."""
    if local_path(path) is None:
        return path
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)  # noqa: PTH118  a pattern, not a path
