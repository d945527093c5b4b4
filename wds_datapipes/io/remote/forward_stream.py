"""A forward stream over anything that has a ``read`` method."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from wds_datapipes.errors import ShardError, ShardReadError
from wds_datapipes.io.redaction import raise_alone, redact

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ForwardStream", "Readable"]


class Readable(Protocol):
    """All that is asked of an open remote file."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""

    def close(self) -> object:
        """Give the file back."""


class ForwardStream(io.RawIOBase):
    """Reads a remote file forward, and names the shard when that fails.

    The errors of network libraries hold the URL with all its secrets, and show as the cause of an error that is raised
    from them. So they are told in words, which ``hide`` clears of secrets, and are not chained.
    """

    def __init__(self, file: Readable, url: str, *, hide: Callable[[str], str] = redact) -> None:
        self._file = file
        self._url = url
        self._hide = hide
        self._received = 0

    def readable(self) -> bool:
        """It always is."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer, or a part of it; none of it at the end."""
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
