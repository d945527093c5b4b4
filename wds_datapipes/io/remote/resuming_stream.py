"""Resuming stream: reads a remote shard forward, and reconnects at the next byte when the connection breaks."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wds_datapipes.errors import ChangedShardError, ShardError, ShardReadError
from wds_datapipes.io.redaction import raise_alone, redact
from wds_datapipes.io.remote.retry import RetryPolicy, concerns_all, is_transient, was_replaced

if TYPE_CHECKING:
    from typing_extensions import Buffer


__all__ = ["ForwardStream", "OpenedSource", "Readable", "ResumingStream", "StreamSource", "version_of"]


class OpenedSource(NamedTuple):
    """A remote file that was opened at an offset."""

    file: Readable
    #: Where it begins, in bytes; less than what was asked for if the store sends all again.
    start: int
    #: The size of the whole file, if the store tells it.
    size: int | None
    #: What tells this version of the file from any other; empty if the store tells nothing.
    version: tuple[str, ...]


class StreamSource(Protocol):
    """A source that opens a remote file as often as needed."""

    def open_at(self, start: int) -> OpenedSource:
        """Open the file at an offset, or at its beginning.

        Raises:
            Exception: whatever the store's library raises.
        """


class ResumingStream(io.RawIOBase):
    """Reads a remote file forward. Retries after transient errors, from the next byte; raises all others.

    Args:
        origin: opens the file.
        name: what messages call it, without secrets.
        describe: returns the message of a library's error, without secrets.
        retry: how often, and for how long, it is tried again.

    Raises:
        Exception: the file cannot be opened, as its library puts it.
    """

    def __init__(
        self, origin: StreamSource, name: str, describe: Callable[[Exception], str], retry: RetryPolicy
    ) -> None:
        self._origin, self._name, self._describe, self._retry = origin, name, describe, retry
        self._at = 0
        opened = retry.call(lambda: origin.open_at(0), f"{name} cannot be opened")
        self._file: Readable | None = opened.file
        self._size, self._version = opened.size, opened.version

    @property
    def size(self) -> int | None:
        """The size of the file in bytes, if the store reports it."""
        return self._size

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        data = self.read_once(len(view))
        view[: len(data)] = data
        return len(data)

    def read_once(self, size: int) -> bytes:
        """Return the bytes of one read, at most ``size``, and none at the end."""
        since = self._retry.clock()
        while True:
            try:
                data = self._opened().read(size)
                if not data and self._size is not None and self._at < self._size:
                    raise EOFError(f"{self._at} of {self._size} bytes came")
                if self._size is not None and self._at + len(data) > self._size:
                    raise ShardReadError(
                        f"Reading {self._name} failed after {self._at} bytes: the store sends more than the "
                        f"{self._size} bytes that it has reported as its size"
                    )
                break
            except ShardError:
                raise
            except Exception as error:  # noqa: BLE001  every network library has errors of its own
                self._release()
                self._wait_or_raise(error, since)
        self._at += len(data)
        return data

    def abandon(self) -> None:
        """Break off what another thread reads; it may still wait for an answer for as long as its library lets it."""
        if (file := self._file) is not None:
            with suppress(Exception):
                file.close()

    def close(self) -> None:
        """Close the remote file."""
        if not self.closed:
            try:
                self._release()
            finally:
                super().close()

    def _opened(self) -> Readable:
        """Return the file, opened at the next byte."""
        if self._file is None:
            opened = self._origin.open_at(self._at)
            self._file = opened.file
            if not self._at:  # nothing was read, and so this is as good as the first
                self._size, self._version = opened.size, opened.version
            elif opened.version != self._version or self._is_another_size(opened.size):
                raise self._changed()
            elif self._size is None:
                self._size = opened.size
            if opened.start > self._at:
                raise ShardReadError(
                    f"Reading {self._name} failed after {self._at} bytes: the store was asked for what is next, "
                    f"and has sent what begins at byte {opened.start}"
                )
            _pass_over(opened.file, self._at - opened.start)
        return self._file

    def _wait_or_raise(self, error: Exception, since: float) -> None:
        """Wait before the file is opened again, or raise."""
        if was_replaced(error):
            raise_alone(self._changed())
        what = f"Reading {self._name} was interrupted after {self._at} bytes"
        if (self._version or not self._at) and self._retry.wait(error, what, since):
            return
        advice = ""
        if self._at and not self._version and is_transient(error):
            advice = (
                ". Its store reports neither ETag nor date, which would show that the file is still the same, "
                "so reading cannot resume there"
            )
        failed = ShardReadError(
            f"Reading {self._name} failed after {self._at} bytes: {self._describe(error)}"
            f"{self._retry.attempts_text()}{advice}"
        )
        failed.concerns_all = concerns_all(error)
        raise_alone(failed)

    def _is_another_size(self, size: int | None) -> bool:
        return None not in (size, self._size) and size != self._size

    def _changed(self) -> ChangedShardError:
        return ChangedShardError(
            f"{self._name} was replaced while it was read: after {self._at} bytes it has another ETag, date or size. "
            f"What was read so far belongs to the one before. Read it again, with the shards as they are now"
        )

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # the connection is gone, and its library may mind
                file.close()


def _pass_over(file: Readable, count: int) -> None:
    """Skip bytes, if a store sends the file from its beginning."""
    while count > 0:
        data = file.read(min(count, 1 << 20))
        if not data:
            raise EOFError("the file ended before the byte that is next")
        count -= len(data)


def version_of(*facts: Any) -> tuple[str, ...]:
    """Return the facts that identify a version of a file."""
    return tuple(str(fact) for fact in facts if fact is not None)


class Readable(Protocol):
    """The interface of an open remote file."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""

    def close(self) -> object:
        """Close the file."""


class ForwardStream(io.RawIOBase):
    """Reads a remote file forward; its errors name the shard.

    The errors of network libraries hold the URL with all its secrets, and show as the cause of an error that is raised
    from them. So they are told in words, which ``hide`` clears of secrets, and are not chained.
    """

    def __init__(self, file: Readable, url: str, *, hide: Callable[[str], str] = redact) -> None:
        self._file = file
        self._url = url
        self._hide = hide
        self._received = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        try:
            data = self._file.read(len(view))
        except ShardError:
            raise
        except Exception as error:  # noqa: BLE001  every network library has errors of its own
            failed = ShardReadError(
                f"Reading {self._hide(self._url)} failed after {self._received} bytes: "
                f"{type(error).__name__}: {self._hide(str(error))}"
            )
            raise_alone(failed)
        view[: len(data)] = data
        self._received += len(data)
        return len(data)

    def close(self) -> None:
        """Close the remote file."""
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()
