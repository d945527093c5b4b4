"""The length that ``.with_length()`` declares, compared with the number of items that come."""

from __future__ import annotations

from wds_datapipes.user_warnings import warn_user

__all__ = ["DeclaredLength"]


class DeclaredLength:
    """Counts the items of an epoch in a loader.

    On several ranks, the first difference is an error: the trainers of ranks with different numbers of items would wait
    for each other. On one rank, it is a warning at the end of the epoch.

    Args:
        length: the number of items that the loader declares for this rank.
        ranks: the number of ranks that share the data.
        rank: the number of this rank.
    """

    def __init__(self, length: int, ranks: int = 1, rank: int = 0) -> None:
        self._length = length
        self._ranks, self._rank = ranks, rank
        self._count = 0

    def count(self) -> None:
        """Count an item before it is delivered.

        Raises:
            RuntimeError: there are several ranks, and it is one more than declared.
        """
        self._count += 1
        if self._count > self._length and self._ranks > 1:
            raise RuntimeError(self._describe(f"more than {self._length}"))

    def end(self) -> None:
        """Compare the number of items at the end of an epoch; warn if it differs.

        Raises:
            RuntimeError: it differs, and there are several ranks.
        """
        if self._count == self._length:
            return
        text = self._describe(str(self._count))
        if self._ranks > 1:
            raise RuntimeError(text)
        warn_user(text)

    def _describe(self, found: str) -> str:
        where, other = "the loader", ""
        if self._ranks > 1:
            where = f"the loader of rank {self._rank} of {self._ranks}"
            other = ", and the ranks would wait for each other, since they have different numbers"
        return (
            f".with_length() declares an epoch of {self._length} items of {where}, but {found} came{other}. Use "
            ".with_epoch(n), which yields n items on each rank; or IndexedSamples, whose length is exact"
        )
