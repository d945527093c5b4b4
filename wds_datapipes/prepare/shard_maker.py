"""The maker of planned shards, in this process or in those that are forked from it."""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from wds_datapipes.errors import EncodeError, SampleSourceError, UnwritableSampleError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.parallel.executors import ending_later
from wds_datapipes.prepare.plan import Plan, draft_of
from wds_datapipes.prepare.sample_function import SampleMaker
from wds_datapipes.prepare.sample_spec import Source, read_draft
from wds_datapipes.prepare.shard_run import WrittenShard
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["ShardMaker"]

#: What is counted of each shard: samples and bytes.
COUNTS = 2


class ShardMaker:
    """Writes any shard of a plan, in this process or one that is forked from it; counts are common to all."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        places: list[str],
        rekey: str,
        make: SampleMaker | None,
        writing: Mapping[str, Any],
        on_error: OnError,
    ) -> None:
        self._source, self._plan, self._places, self._rekey, self._make = source, plan, places, rekey, make
        self._writing, self._raises = writing, on_error == "raise"
        self._memory = mmap.mmap(-1, 8 * COUNTS * len(places))
        self._counts = memoryview(self._memory).cast("Q")
        self.on_sample: Callable[[], object] | None = None

    def __call__(self, number: int, _attempt: str) -> WrittenShard:
        """Write a shard, and return what it is, and what it lacks."""
        refused: list[Exception] = []
        with ending_later():
            shard = TarWriter(self._places[number], **self._writing)
        with shard:
            for at in self._plan.shard(number):
                try:
                    size = self._write(shard, at)
                except (SampleSourceError, UnwritableSampleError, EncodeError) as error:
                    if self._raises:
                        raise
                    refused.append(error)
                    continue
                self._counts[COUNTS * number] += 1
                self._counts[COUNTS * number + 1] += size
                if self.on_sample is not None:
                    self.on_sample()
        assert shard.info is not None  # noqa: S101  it was closed without an error
        return WrittenShard(shard.info, shard.info.samples + len(refused), len(refused), errors=tuple(refused))

    def place(self, number: int) -> str:
        """Return how messages call a shard."""
        return redact(self._places[number])

    def counts(self) -> tuple[int, int]:
        """Return how many samples and bytes were written by now, by all processes."""
        return sum(self._counts[::COUNTS]), sum(self._counts[1::COUNTS])

    def made_of(self, number: int) -> str:
        """Return what tells a shard from one of other samples, or that is written otherwise."""
        how = {
            name: value for name, value in sorted(self._writing.items()) if name not in ("storage_options", "key_rule")
        }
        if self._make is not None:
            how["function"] = self._make.fingerprint
        members = self._plan.shard(number)
        stamps = array("Q", (self._plan.stamps[at] for at in members))
        digest = hashlib.sha256(repr((how, self._rekey)).encode())
        digest.update(members.tobytes())
        digest.update(stamps.tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Give the counts back."""
        self._counts.release()
        self._memory.close()

    def _write(self, shard: TarWriter, at: int) -> int:
        draft = draft_of(self._source, at, self._rekey)
        sample = read_draft(draft)
        size = sum(len(sample[field]) for field in draft.parts)
        planned = self._plan.payloads[at]
        if planned not in (-1, size):
            raise SampleSourceError(
                f"{draft.origin} has changed since it was looked at: its fields had {planned} bytes, and now have "
                f"{size}. Wait until nothing writes to these files, and begin anew"
            )
        made = [sample] if self._make is None else self._make(sample, draft.origin)
        return sum(map(shard.append, [shard.pack(each) for each in made]))  # all of them, or none
