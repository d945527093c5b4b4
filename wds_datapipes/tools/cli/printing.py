"""Results on standard output, as text or JSON, and faults on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wds_datapipes.errors import WdsError, plural
from wds_datapipes.hints import Message
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.tools.cli.errors import FAULT_FOUND, WRONG_USE, on_one_line, print_line, printable
from wds_datapipes.tools.prepare.shard_contents import ShardFault
from wds_datapipes.tools.prepare.shard_run import ConvertedShard
from wds_datapipes.types import ShardInfo

#: The number of skipped errors shown.
SHOWN = 10


def size_of_shards(total: int, shards: int, unread: int) -> str:
    """Format the total size of shards, without those that could not be read to the end.

    >>> size_of_shards(30_720, 3, 0), size_of_shards(30_720, 3, 1), size_of_shards(0, 2, 2)
    ('30.7 kB', 'more than 30.7 kB', 'unknown size')
    """
    if unread and unread == shards:
        return "unknown size"
    return f"{'more than ' if unread else ''}{human_bytes(total)}"


def print_json(facts: object, *, indent: int | None = 1) -> None:
    """Print facts as JSON; without indentation, they are one line."""
    sys.stdout.write(json.dumps(facts, indent=indent) + "\n")


def print_table(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> None:
    """Print rows in columns, with numbers aligned to the right; in a terminal that is too narrow, cell by cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) - 2 > shutil.get_terminal_size().columns:
        titles = rows[0] if len(widths) > 2 else ("", "")
        for first, *others in rows[len(widths) > 2 :]:
            sys.stdout.write(f"{titles[0]} {first}".strip() + "\n")
            for title, cell in zip(titles[1:], others, strict=True):
                sys.stdout.write(f"  {title:{max(map(len, titles[1:]))}}  {cell}\n" if cell else "")
        return
    for cells in rows:
        line = "  ".join(
            f"{cell:{width}}" if at in left else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        sys.stdout.write(f"{line.rstrip()}\n")


def print_error(message: str, label: str = "Error") -> None:
    """Print a line to standard error, after what was printed to standard output."""
    sys.stdout.flush()
    print_line(f"{label}: {on_one_line(message)}")


def print_nothing_found(shards: int, what: str = "sample") -> None:
    """Print a note to standard error that the shards have nothing to show."""
    print_error(f"there is no {what} in {plural(shards, 'shard')}", "Note")


def message_with_notes(error: BaseException) -> str:
    """Return the message of an error, with its notes if it is not an error of this package."""
    notes = () if isinstance(error, WdsError) else [str(note) for note in getattr(error, "__notes__", ())]
    return Message(str(error), f" ({'; '.join(notes)})") if notes else str(error)


def end_with_faults(faults: Sequence[ShardFault], *, is_printed: bool = True) -> None:
    """Print the faults of shards; if there are any, end with the exit code for them."""
    for fault in faults if is_printed else ():
        print_error(fault.message)
    if faults:
        raise SystemExit(WRONG_USE if any(fault.kind == "ShardOpenError" for fault in faults) else FAULT_FOUND)


def report_shards(
    shards: Sequence[ShardInfo | ConvertedShard],
    errors: Iterable[Exception],
    *,
    as_json: bool,
    facts: Mapping[str, Any],
    failures: Mapping[str, BaseException] | None = None,
) -> None:
    """Print the written shards, and to standard error the skipped errors and failed shards.

    Args:
        shards: the shards.
        errors: the skipped errors; an error that a retry raises again is printed once.
        as_json: print JSON.
        facts: further facts for JSON.
        failures: the errors of shards, if shards are converted.
    """
    if as_json:
        failed = [
            {"source": redact(url), "kind": type(error).__name__, "message": message_with_notes(error)}
            for url, error in (failures or {}).items()
        ]
        written = {**facts, "shards": [_facts_of(shard) for shard in shards]}
        skipped = [{"kind": kind, "message": message} for kind, message in _kinds_and_messages(errors)]
        told = {**written, "skipped": skipped}
        print_json(told if failures is None else {**told, "failed": failed}, indent=None)
        return
    for shard in shards:
        info = shard.info if isinstance(shard, ConvertedShard) else shard
        counts = [plural(info.samples, "sample"), human_bytes(info.bytes)]
        if isinstance(shard, ConvertedShard):
            counts[0] += f" of {shard.read:,} read" if shard.source else ""
            counts += [] if shard.is_new else ["already finished"]
        sys.stdout.write(f"{printable(redact(info.url))}: {', '.join(counts)}\n")
    print_skipped(errors)
    for url, failure in (failures or {}).items():
        print_error(Message(f"{redact(url)}: {type(failure).__name__}: ", message_with_notes(failure)))
    if failures:
        total = plural(len(shards) + len(failures), "shard")
        print_error(f"{len(failures):,} of {total} failed. Run the same command again to convert only the missing ones")


def print_skipped(errors: Iterable[Exception]) -> None:
    """Print the first of the skipped errors."""
    skipped = _kinds_and_messages(errors)
    for kind, message in skipped[:SHOWN]:
        print_error(Message(f"{kind}: ", message), "Skipped")
    if len(skipped) > SHOWN:
        print_error(f"{len(skipped) - SHOWN:,} more", "Skipped")


def _kinds_and_messages(errors: Iterable[Exception]) -> list[tuple[str, str]]:
    """Return the classes and messages of errors, each once."""
    return list(dict.fromkeys((type(error).__name__, message_with_notes(error)) for error in errors))


def _facts_of(shard: ShardInfo | ConvertedShard) -> dict[str, Any]:
    info = shard.info if isinstance(shard, ConvertedShard) else shard
    facts: dict[str, Any] = {"url": redact(info.url), "samples": info.samples, "bytes": info.bytes}
    if isinstance(shard, ConvertedShard):
        facts |= {"source": redact(shard.source), "read": shard.read, "skipped": shard.skipped}
        facts |= {"sha256": info.sha256, "new": shard.is_new}
    return facts
