"""The digest of what is written, computed beside the writing."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["HashingWriter"]

#: How much is handed to the thread at once, in bytes: what is less is hashed by the caller, before a thread has begun.
BATCH_BYTES = 1 << 20


class HashingWriter:
    """The SHA-256 of all data that were taken. Both hashing and writing let other threads of Python run.

    A thread hashes what was collected while the next is collected and written. So it holds as much as was collected
    last, or one value if that is larger.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._hashed: Future[None] | None = None
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def take(self, data: bytes) -> None:
        """Take data, which are hashed some time before `hexdigest`."""
        self._batch.append(data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= BATCH_BYTES:
            self._wait()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1)
            self._hashed = self._pool.submit(self._update, self._batch)
            self._batch, self._batch_bytes = [], 0

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal digits."""
        self._wait()
        self._update(self._batch)
        self._batch, self._batch_bytes = [], 0
        return self._hash.hexdigest()

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown()

    def _wait(self) -> None:
        if self._hashed is not None:
            self._hashed.result()
            self._hashed = None

    def _update(self, batch: list[bytes]) -> None:
        for data in batch:
            self._hash.update(data)
