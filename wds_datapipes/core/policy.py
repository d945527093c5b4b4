"""What a stage does with an error: raise it, or pass over the item and say so."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

from wds_datapipes.core.ledger import LEDGER
from wds_datapipes.errors import MissingDependency, UnknownScheme, UnsafeCodec

__all__ = ["ErrorPolicy", "OnError", "check_on_error", "note"]

OnError: TypeAlias = Literal["raise", "warn", "skip"] | Callable[[Exception], bool]
"""``"raise"``; ``"warn"``: pass over the item and warn; ``"skip"``: pass over it; or a handler as webdataset's, which
gets the exception and returns True (go on with the next item), False (end the stage quietly) or raises."""

#: Errors in how the pipeline was set up: they would come with every item, so no policy passes over them.
ALWAYS_RAISED = (MissingDependency, UnknownScheme, UnsafeCodec)


def check_on_error(on_error: object) -> None:
    """Refuse a value that is no error policy when a stage is built, not when the first error comes."""
    if on_error not in ("raise", "warn", "skip") and not callable(on_error):
        raise ValueError(
            f'on_error is "raise", "warn", "skip" or a function that takes the exception, not {on_error!r}'
        )


class ErrorPolicy:
    """The errors of one pass over a stage's items.

    ``"warn"`` warns of the first error of each kind as it comes, and once more at the end with the counts: a shard
    with ten thousand bad samples costs two warnings.
    """

    def __init__(self, on_error: OnError, stage: str) -> None:
        self._on_error = on_error
        self._stage = stage
        #: How many items were passed over, by the kind of error.
        self.skipped: Counter[str] = Counter()

    def goes_on(self, error: Exception) -> bool:
        """Raise ``error``, or count it and say whether the stage goes on with its next item."""
        if self._on_error == "raise" or isinstance(error, ALWAYS_RAISED):
            raise error
        if callable(self._on_error):
            if not self._on_error(error):
                return False
            LEDGER.passed_over(self._stage, error)
            return True
        LEDGER.passed_over(self._stage, error)
        kind = type(error).__name__
        if self._on_error == "warn" and kind not in self.skipped:
            warnings.warn(f"{self._stage} passed over an item: {kind}: {error}", stacklevel=2)
        self.skipped[kind] += 1
        return True

    def finish(self) -> None:
        """Warn of what was passed over, if there was more than the warnings so far have told."""
        total = self.skipped.total()
        if self._on_error == "warn" and total > len(self.skipped):
            counts = ", ".join(f"{count} x {kind}" for kind, count in self.skipped.most_common())
            warnings.warn(f"{self._stage} passed over {total} items: {counts}", stacklevel=2)


def note(error: Exception, text: str) -> None:
    """Say where an error of the user's own code happened, below its traceback (Python 3.11 and newer)."""
    if hasattr(error, "add_note"):
        error.add_note(text)
