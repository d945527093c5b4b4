"""Error policy of a stage: raises an error, or skips the item and reports it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from wds_datapipes.counters import COUNTERS, SkippedItem
from wds_datapipes.errors import (
    ErrorBudgetError,
    MissingDependencyError,
    RefusedURLError,
    UnknownSchemeError,
    UnsafeCodecError,
)
from wds_datapipes.io.openers import redact
from wds_datapipes.io.remote.retry import is_systemic
from wds_datapipes.on_error.quarantine import write_quarantine
from wds_datapipes.user_warnings import warn_user

__all__ = ["ErrorBudget", "ErrorCounts", "ErrorPolicy", "OnError", "check_on_error", "note", "refuse_handler"]

T = TypeVar("T")

#: Errors in how the pipeline was set up: they would come with every item, so no policy skips them.
ALWAYS_RAISED = (ErrorBudgetError, MissingDependencyError, RefusedURLError, UnknownSchemeError, UnsafeCodecError)

#: The handlers of webdataset whose names say all. Its own ones that warn sleep for half a second with each error.
HANDLERS = {"reraise_exception": "raise", "warn_and_continue": "warn", "ignore_and_continue": "skip"}


@dataclass(frozen=True)
class ErrorBudget:
    """An error policy that skips some items, and raises when there are too many.

    Each stage counts for itself, and starts at zero in each process and each epoch. It counts samples; in
    ``load_wds_shards``, shards. Several limits may be given; the first one exceeded raises.

    Args:
        max_errors: how many may be skipped.
        max_rate: what share of the items tried may be skipped, from 0 to 1. The first ``after`` are
            only counted.
        max_consecutive: how many may be skipped in a row.
        after: how many have to be tried before ``max_rate`` applies.
        warn: warn of the first error of each kind, and at the end of their numbers, as ``"warn"`` does.
        quarantine: a file to which all processes append a line for each skipped item; see
            `read_quarantine`. It may be given without any limit.

    Raises:
        ValueError: a limit makes no sense, or there is none.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": str(n), "cls": b"x" if n % 5 == 2 else b"1"} for n in range(10)])
        >>> budget = ErrorBudget(max_errors=2, warn=False)
        >>> len(list(samples.wds_decode(on_error=budget)))
        8
    """

    max_errors: int | None = None
    max_rate: float | None = None
    max_consecutive: int | None = None
    after: int = 100
    warn: bool = True
    quarantine: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        limits = (self.max_errors, self.max_rate, self.max_consecutive, self.quarantine)
        if all(limit is None for limit in limits):
            raise ValueError("an ErrorBudget needs max_errors, max_rate, max_consecutive or quarantine")
        for name in ("max_errors", "max_consecutive", "after"):
            count = getattr(self, name)
            if count is not None and not (isinstance(count, int) and count >= 0):
                raise ValueError(f"{name} is a number from 0, not {count!r}")
        if self.max_rate is not None and not 0 <= self.max_rate <= 1:
            raise ValueError(f"max_rate is a share from 0 to 1, such as 0.01, not {self.max_rate!r}")


OnError: TypeAlias = Literal["raise", "warn", "skip"] | ErrorBudget | Callable[[Exception], bool]
"""``"raise"``; ``"warn"``: skip the item and warn; ``"skip"``: skip it; an `ErrorBudget`: skip up to a number;
or a handler as webdataset's, which gets the exception and returns True (continue with the next item), False (end the
stage quietly) or raises."""


class ErrorCounts:
    """An ``on_error`` that counts the items skipped by all stages that share it.

    Args:
        on_error: what the user has asked for.

    Attributes:
        on_error: the same.
        count: how many items were skipped.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self.count = 0


def check_on_error(on_error: object) -> None:
    """Raise if a value is no error policy, when a stage is built."""
    if (
        on_error not in ("raise", "warn", "skip")
        and not callable(on_error)
        and not isinstance(on_error, ErrorBudget | ErrorCounts)
    ):
        raise ValueError(
            f'on_error is "raise", "warn", "skip", an ErrorBudget or a function that takes the exception, not '
            f"{on_error!r}"
        )


def refuse_handler(keywords: Mapping[str, object], meaning: str) -> None:
    """Raise for webdataset's ``handler=`` in a stage whose keywords have another meaning."""
    if callable(keywords.get("handler")):
        raise TypeError(f"webdataset's handler= is called on_error= here; {meaning}")


class ErrorPolicy:
    """Applies an ``on_error`` to one pass over the items of a stage.

    ``"warn"`` warns of the first error of each kind as it comes, and once more at the end with the counts: a shard
    with ten thousand bad samples costs two warnings.

    Args:
        on_error: what the user has asked for.
        stage: what messages call the stage.

    Attributes:
        tried: how many items were tried, the present one included, where a budget needs to know.
        skipped: how many items were skipped, by the kind of error.
        has_ended: whether a handler has ended the stage.
    """

    def __init__(self, on_error: OnError | ErrorCounts, stage: str) -> None:
        self._tally = on_error if isinstance(on_error, ErrorCounts) else ErrorCounts(on_error)
        on_error = self._tally.on_error
        self._budget = on_error if isinstance(on_error, ErrorBudget) else None
        self._on_error = ("warn" if self._budget.warn else "skip") if self._budget is not None else _plain(on_error)
        self._stage = stage
        self._latest = self._run = 0
        self.tried = 0
        self.has_ended = False
        self.skipped: Counter[str] = Counter()

    def counted(self, source: Iterable[T]) -> Iterable[T]:
        """Return ``source``, counted if a budget needs it."""
        return source if self._budget is None else self._counting(source)

    def _counting(self, source: Iterable[T]) -> Iterator[T]:
        for item in source:
            self.tried += 1
            yield item

    def goes_on(
        self,
        error: Exception,
        sample: Mapping[str, Any] | None = None,
        *,
        url: str = "",
        key: str = "",
        field: str = "",
    ) -> bool:
        """Raise ``error``, or record it and return whether the stage continues with its next item.

        Args:
            error: what went wrong.
            sample: the sample that it went wrong with, which tells its shard and its key.
            url: or the shard,
            key: and the key.
            field: the field, if it was one.

        Raises:
            ErrorBudgetError: there were too many.
        """
        if self._on_error == "raise" or concerns_all(error):
            try:
                raise error
            finally:
                del error  # this frame would hold the error, and the error its frames with all that they have open
        goes_on = not callable(self._on_error) or bool(self._on_error(error))
        self.has_ended |= not goes_on
        if isinstance(sample, Mapping):
            url, key = str(sample.get("__url__", url)), str(sample.get("__key__", key))
        kind = type(error).__name__
        told = redact(str(error))  # a user's function may put anything in it
        item = SkippedItem(self._stage, kind, redact(url), key, field, told)
        COUNTERS.passed_over(item)
        if self._budget is not None and self._budget.quarantine is not None:
            write_quarantine(os.fspath(self._budget.quarantine), item)
        if self._on_error == "warn" and kind not in self.skipped:
            warn_user(f"{self._stage} skipped an item: {kind}: {told}")
        self.skipped[kind] += 1
        self._tally.count += 1
        if self._budget is not None:
            self._spend(self._budget, error)
        return goes_on

    def finish(self) -> None:
        """Warn of the skipped items, if there were more than already reported."""
        total = self.skipped.total()
        if self._on_error == "warn" and total > len(self.skipped):
            warn_user(f"{self._stage} skipped {total} items: {self._counts()}")

    def _spend(self, budget: ErrorBudget, error: Exception) -> None:
        """Raise if the budget is exceeded."""
        self._run = self._run + 1 if self.tried <= self._latest + 1 else 1
        self._latest = self.tried
        total = self.skipped.total()
        if budget.max_errors is not None and total > budget.max_errors:
            limit = f"max_errors={budget.max_errors}"
        elif budget.max_consecutive is not None and self._run > budget.max_consecutive:
            limit = f"max_consecutive={budget.max_consecutive}"
        elif budget.max_rate is not None and self.tried > budget.after and total > budget.max_rate * self.tried:
            limit = f"max_rate={budget.max_rate:g}"
        else:
            return
        raise ErrorBudgetError(
            f"{self._stage} skipped {total} of {self.tried} items ({self._counts()}), {self._run} of them in "
            f"a row, which is more than {limit} allows. The last: {type(error).__name__}: {redact(str(error))}"
        ) from error

    def _counts(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.skipped.most_common())


def concerns_all(error: Exception) -> bool:
    """Whether an error would affect every item: one of the pipeline, the credentials or the host."""
    return isinstance(error, ALWAYS_RAISED) or getattr(error, "concerns_all", False) or is_systemic(error)


def note(error: Exception, text: str) -> None:
    """Add a note to an error of user code that says where it happened (Python 3.11 and newer)."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def _plain(on_error: Any) -> Any:
    """Return the word for a handler of webdataset that has one, or what does as it does without the sleep."""
    if getattr(on_error, "__module__", None) != "webdataset.handlers":
        return on_error
    if on_error.__name__ == "warn_and_stop":
        return _warn_and_stop
    return HANDLERS.get(on_error.__name__, on_error)


def _warn_and_stop(error: Exception) -> bool:
    warn_user(f"a stage has ended early: {type(error).__name__}: {error}")
    return False
