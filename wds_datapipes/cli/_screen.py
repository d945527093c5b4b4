"""What commands show while they run: plain lines, and on a terminal a bar that goes when its work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

__all__ = ["new_console", "with_progress"]

T = TypeVar("T")


def new_console() -> Console:
    """Return a console that leaves lines as they are, so that what it prints can be copied and searched."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def with_progress(
    console: Console, items: Iterable[T], label: str, *, total: int, count: Callable[[T], int], unit: str = "samples"
) -> Iterator[T]:
    """Pass on items and show a bar meanwhile; ``count`` says how much of the total each item is."""
    # It is drawn when an item comes, and not by a thread: a loader may fork worker processes meanwhile.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(unit))
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)
        for item in items:
            bar.update(task, advance=count(item), refresh=True)
            yield item


class RateColumn(ProgressColumn):
    """How much is done in a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Return the cell of a bar."""
        return Text(f"{task.speed:,.0f} {self.unit}/s" if task.speed else "", style="progress.data.speed")
