"""Errors of the host, which are those of no shard and no sample, and would come with all of them."""

from __future__ import annotations

import errno

from wds_datapipes.errors import CorruptShardError, ReadLimitError

__all__ = ["is_systemic"]

#: The disk is full, or one's share of it; there are too many open files, here or at the host; there is no memory.
OF_THE_HOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: So many errors around another one are looked into.
DEPTH = 8


def is_systemic(error: BaseException | None) -> bool:
    """Whether an error, or the one that it was raised from, is one of the host.

    >>> is_systemic(OSError(errno.EMFILE, "Too many open files")), is_systemic(FileNotFoundError())
    (True, False)
    """
    for _ in range(DEPTH):
        # A damaged header asks for more memory than there is, and the next shard does not.
        if error is None or isinstance(error, CorruptShardError | ReadLimitError):
            return False
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in OF_THE_HOST):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
