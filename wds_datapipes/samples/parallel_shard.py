"""Reader of a parallel shard, in step with the shard that it is joined to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError, MissingFieldError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import note
from wds_datapipes.types import Sample

__all__ = ["ParallelShard", "Read", "URLRule"]

URLRule: TypeAlias = Callable[[str], str]

Read: TypeAlias = Callable[[str, Callable[[Exception], bool]], Iterator[Sample]]
"""Reads a shard; the function handles the errors of its samples."""


class ParallelShard:
    """Reads parallel shards, one at a time.

    Attributes:
        url: the URL of the current shard.
        gap: the error for the samples that were dropped to find the latest one, if any.
    """

    def __init__(self, rule: URLRule, read: Read, look_ahead: int) -> None:
        self.url = ""
        self.gap: MisalignedShardsError | None = None
        self._rule = rule
        self._read = read
        self._look_ahead = look_ahead
        self._main_url = ""
        self._samples: Iterator[Sample] | None = None
        self._ahead: deque[Sample] = deque()
        self._error: Exception | None = None
        self._is_reported = False  # whether the failure was reported
        self._skipped: Exception | None = None

    def begin(self, main_url: str) -> None:
        """Open the shard that is parallel to another one."""
        self.close()
        self._main_url = self.url = main_url
        self._is_reported = False
        try:
            url: object = self._rule(main_url)
        except Exception as error:  # noqa: BLE001 - the policy handles all errors of a user's function
            note(error, f"raised in add_columns for the shard {redact(main_url)}")
            self._error = error
            return
        if not isinstance(url, str):
            raise TypeError(
                f"add_columns needs the URL of the shard parallel to {redact(main_url)}, but url_of returned {url!r}"
            )
        self.url = url
        self._samples = self._read(url, self._skip)

    def expects(self, key: str) -> bool:
        """Whether the next sample has this key."""
        return self._reach(1) and self._key(0) == key

    def add(self, sample: Sample, names: list[str] | None, added: Sample) -> Exception | None:
        """Put the fields for a sample into ``added``, or return the error."""
        found = self._find(sample["__key__"])
        if isinstance(found, Exception):
            try:
                return found
            finally:
                del found  # avoid a reference cycle: its frames refer to this one
        where = f"for the sample {sample['__key__']!r} of {redact(self._main_url)}"
        for name in names if names is not None else found:
            if names is None and name[:2] == "__":
                continue
            if name not in found:
                fields = [field for field in found if field[:2] != "__"]
                return MissingFieldError(f"add_columns needs {name!r} {where}, but {redact(self.url)} has {fields}")
            if name in sample or name in added:
                return DuplicateKeyError(
                    f"add_columns got {name!r} from {redact(self.url)} {where}, which already has this field. Select "
                    f"other fields with fields=, or rename the existing one first"
                )
            added[name] = found[name]
        return None

    def end(self) -> Exception | None:
        """Return the error at the end of the samples, unless it was reported before."""
        if self._reach(1):
            return self._misaligned(f"has the sample {self._key(0)!r}, but {redact(self._main_url)} has ended")
        return None if self._is_reported else self._error

    def close(self) -> None:
        """Close the shard."""
        close = getattr(self._samples, "close", None)
        self._samples = self._error = self._skipped = self.gap = None
        self._ahead.clear()
        if close is not None:
            close()

    def _find(self, key: str) -> Sample | Exception:
        self.gap = None
        if self.expects(key):
            return self._next()
        for index in range(1, self._look_ahead):
            if not self._reach(index + 1):
                break
            if self._key(index) == key:
                dropped = [self._next()["__key__"] for _ in range(index)]
                self.gap = self._misaligned(f"has the samples {dropped}, which {redact(self._main_url)} lacks")
                return self._next()
        if self._error is not None and not self._ahead:
            self._is_reported = True
            return self._error
        found = f"the sample {self._key(0)!r}" if self._ahead else "ended"
        return self._misaligned(f"has {found}, but {redact(self._main_url)} has the sample {key!r}")

    def _reach(self, count: int) -> bool:
        """Read until ``count`` samples are buffered; return False if the shard has fewer."""
        while len(self._ahead) < count and self._samples is not None:
            try:
                self._ahead.append(next(self._samples))
            except StopIteration:  # noqa: PERF203 - the loop ends at the first error
                self._samples = None
            except Exception as error:  # noqa: BLE001 - reported for each sample that it affects
                self._error, self._samples = error, None
        return len(self._ahead) >= count

    def _key(self, index: int) -> str:
        """Return the key of a buffered sample."""
        key: str = self._ahead[index]["__key__"]
        return key

    def _next(self) -> Sample:
        """Take the next buffered sample."""
        return self._ahead.popleft()

    def _skip(self, error: Exception) -> bool:
        """Skip a sample of this shard; the error is reported for the sample that it belongs to."""
        self._skipped = error
        return True

    def _misaligned(self, what: str) -> MisalignedShardsError:
        skipped = f". The last item skipped in it: {self._skipped}" if self._skipped is not None else ""
        return MisalignedShardsError(
            f"{redact(self.url)} {what}{skipped}. Parallel shards must have the same keys in the same order, and "
            f"add_columns must come directly after group_samples, before stages that skip, shuffle or mix samples"
        )
