"""From members to samples: gathering the files that share a key."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, TypeAlias

from wds_datapipes.errors import ChangedShardError, DuplicateFieldError, RepeatedKeyError
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.shards.position import Progress, check_of
from wds_datapipes.types import MemberTuple, Sample, ShardURL
from wds_datapipes.user_warnings import warn_user

__all__ = ["OnDuplicate", "OnRepeatedKey", "checked_key", "group_samples"]

OnDuplicate: TypeAlias = Literal["raise", "first", "last"]
OnRepeatedKey: TypeAlias = Literal["warn", "raise", "ignore"]

#: How many keys of a shard are remembered to notice one that comes back: some 10 MB at the most.
KEYS_REMEMBERED = 65_536
#: No member's name begins with it.
NO_NAME = "\0"


def group_samples(
    source: Iterable[MemberTuple],
    *,
    key_rule: KeyRule = first_dot,
    fields: Collection[str] | None = None,
    lowercase: bool = True,
    on_duplicate: OnDuplicate = "raise",
    on_repeated_key: OnRepeatedKey = "warn",
    on_error: OnError = "raise",
    progress: Progress | None = None,
) -> Iterator[Sample]:
    """Gather neighbouring members with one key into a sample; a shard's end always ends a sample.

    Where each sample is, and where the next one begins, is told to ``progress`` before it is yielded.
    """
    policy = ErrorPolicy(on_error, "group_samples")
    names = _FieldNames(lowercase)
    wanted = None if fields is None else frozenset(field.lower() if lowercase else field for field in fields)
    repeated_warned = on_repeated_key == "ignore"
    # With this rule, a name that is the key, a dot and a field that was met before need not be split.
    by_first_dot = key_rule is first_dot

    # The shard being read: its URL, what its samples say of it, the offset reached, the keys met.
    url, origin, reached, seen = "", Sample(), -1, set[str]()
    told = Progress() if progress is None else progress
    number, start = -1, 0  # of the shard, and where the sample begins in it
    # The sample being gathered (None: there is none, or it was refused), its key, and the offsets of its members.
    sample: Sample | None = None
    key, prefix, skip, offsets = None, NO_NAME, len(NO_NAME), list[int]()
    try:
        for member in source:
            try:
                member_url, name, data, offset = member
            except (TypeError, ValueError):
                raise TypeError(
                    f"group_samples gathers the members (url, name, data, offset) that load_wds_shards yields, and got "
                    f"{type(member).__name__}: {reprlib.repr(member)}"
                ) from None
            if offset < reached or (
                member_url is not url
                and (offset == reached or member_url != url or getattr(member_url, "number", -1) >= 0)
            ):
                # Another shard, or the same one read again, or on.
                if isinstance(url, ShardURL) and (url.complete is None or member_url is url):
                    sample = None
                    raise ValueError(_unordered_members_message(url, reached, member_url, offset))
                before, number = number, getattr(member_url, "number", -1)
                if sample is not None and len(sample) > len(origin) and _ended_well(url):
                    told.last, told.next = (before, start, _end_of(url)), (number, offset, "")
                    yield sample
                url, origin = member_url, _origin(member_url)
                sample, key, prefix, skip = None, None, NO_NAME, len(NO_NAME)
                seen.clear()
            reached = offset
            if name[:skip] != prefix or (field := names.get(name[skip:], "")) == "":
                # Not the key, a dot and a field that was met before: a field in another sample, or something else.
                member_key, _, raw_field = name.partition(".")
                field = names.get(raw_field, "") if by_first_dot and name[:1] != "_" else ""
                if field == "" or member_key[-1:] in ("", "/"):
                    parts = None if name[:2] == "__" and is_meta(name) else key_rule(name)
                    if parts is None:
                        continue
                    member_key, raw_field = parts
                    field = names[raw_field]
                if member_key != key:
                    if sample is not None and len(sample) > len(origin):
                        told.last, told.next = (number, start, offset), (number, offset, member_key)
                        yield sample
                    key, offsets, start = member_key, [], offset
                    policy.tried += 1
                    # After a key like a meta member's, a name that goes on with it may be that of a meta member.
                    prefix = f"{key}." if by_first_dot and key[:2] != "__" else NO_NAME
                    skip = len(prefix)
                    sample = origin.copy()
                    sample["__key__"] = key
                    if key not in seen:
                        if len(seen) < KEYS_REMEMBERED:
                            seen.add(key)
                    elif on_repeated_key == "raise":
                        sample = None
                        if not policy.goes_on(
                            RepeatedKeyError(_repeated_key_message(url, key, offset)), url=url, key=key
                        ):
                            break
                    elif not repeated_warned:
                        repeated_warned = True
                        warn_user(_repeated_key_message(url, key, offset))
            if sample is None:
                continue
            if wanted is not None and field not in wanted:
                continue
            if field not in sample:
                offsets.append(offset)
                sample[field] = data
            elif field in origin:
                continue  # what another program noted of where it had the sample from
            elif on_duplicate == "last":
                sample[field] = data
            elif on_duplicate == "raise":
                first = offsets[list(sample).index(field) - len(origin)]
                sample = None
                twice = _duplicate(url, name, key, field, first, offset)
                if not policy.goes_on(DuplicateFieldError(twice), url=url, key=key or "", field=field):
                    break
    except Exception:
        # A shard that ended well may have its last sample still in hand when the next one cannot be read.
        known = isinstance(url, ShardURL) and not url.copied
        if sample is not None and len(sample) > len(origin) and known and _ended_well(url):
            told.last, told.next = (number, start, _end_of(url)), (number + 1, 0, "")
            yield sample
        raise
    told.next = (number + 1, 0, "")
    if sample is not None and len(sample) > len(origin) and _ended_well(url):
        told.last = (number, start, _end_of(url))
        yield sample
    policy.finish()


def checked_key(
    source: Iterable[MemberTuple], place: tuple[int, int], check: int, key_rule: KeyRule
) -> Iterator[MemberTuple]:
    """Yield all members, and make sure that the one at a place has the key that it had when a state was saved.

    Raises:
        ChangedShardError: it has another one.
    """
    members = iter(source)
    for member in members:
        url, name, _, offset = member
        if (getattr(url, "number", -1), offset) == place:
            parts = key_rule(name)
            if parts is None or check_of(parts[0]) != check:
                raise ChangedShardError(
                    f"{redact(url)} is not what it was when the state was saved: another sample begins at byte "
                    f"{offset}, with the file {name!r}. A state can be loaded only with the very shards that it was "
                    "saved with"
                )
            yield member
            break
        yield member
    yield from members


class _FieldNames(dict[str, str]):
    """Fields as they are written to fields as they are called: the same few strings for all samples."""

    def __init__(self, lowercase: bool) -> None:
        self._lowercase = lowercase

    def __missing__(self, raw: str) -> str:
        if len(self) > 4096:  # names that are never the same again, such as numbered frames
            self.clear()
        field = self[raw] = sys.intern(raw.lower() if self._lowercase else raw)
        return field


def _origin(url: str) -> Sample:
    """Return what all samples of a shard begin with."""
    origin: Sample = {"__key__": "", "__url__": str(url)}
    if isinstance(url, ShardURL) and url.local_path is not None:
        origin["__local_path__"] = url.local_path
    return origin


def _ended_well(url: str) -> bool:
    return not isinstance(url, ShardURL) or url.complete is True


def _end_of(url: str) -> int:
    """Return where the last sample ends that was read of a shard."""
    return url.end if isinstance(url, ShardURL) else -1


def _unordered_members_message(url: str, reached: int, next_url: str, offset: int) -> str:
    return (
        f"group_samples needs the members of each shard together and in their order, and got the one at byte {offset} "
        f"of {redact(next_url)} after the one at byte {reached} of {redact(url)}. "
        f"Shuffle and mix shards before load_wds_shards, or samples after group_samples"
    )


def _duplicate(url: str, name: str, key: str | None, field: str, first: int, offset: int) -> str:
    return (
        f"{redact(url)} holds the field {field!r} of the sample {key!r} twice, at bytes {first} and {offset} "
        f'(member {name!r}). Write the shard again with distinct names, or pass on_duplicate="first" or "last"'
    )


def _repeated_key_message(url: str, key: str, offset: int) -> str:
    return (
        f"{redact(url)} holds the sample {key!r} in parts: a file of it stands at byte {offset}, after files of other "
        f"samples. They have to be neighbours: write the shard again in the order of names (tar --sort=name)"
    )
