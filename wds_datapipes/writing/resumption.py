"""Resumption of a writer: skip the samples of finished shards, and exclude other writers of the same shards."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.types import ShardInfo
from wds_datapipes.writing.journal import FinishedShard, ShardJournal


class SampleJournal:
    """The journal of a `ShardWriter`, which skips the samples of finished shards when they are passed again.

    Rejected samples count too.

    Args:
        path: the path of the file.
        settings: the settings that determine the content of the shards.
        pattern: the pattern of the shards, for messages.
    """

    def __init__(self, path: str, settings: Mapping[str, Any], pattern: str) -> None:
        self._file = ShardJournal(path, settings, {"input_samples": int, "input_keys": str})
        self._pattern = pattern
        self._unskipped: deque[FinishedShard] = deque()
        self._start_shard()

    def resume(self, find: Callable[[FinishedShard], ShardInfo | None]) -> list[ShardInfo]:
        """Return the first shards, as long as they still exist; the lines of all others are dropped.

        Args:
            find: returns a shard if it is the next one and exists as recorded.
        """
        found: list[ShardInfo] = []
        for count, recorded in enumerate(self._file.finished):
            info = find(recorded)
            if info is None:
                self._file.truncate(count)
                break
            self._unskipped.append(recorded._replace(info=info))
            found.append(info)
        return found

    def skip(self, sample: object) -> bool:
        """Return whether a sample is in a finished shard; after the last sample of a shard, compare the keys.

        Raises:
            StateError: the shard had other samples.
        """
        if not self._unskipped:
            return False
        self.add(sample)
        shard = self._unskipped[0]
        if self._count == shard.facts["input_samples"]:
            if self._keys.hexdigest() != shard.facts["input_keys"]:
                raise StateError(
                    f"The conversion to {self._pattern!r} was resumed with other samples: those of {shard.info.url!r} "
                    f"had other keys or another order. Pass the same samples in the same order, or start over"
                )
            self._unskipped.popleft()
            self._start_shard()
        return True

    def skip_all(self) -> int:
        """Return the number of samples in all finished shards, and expect the samples after them."""
        count: int = sum(shard.facts["input_samples"] for shard in self._unskipped)
        self._unskipped.clear()
        return count

    def add(self, sample: object) -> None:
        """Add a sample, with or without a key, to those of the current shard."""
        key = sample.get("__key__") if isinstance(sample, Mapping) else None
        self._keys.update(repr(key).encode("utf-8", "surrogatepass") + b"\0")
        self._count += 1

    def finish(self, number: int, info: ShardInfo) -> None:
        """Record a finished shard with the samples added since the previous one."""
        self._file.add(
            FinishedShard(number, info, {"input_samples": self._count, "input_keys": self._keys.hexdigest()})
        )
        self._start_shard()

    def check_end(self) -> None:
        """Check that all samples of the finished shards were passed.

        Raises:
            StateError: there were fewer samples than before.
        """
        if self._unskipped:
            raise StateError(
                f"The conversion to {self._pattern!r} was resumed with fewer samples than before: those of "
                f"{self._unskipped[0].info.url!r} are missing. Pass the same samples, or call skip_finished()"
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _start_shard(self) -> None:
        self._count, self._keys = 0, hashlib.sha256()


@contextlib.contextmanager
def lock_shards(journal: str, pattern: str) -> Iterator[None]:
    """Within the context, exclude other writers of the same local shards.

    Args:
        journal: the path of the shards' journal, whether or not it exists; the name of the lock file derives from it.
        pattern: the pattern of the shards.

    Raises:
        StateError: another writer is active.
    """
    with contextlib.ExitStack() as opened:
        descriptor: int | None = -1
        with contextlib.suppress(OSError):  # without locks or a folder, opening the first shard fails
            descriptor = opened.enter_context(lock_file(Path(f"{journal}.lock"), wait=False))
        if descriptor is None:
            raise StateError(
                f"Another writer is writing the shards {pattern!r}, and the shards of both would be mixed. Wait until "
                f"it has finished, or choose another pattern"
            )
        yield
