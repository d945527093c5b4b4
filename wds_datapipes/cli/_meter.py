"""Lines on the console, and counts with their nouns."""

from __future__ import annotations

from rich.console import Console

from wds_datapipes.parallel.progress import human_bytes

__all__ = ["new_console", "plural", "size_of_shards"]


def new_console() -> Console:
    """Return a console that prints lines without wrapping or markup."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "shard"), plural(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_of_shards(total: int, shards: int, unread: int) -> str:
    """Format the total size of shards, without those that could not be read to the end.

    >>> size_of_shards(30_720, 3, 0), size_of_shards(30_720, 3, 1), size_of_shards(0, 2, 2)
    ('30.7 kB', 'more than 30.7 kB', 'unknown size')
    """
    if unread and unread == shards:
        return "unknown size"
    return f"{'more than ' if unread else ''}{human_bytes(total)}"
