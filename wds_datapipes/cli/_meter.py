"""The bar of a long job: how many shards are done, and how many samples and bytes go by in a second."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ProgressMeter", "human_bytes", "new_console", "plural"]

#: How long the bar stays as it is, in seconds.
PERIOD_S = 0.1


class ProgressMeter:
    """Shows a bar on standard error if that is a terminal, and takes it away at the end.

    It is drawn when something is added, and by no thread: worker processes may be forked meanwhile.

    Args:
        label: what is being done.
        total: how many shards or samples there are.
        shown: whether to show it at all; not where a tar archive goes to standard output.
        unit: what the bar counts, ``"shards"`` or ``"samples"``.
    """

    def __init__(self, label: str, total: int, *, shown: bool = True, unit: str = "shards") -> None:
        console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._enabled = shown and console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not self._enabled)
        self._task = self._bar.add_task(label, total=total, told=unit)
        self._unit = unit
        self._begun = self._drawn = perf_counter()
        self._shards = self._samples = self._bytes = 0

    def add(self, *, shards: int = 0, samples: int = 0, size: int = 0) -> None:
        """Count what was done; ``size`` is in bytes."""
        if not self._enabled:
            return
        self._shards += shards
        self._samples += samples
        self._bytes += size
        now = perf_counter()
        if now - self._drawn >= PERIOD_S:
            self._drawn = now
            seconds = now - self._begun
            by_shards = self._unit == "shards"
            told = (
                f"{f'shards  {self._samples:,} samples' if by_shards else self._unit}  "
                f"{self._samples / seconds:,.0f} samples/s  {human_bytes(self._bytes / seconds)}/s"
            )
            done = self._shards if by_shards else self._samples
            self._bar.update(self._task, completed=done, told=told, refresh=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def new_console() -> Console:
    """Return a console that leaves lines as they are, so that what it prints can be copied and searched."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def human_bytes(count: float) -> str:
    """Return a number of bytes as one reads it.

    >>> human_bytes(0), human_bytes(999), human_bytes(1000), human_bytes(12_345_678), human_bytes(999_999)
    ('0 B', '999 B', '1.00 kB', '12.3 MB', '1.00 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    at = 0
    while count >= (999.5 if at else 1000) and at < len(units) - 1:
        count /= 1000
        at += 1
    if at == 0:
        return f"{count:.0f} B"
    return f"{count:.{0 if count >= 99.95 else 1 if count >= 9.995 else 2}f} {units[at]}"


def plural(count: int, noun: str) -> str:
    """Return a count and its noun.

    >>> plural(1, "shard"), plural(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
