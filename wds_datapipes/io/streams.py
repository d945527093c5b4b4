"""Raw streams: the base of all readable streams of this package, a stream over any object, and their errors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wds_datapipes.errors import ShardError, ShardReadError, WdsError
from wds_datapipes.redaction import redact_text
from wds_datapipes.redaction.storage_options import raise_alone

if TYPE_CHECKING:
    from typing_extensions import Buffer


@contextmanager
def name_read_errors(name: str) -> Iterator[None]:
    """Raise an error of the operating system or of a library as one that names the shard.

    Raises:
        ShardReadError: the shard cannot be read.
    """
    try:
        yield
    except WdsError:
        raise
    except OSError as error:
        raise ShardReadError(f"{name} could not be read to its end: {type(error).__name__}: {error}") from error


def move_bytes(source: memoryview, buffer: Buffer) -> tuple[int, memoryview]:
    """Copy as many bytes as fit into a buffer; return their number and the remaining bytes."""
    view = memoryview(buffer).cast("B")
    count = min(len(view), len(source))
    view[:count] = source[:count]
    return count, source[count:]


class RawStream(io.RawIOBase):
    """A readable stream that is closed only once; subclasses define ``readinto`` and ``_release``."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the stream and its source."""
        if not self.closed:
            try:
                self._release()
            finally:
                super().close()

    def _release(self) -> None:
        """Close the source."""


class ForwardStream(RawStream):
    """Reads a remote file forward; its errors name the shard.

    Errors of network libraries may contain the URL with its credentials, so they are redacted and not chained.

    Args:
        file: an object with the methods ``read`` and ``close``.
        url: the shard.
    """

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url
        self._received = 0

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; return 0 at the end."""
        view = memoryview(buffer).cast("B")
        try:
            data = self._file.read(len(view))
        except ShardError:
            raise
        except Exception as error:  # noqa: BLE001  every network library has its own errors
            failed = ShardReadError(
                f"Reading {redact_text(self._url)} failed after {self._received} bytes: "
                f"{type(error).__name__}: {redact_text(str(error))}"
            )
            raise_alone(failed)
        view[: len(data)] = data
        self._received += len(data)
        return len(data)

    def _release(self) -> None:
        self._file.close()
