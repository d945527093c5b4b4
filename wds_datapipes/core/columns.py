"""Fields from elsewhere: from a table, by key, and from shards that stand beside those being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from wds_datapipes.core.fields import ORIGIN, no_sample, told
from wds_datapipes.core.members import load_wds_shards
from wds_datapipes.core.naming import KeyRule
from wds_datapipes.core.openers import redact
from wds_datapipes.core.policy import ErrorPolicy, OnError, note
from wds_datapipes.core.samples import group_samples
from wds_datapipes.core.selection import Lacking
from wds_datapipes.core.types import Sample
from wds_datapipes.errors import DuplicateField, MisalignedShards, MissingEntry, MissingField, WdsError

__all__ = ["Entry", "Replacement", "add_columns", "associate", "parse_url_of"]

Entry: TypeAlias = Mapping[str, Any] | None
URLRule: TypeAlias = Callable[[str], str]

#: How many samples of a parallel shard are looked at to find a key, if errors are passed over.
LOOK_AHEAD = 64


def associate(
    source: Iterable[Sample], find: Callable[[str], Entry], *, missing: Lacking = "raise", on_error: OnError = "raise"
) -> Iterator[Sample]:
    """Yield each sample with the fields that are found by its key."""
    policy = ErrorPolicy(on_error, "associate")
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise no_sample("associate", sample)
        try:
            if "__key__" not in sample:
                raise MissingField(f"associate looks samples up by their '__key__', and one has only {list(sample)}")
            entry = find(sample["__key__"])
            if entry is None and missing == "raise":
                raise MissingEntry(
                    f"associate found nothing for {told(sample)}. "
                    f'Pass missing="keep" to hand such samples on as they are, or missing="skip" to leave them out'
                )
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises is for the policy to judge
            if not isinstance(error, WdsError):
                note(error, f"This happened in associate, at {told(sample)}")
            if policy.goes_on(error, sample):
                continue
            break
        if entry is None and missing == "skip":
            continue
        if entry is not None and not isinstance(entry, Mapping):
            raise TypeError(
                f"associate adds dicts of fields, and found a {type(entry).__name__} for {told(sample)}: "
                f'make it a dict, as in {{"label": {entry!r:.40}}}'
            )
        yield {**sample, **(entry or {}), **{name: sample[name] for name in ORIGIN if name in sample}}
    policy.finish()


@dataclass(frozen=True)
class Replacement:
    """Makes the URL of a parallel shard by replacing a part."""

    old: str
    new: str

    def __call__(self, url: str) -> str:
        """Return the URL of the shard that stands beside ``url``."""
        if self.old not in url:
            raise ValueError(f"add_columns replaces {self.old!r} by {self.new!r}, and {redact(url)} does not hold it")
        return url.replace(self.old, self.new)


def parse_url_of(url_of: Any) -> list[URLRule]:
    """Return the functions that are meant by a function, a pair of strings, or a list of such."""
    if callable(url_of):
        return [url_of]
    if isinstance(url_of, list | tuple) and url_of:
        if all(isinstance(text, str) for text in url_of):
            if len(url_of) == 2 and url_of[0] and url_of[0] != url_of[1]:
                return [Replacement(*url_of)]
        else:
            return [rule for each in url_of for rule in parse_url_of(each)]
    raise TypeError(
        f'add_columns makes the URL of a parallel shard by a function, or by what to replace, as in ("images", '
        f'"labels"), or takes a list of these, not {url_of!r}'
    )


def add_columns(
    source: Iterable[Sample],
    rules: Sequence[URLRule],
    *,
    key_rule: KeyRule,
    fields: Collection[str] | None = None,
    rename_files: Callable[[str], str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with the fields that parallel shards have for it.

    A sample gets all of its columns or is not handed on. Samples are told by their keys alone, so what a policy passes
    over in one shard never shifts those of another: if the key is not the next one, it is looked for among the next
    `LOOK_AHEAD` of the parallel shard, and those before it are given up; if it is not among them, the sample is.
    """
    policy = ErrorPolicy(on_error, "add_columns")
    passing = on_error != "raise"

    def read(url: str, refuse: Callable[[Exception], bool]) -> Iterator[Sample]:
        return group_samples(
            load_wds_shards([url], rename_files=rename_files, storage_options=storage_options),
            key_rule=key_rule,
            on_returning_key="ignore",  # it is the same as in the first shard, or an error here
            on_error=refuse if passing else "raise",
        )

    columns = [_Column(rule, read, LOOK_AHEAD if passing else 0) for rule in rules]
    names = None if fields is None else [field.lower() for field in fields]
    url = ""
    try:
        for sample in policy.counted(source):
            if not isinstance(sample, dict):
                raise no_sample("add_columns", sample)
            if not {"__key__", "__url__"} <= sample.keys():
                raise TypeError(f"add_columns needs samples with '__key__' and '__url__', and one has {list(sample)}")
            key, beside = sample["__key__"], sample["__url__"]
            # The samples of one reading of a shard share one string; a copy of it may be from a reading or the next.
            if beside is not url and (beside != url or not any(column.expects(key) for column in columns)):
                verdicts = [_passed(column.end(), policy, url=column.url) for column in columns]
                if False in verdicts:
                    break
                url = beside
                for column in columns:
                    column.begin(url)
            added: Sample = {}
            faults = list(filter(None, [column.add(sample, names, added) for column in columns]))
            verdicts = [_passed(column.gap, policy, url=column.url) for column in columns]
            if False in verdicts:
                break
            if not faults:
                yield {**sample, **added}
            elif not policy.goes_on(faults.pop(0), sample):
                break
        else:
            for column in columns:
                if not _passed(column.end(), policy, url=column.url):
                    break
        policy.finish()
    finally:
        for column in columns:
            column.close()


def _passed(fault: Exception | None, policy: ErrorPolicy, *, url: str) -> bool:
    try:
        return fault is None or policy.goes_on(fault, url=url)
    finally:
        del fault  # a frame that holds the error that goes through it would keep all open that other frames hold


class _Column:
    """Reads the shards that stand beside others, one at a time.

    Attributes:
        url: the shard that is being read.
        gap: says what was given up to find the latest sample, if there was anything.
    """

    def __init__(
        self,
        rule: URLRule,
        read: Callable[[str, Callable[[Exception], bool]], Iterator[Sample]],
        look_ahead: int,
    ) -> None:
        self.url = ""
        self.gap: MisalignedShards | None = None
        self._rule = rule
        self._read = read
        self._look_ahead = look_ahead
        self._beside = ""
        self._samples: Iterator[Sample] | None = None
        self._ahead: deque[Sample] = deque()
        self._broken: Exception | None = None
        self._told = False  # whether it was said that it is broken
        self._refused: Exception | None = None

    def begin(self, beside: str) -> None:
        """Turn to the shard that stands beside another one."""
        self.close()
        self._beside = self.url = beside
        self._told = False
        try:
            url: object = self._rule(beside)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises is for the policy to judge
            note(error, f"This happened in add_columns, at the shard {redact(beside)}")
            self._broken = error
            return
        if not isinstance(url, str):
            raise TypeError(f"add_columns needs the URL of a shard beside {redact(beside)}, and got {url!r}")
        self.url = url
        self._samples = self._read(url, self._refuse)

    def expects(self, key: str) -> bool:
        """Tell whether the next sample has this key."""
        return self._reach(1) and self._ahead[0]["__key__"] == key

    def add(self, sample: Sample, names: list[str] | None, added: Sample) -> Exception | None:
        """Put the fields for a sample into ``added``, or return what is wrong."""
        found = self._find(sample["__key__"])
        if isinstance(found, Exception):
            try:
                return found
            finally:
                del found  # as in `_passed`: its frames lead back to this one
        where = f"for the sample {sample['__key__']!r} of {redact(self._beside)}"
        for name in names if names is not None else found:
            if names is None and name[:2] == "__":
                continue
            if name not in found:
                fields = [field for field in found if field[:2] != "__"]
                return MissingField(f"add_columns needs {name!r} {where}, and {redact(self.url)} has {fields}")
            if name in sample or name in added:
                return DuplicateField(
                    f"add_columns got {name!r} from {redact(self.url)} {where}, and there is one already. Choose "
                    f"others by fields=, or rename the first before"
                )
            added[name] = found[name]
        return None

    def end(self) -> Exception | None:
        """Return what is wrong at the end of the samples, unless that was told before."""
        if self._reach(1):
            return self._misaligned(
                f"has the sample {self._ahead[0]['__key__']!r} where {redact(self._beside)} has ended"
            )
        return None if self._told else self._broken

    def close(self) -> None:
        """Close the shard."""
        close = getattr(self._samples, "close", None)
        self._samples = self._broken = self._refused = self.gap = None
        self._ahead.clear()
        if close is not None:
            close()

    def _find(self, key: str) -> Sample | Exception:
        self.gap = None
        if self.expects(key):
            return self._ahead.popleft()
        for place in range(1, self._look_ahead):
            if not self._reach(place + 1):
                break
            if self._ahead[place]["__key__"] == key:
                given_up = [self._ahead.popleft()["__key__"] for _ in range(place)]
                self.gap = self._misaligned(f"has the samples {given_up}, which {redact(self._beside)} has not")
                return self._ahead.popleft()
        if self._broken is not None and not self._ahead:
            self._told = True
            return self._broken
        other = f"the sample {self._ahead[0]['__key__']!r}" if self._ahead else "ended"
        return self._misaligned(f"has {other} where {redact(self._beside)} has the sample {key!r}")

    def _reach(self, count: int) -> bool:
        """Read until so many samples are ahead; return False if the shard has fewer."""
        while len(self._ahead) < count and self._samples is not None:
            try:
                self._ahead.append(next(self._samples))
            except StopIteration:  # noqa: PERF203 - an error ends the reading, and not the loop
                self._samples = None
            except Exception as error:  # noqa: BLE001 - it is told for each sample that is lost by it
                self._broken, self._samples = error, None
        return len(self._ahead) >= count

    def _refuse(self, error: Exception) -> bool:
        """Pass over a sample of this shard; the one that it belongs to will miss it."""
        self._refused = error
        return True

    def _misaligned(self, what: str) -> MisalignedShards:
        refused = f". What was passed over in it last: {self._refused}" if self._refused is not None else ""
        return MisalignedShards(
            f"{redact(self.url)} {what}{refused}. Parallel shards hold the same keys in the same order, and "
            f"add_columns stands directly after group_samples, before what leaves out, shuffles or mixes samples"
        )
