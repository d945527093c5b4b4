"""Joining: adds fields from a table, by key, and from parallel shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError, MissingFieldError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy, OnError, note
from wds_datapipes.samples.fields import (
    ORIGIN,
    Lacking,
    WrongItemError,
    describe_sample,
    map_samples,
    not_a_sample_error,
)
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.types import Sample

Entry: TypeAlias = Mapping[str, Any] | None

URLRule: TypeAlias = Callable[[str], str]

Read: TypeAlias = Callable[[str, Callable[[Exception], bool]], Iterator[Sample]]
"""Reads a shard; the function handles the errors of its samples."""

#: How many samples of a parallel shard are searched for a key, if errors are skipped.
LOOK_AHEAD = 64


def associate(
    source: Iterable[Sample],
    table: Mapping[Any, Mapping[str, Any]] | Callable[[Any], Entry],
    *,
    by: str = "__key__",
    missing: Lacking = "raise",
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with additional fields, looked up by its key or by another field."""
    find: Callable[[Any], Entry] = table.get if isinstance(table, Mapping) else table

    def join(sample: Sample) -> Sample | None:
        if not isinstance(sample, dict):
            raise not_a_sample_error("associate", sample)
        if by not in sample:
            raise MissingFieldError(f"associate looks up samples by the field {by!r}, but one has only {list(sample)}")
        entry = find(sample[by])
        if entry is None:
            if missing == "raise":
                raise MissingFieldError(
                    f"associate found no entry for {describe_sample(sample)}. "
                    f'Pass missing="keep" to yield such samples unchanged, or missing="skip" to drop them'
                )
            return sample.copy() if missing == "keep" else None
        if not isinstance(entry, Mapping):
            raise WrongItemError(
                f"associate needs dicts of fields, but found a {type(entry).__name__} for {describe_sample(sample)}: "
                f'make it a dict, as in {{"label": {entry!r:.40}}}'
            )
        return {**sample, **entry, **{name: sample[name] for name in ORIGIN if name in sample}}

    return map_samples(source, join, on_error=on_error, stage="associate")


@dataclass(frozen=True)
class Replacement:
    """Derives the URL of a parallel shard by replacing text."""

    old: str
    new: str

    def __call__(self, url: str) -> str:
        """Return the URL of the shard parallel to ``url``."""
        if self.old not in url:
            raise ValueError(
                f"add_columns replaces {self.old!r} with {self.new!r}, but {redact(url)} does not contain it"
            )
        return url.replace(self.old, self.new)


def parse_url_of(url_of: Any) -> URLRule:
    """Return the URL rule from a function, or a pair of strings."""
    if callable(url_of):
        return url_of  # type: ignore[no-any-return]  # mypy does not narrow Any
    is_pair = isinstance(url_of, list | tuple) and len(url_of) == 2 and all(isinstance(text, str) for text in url_of)
    if is_pair and url_of[0] and url_of[0] != url_of[1]:
        return Replacement(*url_of)
    raise TypeError(
        'url_of of add_columns must be a function of the URL, or a replacement such as ("images", "labels"), not '
        f"{url_of!r}"
    )


def add_columns(
    source: Iterable[Sample],
    rule: URLRule,
    *,
    key_rule: KeyRule,
    fields: Collection[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
) -> Iterator[Sample]:
    """Yield each sample with the fields that a parallel shard has for its key.

    Samples are matched by key alone, so samples that a policy skips
    in one shard never shift those of another. If the next sample of the parallel shard has another key, the next
    `LOOK_AHEAD` are searched: if one matches, those before it are dropped, otherwise the sample is.
    """
    policy = ErrorPolicy(on_error, "add_columns")
    skips_errors = not policy.always_raises
    counted = CountedErrors("raise", policy.counters)
    options = ReadOptions(storage_options=storage_options, on_error=counted)

    def read(url: str, skip: Callable[[Exception], bool]) -> Iterator[Sample]:
        on_error: Any = CountedErrors(skip if skips_errors else "raise", policy.counters)
        return group_samples(
            read_shards([url], options),
            key_rule=key_rule,
            on_repeated_key="ignore",  # the first shard has the same key, or joining fails
            on_error=on_error,
        )

    shard = ParallelShard(rule, read, LOOK_AHEAD if skips_errors else 0)
    names = None if fields is None else [field.lower() for field in fields]

    def report(fault: Exception | None) -> None:
        """Handle an error of the parallel shard that concerns none of our samples."""
        if fault is not None:
            policy.handle(fault, url=shard.url)

    url = ""
    joined: Sample | Exception = {}
    try:
        for sample in policy.counted(source):
            if not isinstance(sample, dict):
                raise not_a_sample_error("add_columns", sample)
            if not {"__key__", "__url__"} <= sample.keys():
                raise TypeError(f"add_columns needs samples with '__key__' and '__url__', but one has {list(sample)}")
            main_url = sample["__url__"]
            # The samples of one reading of a shard share one string; a copied one may be from this reading or the next.
            if main_url is not url and (main_url != url or not shard.expects(sample["__key__"])):
                report(shard.end())
                shard.begin(main_url)
            url = main_url
            joined = shard.join(sample, names)
            report(shard.gap)
            if isinstance(joined, Exception):
                policy.handle(joined, sample)
            elif not policy.has_ended:
                yield joined
            if policy.has_ended:
                break
        else:
            report(shard.end())
        policy.finish()
    finally:
        joined = {}  # avoid a reference cycle: the frames of an error would keep their files open
        shard.close()


class ParallelShard:
    """Reads parallel shards, one at a time, in step with the shards that they are joined to.

    Attributes:
        url: the URL of the current shard.
        gap: the error for the samples that were dropped to find the latest one, if any.
    """

    def __init__(self, rule: URLRule, read: Read, look_ahead: int) -> None:
        self._rule, self._read, self._look_ahead = rule, read, look_ahead
        self.url = self._main_url = ""
        self.gap: MisalignedShardsError | None = None
        self._samples: Iterator[Sample] | None = None
        self._ahead: deque[Sample] = deque()
        self._error: Exception | None = None
        self._is_reported = False  # whether the failure was reported
        self._skipped: Exception | None = None

    def begin(self, main_url: str) -> None:
        """Read the shard that is parallel to another one."""
        self.close()
        self._main_url, self._is_reported = main_url, False
        self._samples = self._open()

    def expects(self, key: str) -> bool:
        """Whether the next sample has this key."""
        return self._reach(1) and bool(self._ahead[0]["__key__"] == key)

    def join(self, sample: Sample, names: list[str] | None) -> Sample | Exception:
        """Return a sample with the fields for it, or the error."""
        try:
            found = self._find(sample["__key__"])
        except Exception as error:  # noqa: BLE001 - the policy handles all errors of a shard
            return error
        where = f"for the sample {sample['__key__']!r} of {redact(self._main_url)}"
        joined = sample.copy()
        for name in (name for name in found if name[:2] != "__") if names is None else names:
            if name not in found:
                fields = [field for field in found if field[:2] != "__"]
                return MissingFieldError(f"add_columns needs {name!r} {where}, but {redact(self.url)} has {fields}")
            if name in joined:
                return DuplicateKeyError(
                    f"add_columns got {name!r} from {redact(self.url)} {where}, which already has this field. Select "
                    f"other fields with fields=, or rename the existing one first"
                )
            joined[name] = found[name]
        return joined

    def end(self) -> Exception | None:
        """Return the error at the end of the samples, unless it was reported before."""
        if self._reach(1):
            key = self._ahead[0]["__key__"]
            return self._misaligned(f"has the sample {key!r}, but {redact(self._main_url)} has ended")
        return None if self._is_reported else self._error

    def close(self) -> None:
        """Close the shard."""
        close = getattr(self._samples, "close", None)
        self._samples = self._error = self._skipped = self.gap = None
        self._ahead.clear()
        if close is not None:
            close()

    def _open(self) -> Iterator[Sample]:
        self.url = self._main_url
        try:
            url: object = self._rule(self._main_url)
        except Exception as error:
            note(error, f"raised in add_columns for the shard {redact(self._main_url)}")
            raise
        if not isinstance(url, str):
            raise WrongItemError(
                f"add_columns needs the URL of the shard parallel to {redact(self._main_url)}, but url_of returned "
                f"{url!r}"
            )
        self.url = url
        yield from self._read(url, self._skip)

    def _find(self, key: str) -> Sample:
        self.gap = None
        for index in range(max(self._look_ahead, 1)):
            if not self._reach(index + 1):
                break
            if self._ahead[index]["__key__"] == key:
                dropped = [self._ahead.popleft()["__key__"] for _ in range(index)]
                if dropped:
                    self.gap = self._misaligned(f"has the samples {dropped}, which {redact(self._main_url)} lacks")
                return self._ahead.popleft()
        if self._error is not None and not self._ahead:
            self._is_reported = True
            raise self._error
        found = f"the sample {self._ahead[0]['__key__']!r}" if self._ahead else "ended"
        raise self._misaligned(f"has {found}, but {redact(self._main_url)} has the sample {key!r}")

    def _reach(self, count: int) -> bool:
        """Read until ``count`` samples are buffered; return False if the shard has fewer."""
        while len(self._ahead) < count and self._samples is not None:
            try:
                self._ahead.append(next(self._samples))
            except StopIteration:  # noqa: PERF203 - the loop ends at the first error
                self._samples = None
            except Exception as error:  # noqa: BLE001 - reported for each sample that it affects
                self._error, self._samples = error, None
        return len(self._ahead) >= count

    def _skip(self, error: Exception) -> bool:
        """Skip a sample of this shard; the error is reported for the sample that it belongs to."""
        self._skipped = error
        return True

    def _misaligned(self, what: str) -> MisalignedShardsError:
        skipped = f". The last item skipped in it: {self._skipped}" if self._skipped is not None else ""
        return MisalignedShardsError(
            f"{redact(self.url)} {what}{skipped}. Parallel shards must have the same keys in the same order, and "
            f"add_columns must come directly after group_samples, before stages that skip, shuffle or mix samples"
        )
