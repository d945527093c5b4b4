"""The progress of tasks on shards: a bar in a terminal, and lines in a log."""

from __future__ import annotations

import logging
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import Self


#: The minimum time between two updates of the bar and between two lines in the log, in seconds.
BAR_PERIOD_S, LOG_PERIOD_S = 0.1, 10.0


class ProgressMeter:
    """Shows a progress bar if standard error is a terminal and rich is installed, and removes it at the end.

    `add` updates the bar without a thread, because worker processes may be forked meanwhile.

    Args:
        label: the name of the task, such as ``"Indexing"``.
        total: the number of shards or samples, if known.
        shown: whether to show the bar; false if an archive is written to standard output.
        unit: the unit of the bar, ``"shards"`` or ``"samples"``.
        logger: a logger that gets a line every 10 seconds and one at the end.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *,
        shown: bool = True,
        unit: Literal["shards", "samples"] = "shards",
        logger: logging.Logger | None = None,
    ) -> None:
        self._label, self._total, self._unit, self._logger = label, total, unit, logger
        self._bar = _new_bar() if shown else None
        self._task = None if self._bar is None else self._bar.add_task(label, total=total, rate=unit)
        self._started = self._updated = self._logged = perf_counter()
        self._shards = self._samples = self._bytes = 0

    def add(self, *, shards: int = 0, samples: int = 0, size: int = 0) -> None:
        """Add finished shards, samples and bytes."""
        self._shards += shards
        self._samples += samples
        self._bytes += size
        now = perf_counter()
        if self._bar is not None and now - self._updated >= BAR_PERIOD_S:
            self._updated = now
            seconds = now - self._started
            texts = ["shards", f"{self._samples:,} samples"] if self._unit == "shards" else ["samples"]
            texts += f"{self._samples / seconds:,.0f} samples/s", f"{human_bytes(self._bytes / seconds)}/s"
            # Show fewer figures in a narrow terminal, where rich would cut off all of them.
            room = self._bar.console.width - len(f"{self._label}{self._total}{self._total}") - 18
            while len("  ".join(texts)) > room and len(texts) > 1:
                texts.pop()
            self._bar.update(self._task, completed=self._done, rate="  ".join(texts), refresh=True)
        if self._logger is not None and now - self._logged >= LOG_PERIOD_S and self._done:
            self._logged = now
            self._logger.info("%s: %d of %s %s", self._label, self._done, self._total, self._unit)

    @property
    def _done(self) -> int:
        return self._shards if self._unit == "shards" else self._samples

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._logger is not None:
            seconds = perf_counter() - self._started
            self._logger.info(
                "%s: did %d of %s %s in %.0f s", self._label, self._done, self._total, self._unit, seconds
            )


def _new_bar() -> Any:
    """Return a bar, or None if there is no terminal for it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    console = Console(stderr=True, highlight=False)
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    columns = texts[0], BarColumn(), MofNCompleteColumn(), texts[1], TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)


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
