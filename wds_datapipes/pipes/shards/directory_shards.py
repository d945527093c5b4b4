"""A source of shards that other programs write to a directory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wds_datapipes.arguments import check_choice
from wds_datapipes.errors import SpecError
from wds_datapipes.io.compression.formats import SHARD_SUFFIXES
from wds_datapipes.io.urls import explain_path
from wds_datapipes.pipes.roles import Source
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.shards.directory_queue import After, Select, take_files
from wds_datapipes.shards.patterns import expand_braces

#: The pattern of archive names, plain or compressed.
ARCHIVES = f"*{{{','.join(SHARD_SUFFIXES)}}}"


class DirectoryShards(Source, FunctionStage[str]):
    """Yield shards from a directory as soon as other programs have written them.

    Before a shard is yielded, it is claimed by moving it to the subdirectory ``.claims``. All workers, ranks and
    programs that read the directory thereby share its shards, and no two of them read the same one; torch rejects an
    additional ``.sharding_filter()``. The assignment of shards depends on timing.

    A shard counts as read when the next one is requested: put ``.load_wds_shards()`` directly after this stage. If
    iteration is abandoned, the current shard is returned to the directory. If the process dies, another reader returns
    it, because the system has released its lock (``flock``). A shard that counts as read is never returned, no matter
    when the process dies. Several hosts may share a directory on a file system with locks between hosts, such as NFS 4
    and CephFS.

    The writing program must write each shard under another name, such as a hidden one, or in another directory of the
    same file system, and rename it once it is complete. Symbolic links and hidden files are ignored.

    Yields:
        str: the path of each claimed shard, which ends in the shard's original name.

    Args:
        path: the directory.
        pattern: the pattern of shard names, with ``*``, ``?``, ``[...]`` and braces. By default, it matches all names
            with the extensions of shards, including compressed ones.
        select: the shard to take next: the ``"oldest"``, or a ``"random"`` one.
        after: what to do with a shard after reading: ``"keep"`` moves it to the subdirectory ``done``, ``"delete"``
            removes it, and ``"return"`` puts it back, to be read again after the others. If the name already exists, it
            is prefixed with a number.
        poll_s: the interval between two scans of a directory without shards, in seconds.
        timeout_s: how long to wait for a shard before iteration ends, in seconds; 0 ends it as soon as the directory
            has no more shards. By default, the stage waits forever.

    Raises:
        SpecError: there is no such directory, or the pattern is invalid.
        ShardOpenError: the directory cannot be written.

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

    is_stateless = False
    shard_access = "claimed"
    function = staticmethod(take_files)

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = ARCHIVES,
        *,
        select: Select = "oldest",
        after: After = "keep",
        poll_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> None:
        if not Path(path).is_dir():
            raise SpecError(
                f"DirectoryShards needs a directory, but there is none at {os.fspath(path)!r}."
                f"{explain_path(os.fspath(path))}"
            )
        if not pattern or "/" in pattern:
            raise SpecError(f'pattern must be a pattern of file names, such as "train-*.tar", not {pattern!r}')
        check_choice("select", select, Select)
        check_choice("after", after, After)
        if not 0 < poll_s < math.inf:
            raise ValueError(f"poll_s must be a positive number of seconds, not {poll_s!r}")
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s must be a non-negative number of seconds or None, not {timeout_s!r}")
        patterns = expand_braces(pattern)
        self.path = os.fspath(path)
        super().__init__(self.path, patterns=patterns, select=select, after=after, poll_s=poll_s, timeout_s=timeout_s)

    def replay_obstacle(self, stages: Sequence[Any]) -> str:  # noqa: ARG002
        """Return why an epoch cannot be replayed."""
        return "reads shards that may be gone by then"

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        """Do nothing, because claims split the shards; loaders call this, and reject a second stage that defines it."""
