"""Progress bars: the shards done, and the throughput in samples and bytes per second."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ProgressMeter", "human_bytes", "new_console", "plural"]

#: The minimum time between two updates, in seconds.
PERIOD_S = 0.1


class ProgressMeter:
    """Shows a progress bar on standard error if that is a terminal, and removes it at the end.

    The bar is updated by `add`, without a thread, as worker processes may be forked meanwhile.

    Args:
        label: the name of the task.
        total: the number of shards or samples.
        shown: whether to show the bar; false if a tar archive goes to standard output.
        unit: the unit of the bar, ``"shards"`` or ``"samples"``.
    """

    def __init__(self, label: str, total: int, *, shown: bool = True, unit: str = "shards") -> None:
        console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._enabled = shown and console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not self._enabled)
        self._task = self._bar.add_task(label, total=total, rate=unit)
        self._unit = unit
        self._started = self._updated = perf_counter()
        self._shards = self._samples = self._bytes = 0

    def add(self, *, shards: int = 0, samples: int = 0, size: int = 0) -> None:
        """Add finished shards, samples and bytes."""
        if not self._enabled:
            return
        self._shards += shards
        self._samples += samples
        self._bytes += size
        now = perf_counter()
        if now - self._updated >= PERIOD_S:
            self._updated = now
            seconds = now - self._started
            by_shards = self._unit == "shards"
            rate = (
                f"{f'shards  {self._samples:,} samples' if by_shards else self._unit}  "
                f"{self._samples / seconds:,.0f} samples/s  {human_bytes(self._bytes / seconds)}/s"
            )
            done = self._shards if by_shards else self._samples
            self._bar.update(self._task, completed=done, rate=rate, refresh=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def new_console() -> Console:
    """Return a console that prints lines without wrapping or markup."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def human_bytes(count: float) -> str:
    """Format a number of bytes.

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
    """Format a count with its noun.

    >>> plural(1, "shard"), plural(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
