"""A source of shards that another program writes meanwhile."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from wds_datapipes.errors import PatternError
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.shards.directory_queue import After, Select, take_files
from wds_datapipes.shards.listing import SHARD_SUFFIXES
from wds_datapipes.shards.patterns import expand_braces

__all__ = ["DirectoryShards"]


class DirectoryShards(Stage[str]):
    """Take shards from a directory, as another program puts them there.

    A shard is claimed before it is yielded: it is moved to a directory of the iteration's own, below ``.claims``. So
    all workers, ranks and programs that read one directory share its shards, and none is read by two; there is no
    ``.sharding_filter()`` then, and torch refuses one. Which of them reads a shard depends on time.

    It counts as read when the next one is asked for: put ``.load_wds_shards()`` directly behind. If an iteration is
    broken off, its shard goes back. If its process dies, another one that looks for shards puts it back, which it
    tells by a lock (``flock``) that the system releases at the end of a process. Several hosts may share a directory
    if their file system has these locks between hosts, as NFS 4 and CephFS do.

    A program that writes shards has to write them under another name, such as one that begins with a dot, or in
    another directory of the same file system, and rename them when they are complete. Links and hidden files are not
    taken.

    Yields:
        str: the path of each shard, where it is while it is claimed. It ends in the shard's own name.

    Args:
        path: the directory.
        pattern: what the names of shards look like: ``*``, ``?``, ``[...]`` and braces. By default, all that end as
            shards do, compressed ones too.
        select: take the ``"oldest"`` shard next, or a ``"random"`` one.
        after: what becomes of a shard that was read: ``"keep"`` it, in the subdirectory ``done``; ``"delete"`` it; or
            ``"return"`` it to be taken again, behind those that are there. None is written over by one of the same
            name: it gets a number in front.
        poll_s: how many seconds pass between two looks at a directory without shards.
        timeout_s: end after so many seconds without a shard; 0 ends when all that are there have been taken. By
            default it waits without end.

    Raises:
        PatternError: there is no such directory, or the pattern cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> os.mkdir("inbox")
        >>> shard = build_shard("inbox/a.tar", [{"__key__": "a", "cls": b"1"}, {"__key__": "b", "cls": b"2"}])
        >>> samples = DirectoryShards("inbox", timeout_s=0).load_wds_shards().group_samples()
        >>> [sample["cls"] for sample in samples]
        [b'1', b'2']
        >>> os.listdir("inbox/done")
        ['a.tar']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = f"*{{{','.join(SHARD_SUFFIXES)}}}",
        *,
        select: Select = "oldest",
        after: After = "keep",
        poll_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        if not Path(path).is_dir():
            raise PatternError(f"DirectoryShards needs a directory, and there is none at {os.fspath(path)!r}")
        if not pattern or "/" in pattern:
            raise PatternError(f'pattern tells the names of files, as "train-*.tar" does, not {pattern!r}')
        if select not in ("oldest", "random"):
            raise ValueError(f'select is "oldest" or "random", not {select!r}')
        if after not in ("keep", "delete", "return"):
            raise ValueError(f'after is "keep", "delete" or "return", not {after!r}')
        if not 0 < poll_s < math.inf:
            raise ValueError(f"poll_s is a number of seconds above 0, not {poll_s!r}")
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s is a number of seconds from 0, or None, not {timeout_s!r}")
        self.path = os.fspath(path)
        self.pattern = pattern
        self.select = select
        self.after = after
        self.poll_s = poll_s
        self.timeout_s = timeout_s
        expand_braces(pattern)

    def __iter__(self) -> Iterator[str]:
        yield from take_files(
            self.path,
            expand_braces(self.pattern),
            select=self.select,
            after=self.after,
            poll_s=self.poll_s,
            timeout_s=self.timeout_s,
        )

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        """Change nothing, as claims split the shards; loaders call this, and refuse a second stage that has it."""
