"""Lines on the console, and counts with their nouns."""

from __future__ import annotations

from rich.console import Console

__all__ = ["new_console", "plural"]


def new_console() -> Console:
    """Return a console that prints lines without wrapping or markup."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "shard"), plural(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
