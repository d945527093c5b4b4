"""The error policy of a stage: raise an error, or skip the item and report it, optionally in a quarantine file."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from wds_datapipes.arguments import check_integer, check_optional_integer, checks_calls
from wds_datapipes.counters import Counters, Skipped, SkippedItem
from wds_datapipes.errors import (
    CorruptSidecarError,
    ErrorBudgetError,
    MissingDependencyError,
    MissingSidecarError,
    UnknownSchemeError,
    UnsafeInputError,
    plural,
    text_of,
)
from wds_datapipes.hints import Message
from wds_datapipes.io.remote.retry import is_systemic
from wds_datapipes.io.urls import explain_path
from wds_datapipes.redaction import redact, redact_text
from wds_datapipes.user_warnings import warn_user

T = TypeVar("T")

#: Configuration errors, which no policy skips, because they would occur for every item.
ALWAYS_RAISED = (ErrorBudgetError, MissingDependencyError, UnknownSchemeError, UnsafeInputError)

#: webdataset's handlers, the equivalent policies, and whether they continue. webdataset's own warning handlers sleep
#: for half a second per error.
HANDLERS = {
    "reraise_exception": ("raise", True),
    "warn_and_continue": ("warn", True),
    "ignore_and_continue": ("skip", True),
    "warn_and_stop": ("warn", False),
    "ignore_and_stop": ("skip", False),
}


@checks_calls
@dataclass(frozen=True)
class ErrorBudget:
    """An error policy that skips some items and raises an error when there are too many.

    Each stage counts separately, starting from zero in each process and epoch. It counts samples, or shards in
    ``load_wds_shards``. If several limits are given, exceeding any of them raises an error.

    Args:
        max_errors: the maximum number of skipped items.
        max_rate: the maximum fraction of skipped items, from 0 to 1.
        max_consecutive: the maximum number of consecutive skipped items.
        after: the number of items after which ``max_rate`` applies.
        warn: like ``"warn"``, warn about the first error of each kind, and about the counts at the end.
        quarantine: a file to which all processes append a line for each skipped item; see `read_quarantine`. No limit
            is required if it is given.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a limit is invalid, or no argument is given.

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
        check_optional_integer("max_errors", self.max_errors, 0)
        check_optional_integer("max_consecutive", self.max_consecutive, 0)
        check_integer("after", self.after, 0)
        if self.max_rate is not None and not 0 <= self.max_rate <= 1:
            raise ValueError(f"max_rate must be a fraction from 0 to 1, such as 0.01, not {self.max_rate!r}")


OnError: TypeAlias = Literal["raise", "warn", "skip"] | ErrorBudget | Callable[[Exception], bool]
"""``"raise"``; ``"warn"`` to skip the item and warn; ``"skip"`` to skip it; an `ErrorBudget` to skip a limited number;
or a handler like webdataset's, which takes the exception and returns True (continue with the next item), False (end the
stage silently; a stage that reads shards ends only the shard if its beginning was valid) or raises."""


class CountedErrors(NamedTuple):
    """An ``on_error`` with the counters of the pipeline."""

    on_error: OnError
    counters: Counters


def check_on_error(on_error: object) -> None:
    """Raise an error if a value is not an error policy."""
    if (
        not (isinstance(on_error, str) and on_error in ("raise", "warn", "skip"))
        and not callable(on_error)
        and not isinstance(on_error, ErrorBudget | CountedErrors)
    ):
        raise ValueError(
            f'on_error must be "raise", "warn", "skip", an ErrorBudget or a function of the exception, not {on_error!r}'
        )


def refuse_handler(keywords: Mapping[str, object], meaning: str) -> None:
    """Raise an error for webdataset's ``handler=`` in a stage whose keywords have another meaning."""
    if callable(keywords.get("handler")):
        raise TypeError(f"webdataset's handler= is called on_error= here; {meaning}")


class ErrorPolicy:
    """Applies an ``on_error`` to a pass over the items of a stage.

    ``"warn"`` warns about the first error of each kind, and about the counts at the end: a shard with ten thousand bad
    samples causes two warnings.

    Args:
        on_error: the user's policy; `CountedErrors` also give the counters for skipped items.
        stage: the name of the stage, for messages.

    Attributes:
        counters: the counters of skipped items.
        tried: the number of items tried, including the current one, if there is a budget.
        skipped: the number of skipped items, by kind of error.
        has_ended: whether a handler has ended the stage.
    """

    def __init__(self, on_error: OnError | CountedErrors, stage: str) -> None:
        on_error, self.counters = on_error if isinstance(on_error, CountedErrors) else (on_error, Counters())
        self._budget = on_error if isinstance(on_error, ErrorBudget) else None
        self._on_error, self._continues = _plain(on_error)
        self._stage = stage
        self._latest = self._run = 0
        self.tried = 0
        self.has_ended = False
        self.skipped: Counter[str] = Counter()

    @property
    def always_raises(self) -> bool:
        """Whether every error is raised."""
        return bool(self._on_error == "raise")

    def counted(self, source: Iterable[T]) -> Iterable[T]:
        """Return ``source``, counting its items if a budget needs it."""
        return source if self._budget is None else self._counting(source)

    def _counting(self, source: Iterable[T]) -> Iterator[T]:
        for item in source:
            self.tried += 1
            yield item

    def handle(
        self,
        error: Exception,
        sample: Mapping[str, Any] | None = None,
        *,
        url: str = "",
        key: str = "",
        field: str = "",
        ends_stage: bool = True,
    ) -> bool:
        """Raise ``error``, or record it and return whether the stage continues with its next item.

        Args:
            error: the error.
            sample: the sample that caused it, with its shard and key.
            url: the shard, if there is no sample.
            key: the key, if there is no sample.
            field: the field that caused the error, if any.
            ends_stage: whether a handler may end the stage.

        Raises:
            ErrorBudgetError: the budget is exceeded.
        """
        if self._on_error == "raise" or concerns_all(error):
            try:
                raise error
            finally:
                del error  # avoid a reference cycle between the error and this frame
        if self.counters.is_tried_again is not None and self.counters.is_tried_again():
            return True
        continues = (bool(self._on_error(error)) if callable(self._on_error) else self._continues) or not ends_stage
        self.has_ended |= not continues
        if isinstance(sample, Mapping):
            url, key = str(sample.get("__url__", url)), str(sample.get("__key__", key))
        kind = type(error).__name__
        reason = Message(text_of(error)).replaced(redact_text)  # a user's function may raise any text
        item = SkippedItem(self._stage, kind, redact(url), key, field, reason)
        self.counters.count_skipped(item)
        if self._budget is not None and self._budget.quarantine is not None:
            write_quarantine(os.fspath(self._budget.quarantine), item)
        if self._on_error == "warn" and (kind not in self.skipped or not continues):
            happened = "skipped an item" if continues else "ended early, because of an error"
            warn_user(Message(f"{self._stage} {happened}: {kind}: ", reason))
        self.skipped[kind] += 1
        if self._budget is not None:
            self._spend(self._budget, error)
        return continues

    def count_unread(self, source: object, taken: int, unit: str = "") -> None:
        """Count the items that a handler left unread when it ended the stage, if the source has a length."""
        try:
            unread = len(source) - taken  # type: ignore[arg-type]
        except TypeError:
            return
        if 0 < unread < sys.maxsize - taken:
            self.counters.add_skipped(Skipped({f"{self._stage}: {unit}not read": unread}))

    def finish(self) -> None:
        """Warn about skipped items that were not reported yet."""
        total = self.skipped.total()
        if self._on_error == "warn" and total > len(self.skipped):
            warn_user(f"{self._stage} skipped {plural(total, 'item')}: {self._counts()}")

    def _spend(self, budget: ErrorBudget, error: Exception) -> None:
        """Raise an error if the budget is exceeded."""
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
            f"a row, which is more than {limit} allows. The last: {type(error).__name__}: ",
            text_of(error),
        ) from error

    def _counts(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.skipped.most_common())


def concerns_all(error: Exception) -> bool:
    """Whether an error would affect every item, such as an error of the pipeline, the credentials or the host."""
    return isinstance(error, ALWAYS_RAISED) or getattr(error, "concerns_all", False) or is_systemic(error)


def raise_error(error: Exception) -> None:
    """Raise an error that another function may skip."""
    raise error


def note(error: Exception, text: str) -> None:
    """Add a note to an error of user code that says where it happened (in Python 3.11 and newer)."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def _plain(on_error: Any) -> tuple[Any, bool]:
    """Return the equivalent "raise", "warn", "skip" or function, and whether the stage continues after errors."""
    if isinstance(on_error, ErrorBudget):
        return "warn" if on_error.warn else "skip", True
    if getattr(on_error, "__module__", None) == "webdataset.handlers":
        return HANDLERS.get(on_error.__name__, (on_error, True))
    return on_error, True


def write_quarantine(path: str, item: SkippedItem) -> None:
    """Append an item to the file; several processes may do so at once.

    Raises:
        MissingSidecarError: the file cannot be written.
    """
    line = json.dumps(item._asdict()).encode() + b"\n"
    try:
        with Path(path).open("ab", buffering=0) as file:  # a single write, because other processes append, too
            if file.write(line) != len(line):
                raise OSError("the disk is full")
    except OSError as error:
        raise MissingSidecarError(
            f"Skipped items cannot be written to {path}: {error.strerror or error}.{explain_path(path)} The item is "
            f"{item}"
        ) from error


@checks_calls
def read_quarantine(path: str | os.PathLike[str]) -> list[SkippedItem]:
    """Read the skipped items from the quarantine file of an `ErrorBudget`, in order.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": b"one"}, {"__key__": "b", "cls": b"2"}])
        >>> budget = ErrorBudget(max_errors=10, quarantine="skipped.jsonl", warn=False)
        >>> len(list(samples.wds_decode(on_error=budget)))
        1
        >>> [(item.key, item.field, item.error) for item in read_quarantine("skipped.jsonl")]
        [('a', 'cls', 'DecodeError')]

    Args:
        path: the file.

    Raises:
        MissingSidecarError: there is no such file.
        CorruptSidecarError: the file is not a quarantine file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise CorruptSidecarError(f"{path} is not a quarantine file: {error}") from error
    except (OSError, ValueError) as error:  # a ValueError if no file can have this name
        raise MissingSidecarError(
            f"The quarantine file {path} cannot be read: {getattr(error, 'strerror', None) or error}."
            f"{explain_path(str(path))}"
        ) from error
    return [_parse_line(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def _parse_line(line: str, name: str) -> SkippedItem:
    try:
        item = SkippedItem(**json.loads(line))
        if not all(isinstance(value, str) for value in item):
            raise ValueError("its values are not all text")
        return item
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptSidecarError(f"{name} is not a quarantine file: {error}") from error
