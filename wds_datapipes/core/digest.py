"""The digest of what is written, computed beside the writing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["Digest"]

#: Data of that size are hashed in a thread, in bytes; what is smaller is hashed before a thread has begun.
PARALLEL_BYTES = 1 << 20


class Digest:
    """The SHA-256 of all data that were taken. Both hashing and writing let other threads of Python run."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def taking(self, data: bytes) -> Iterator[None]:
        """Take data, large ones while the block runs."""
        if len(data) < PARALLEL_BYTES:
            self._hash.update(data)
            yield
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1)
        hashed = self._pool.submit(self._hash.update, data)
        try:
            yield
        finally:
            hashed.result()

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal digits."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown()
