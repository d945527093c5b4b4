"""Grouping the members of a shard that share a key into samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from wds_datapipes.errors import DuplicateKeyError
from wds_datapipes.hints import ON_DUPLICATE, Message
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.redaction import short_repr
from wds_datapipes.samples.keys import META_STARTS, KeyRule, first_dot, is_meta
from wds_datapipes.shards.loading import ShardMembers
from wds_datapipes.shards.position import NextPosition, Progress
from wds_datapipes.types import MemberTuple, Sample, Shard
from wds_datapipes.user_warnings import warn_user

OnDuplicate: TypeAlias = Literal["raise", "first", "last"]
OnRepeatedKey: TypeAlias = Literal["warn", "raise", "ignore"]

#: The types of a member's shard. ``Shard | str`` would be evaluated for each member.
SHARD_TYPES = (Shard, str)
#: The maximum number of a shard's keys to keep for detecting repeated keys: about 10 MB.
KEYS_REMEMBERED = 65_536
#: The maximum number of field names in a warning.
MAX_NAMED = 50
#: A prefix that no member name has.
NO_NAME = "\0"


def group_samples(shards: Iterable[ShardMembers], **options: Any) -> Iterator[Sample]:
    """Group consecutive members with the same key into samples; a sample never spans two shards.

    The last sample of a truncated shard is dropped, because it may lack a field, unless the shard breaks off in the
    data of a file whose header shows that it belongs to another sample.

    Args:
        shards: the shards with their members, as `read_shards` or `split_by_shard` yield them.
        options: the arguments of `SampleGrouping`.
    """
    grouping = SampleGrouping(**options)
    yield from grouping.group(shards, Progress())
    grouping.finish()


class SampleGrouping:
    """Groups members into samples.

    Args:
        key_rule: splits a name into key and field.
        fields: the fields to keep; all by default.
        lowercase: convert field names to lower case.
        on_duplicate: what to do if a field occurs twice in a sample.
        on_repeated_key: what to do if a key occurs again after other keys of the same shard.
        on_error: the error policy, applied to samples.
        on_fault: called, instead of the error policy, with a `DuplicateKeyError`, the key, and the field or "". The
            sample is then kept with the first of its duplicate fields.
        remembered_keys: the maximum number of a shard's keys to keep for detecting repeated keys.
    """

    def __init__(
        self,
        *,
        key_rule: KeyRule = first_dot,
        fields: Collection[str] | None = None,
        lowercase: bool = True,
        on_duplicate: OnDuplicate = "raise",
        on_repeated_key: OnRepeatedKey = "warn",
        on_error: OnError = "raise",
        on_fault: Callable[[DuplicateKeyError, str, str], object] | None = None,
        remembered_keys: int = KEYS_REMEMBERED,
    ) -> None:
        self.key_rule = key_rule
        self._wanted = None if fields is None else frozenset(each.lower() if lowercase else each for each in fields)
        self._names = _FieldNames(lowercase)
        self._on_duplicate = on_duplicate
        self._on_repeated_key = on_repeated_key
        self._policy = ErrorPolicy(on_error, "group_samples")
        self._on_fault, self._remembered_keys = on_fault, remembered_keys

    @property
    def has_ended(self) -> bool:
        """Whether the error policy has ended the grouping."""
        return self._policy.has_ended

    def finish(self) -> None:
        """Warn about skipped samples that were not reported yet, and if no sample had a wanted field."""
        self._policy.finish()
        known = set(self._names.values())
        if self._wanted and self._policy.tried and self._names.is_complete and self._wanted.isdisjoint(known):
            wanted, found = (", ".join(map(repr, sorted(names)[:MAX_NAMED])) for names in (self._wanted, known))
            warn_user(
                f"group_samples(fields=...) yielded none of {self._policy.tried} samples, because none has a field "
                f"{wanted}. Their fields are {found}"
            )

    def group(self, shards: Iterable[ShardMembers], progress: Progress) -> Iterator[Sample]:
        """Yield the samples of shards, one shard after the other.

        Args:
            shards: the shards with their members.
            progress: updated with the positions of each sample and of the next one before the sample is yielded.
        """
        policy, names, wanted, key_rule = self._policy, self._names, self._wanted, self.key_rule
        by_first_dot = key_rule is first_dot
        seen = set[str]()  # the keys of the shard

        for shard, members in shards:
            empty = shard_metadata(shard)
            sample: Sample | None = None  # the current sample; None at the beginning and after a rejection
            key, start, offsets = None, 0, list[int]()  # this sample's offset, and those of its fields
            prefix, skip = NO_NAME, len(NO_NAME)  # the prefix of its names, if known
            seen.clear()
            for _, name, data, offset in members:
                # A name that consists of the prefix and a known field need not be split.
                if name[:skip] != prefix or (field := names.get(name[skip:], "")) == "":
                    member_key, _, raw_field = name.partition(".")
                    field = names.get(raw_field, "") if by_first_dot and name[:1] != "_" else ""
                    if field == "" or member_key[-1:] in ("", "/"):
                        parts = None if name[:2] in META_STARTS and is_meta(name) else key_rule(name)
                        if parts is None:
                            continue
                        member_key, raw_field = parts
                        field = names[raw_field]
                    if member_key != key:
                        if sample is not None and len(sample) > len(empty):
                            progress.last = (shard.number, start, offset)
                            progress.next = (shard.number, offset, member_key)
                            yield sample
                        key, start, offsets = member_key, offset, []
                        # If the key looks like a meta member's, names with this prefix may be meta members.
                        prefix = f"{key}." if by_first_dot and key[:2] != "__" and "/__" not in key else NO_NAME
                        skip = len(prefix)
                        sample = empty.copy()
                        sample["__key__"] = key
                        policy.tried += 1
                        if key not in seen:
                            if len(seen) < self._remembered_keys:
                                seen.add(key)
                        elif self._on_repeated_key == "raise":
                            message = _repeated_key_message(shard.url, key, offset)
                            if not self._tolerates(message, shard, key):
                                sample = None
                            if policy.has_ended:
                                break
                        elif self._on_repeated_key == "warn":
                            self._on_repeated_key = "ignore"  # one warning is enough
                            warn_user(_repeated_key_message(shard.url, key, offset))
                if sample is None or (wanted is not None and field not in wanted):
                    continue
                if field not in sample:
                    offsets.append(offset)
                    sample[field] = data
                elif field in empty:
                    continue  # metadata that another program has written into the shard
                elif self._on_duplicate == "last":
                    sample[field] = data
                elif self._on_duplicate == "raise":
                    first = offsets[list(sample).index(field) - len(empty)]
                    message = _duplicate_message(shard.url, name, key, field, first, offset)
                    if not self._tolerates(message, shard, key or "", field):
                        sample = None
                    if policy.has_ended:
                        break
            progress.next = position_after(shard)
            if policy.has_ended:
                break
            if sample is None or len(sample) == len(empty):
                continue
            end = shard.end if shard.is_complete else self._end_before_break(shard, key, offset)
            if end is not None:
                progress.last = (shard.number, start, end)
                yield sample

    def _end_before_break(self, shard: Shard, key: str | None, offset: int) -> int | None:
        """Return the end of the last sample of a shard that broke off in a file of another sample.

        Args:
            shard: the shard.
            key: the key of its last sample.
            offset: the offset of the last complete file.
        """
        name, start = shard.reached or ("", -1)
        parts = self.key_rule(name) if start > offset and not is_meta(name) else None
        return None if parts is None or parts[0] == key else start

    def _tolerates(self, message: str, shard: Shard, key: str, field: str = "") -> bool:
        """Whether a sample is kept despite a repeated key or field."""
        if self._on_fault is None:
            self._policy.handle(DuplicateKeyError(message), url=shard.url, key=key, field=field)
            return False
        self._on_fault(DuplicateKeyError(message), key, field)
        return True


class RecordGrouping:
    """Turns records into samples, with the same interface as `SampleGrouping`."""

    #: Errors of records are handled while shards are read.
    has_ended = False

    def finish(self) -> None:
        """Do nothing, because this class skips no sample."""

    @staticmethod
    def key_rule(name: str) -> tuple[str, str]:
        """Return the whole name of a record as its key."""
        return name, ""

    def group(self, shards: Iterable[ShardMembers], progress: Progress) -> Iterator[Sample]:
        """Yield the samples of shards, one shard after the other.

        Each sample is yielded after the next record has been read, so that the state contains the key of that record.

        Args:
            shards: the shards with their records.
            progress: updated with the positions of each sample and of the next one before the sample is yielded.
        """
        for shard, records in shards:
            metadata = shard_metadata(shard)
            sample: Sample | None = None
            start = 0
            record: Any  # a dictionary instead of the bytes of tar shards
            for _, key, record, offset in records:
                if sample is not None:
                    progress.last, progress.next = (shard.number, start, offset), (shard.number, offset, key)
                    yield sample
                # Metadata in the record come from another program; those of this shard replace them.
                sample, start = {**metadata, **record, **metadata, "__key__": key}, offset
            progress.next = position_after(shard)
            if sample is not None:
                progress.last = shard.number, start, shard.end
                yield sample


def position_after(shard: Shard) -> NextPosition:
    """Return the position after a shard, or the part of it, that was read."""
    continues_in_shard = shard.is_complete and shard.end >= 0
    return (shard.number, shard.end, "") if continues_in_shard else (shard.number + 1, 0, "")


def split_by_shard(source: Iterable[MemberTuple]) -> Iterator[ShardMembers]:
    """Split a stream of members into shards for `group_samples`, if it comes after another stage.

    Raises:
        TypeError: an item is not a member.
        ValueError: the members of a shard are not consecutive or not in order.
    """
    members = map(_check_member, source)
    member, failure = next(members, None), None

    def run(shard: Shard, following: MemberTuple | None, source: Shard | str) -> Iterator[MemberTuple]:
        """Yield the members of a shard."""
        nonlocal member, failure
        while following is not None:
            yield following
            reached = following[3]
            try:
                following = next(members, None)
            except Exception as error:
                if not shard.is_complete or shard.is_copy:
                    raise
                failure = error  # it belongs to the next shard; first, the last sample of this shard is yielded
                return
            shard.reached = None  # a stage in between may rename members, or yield only some of them
            if following is not None and not _continues_shard(following, source, reached):
                if not shard.is_copy and (shard.is_complete is None or following[0] is source):
                    url = following[0] if isinstance(following[0], str) else following[0].url
                    raise ValueError(
                        f"group_samples needs the members of each shard consecutively and in order, but got the one at "
                        f"byte {following[3]} of {redact(url)} after the one at "
                        f"byte {reached} of {redact(shard.url)}. Shuffle and mix shards before load_wds_shards, or "
                        "samples after group_samples"
                    )
                member = following
                return

    while member is not None:
        first, member = member, None
        # If a user created the member, only the URL of its shard is known. Such a shard counts as complete.
        shard = Shard(first[0], is_complete=True, is_copy=True) if isinstance(first[0], str) else first[0]
        yield shard, run(shard, first, first[0])
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # avoid a reference cycle, which would keep files of its frames open


def _continues_shard(member: MemberTuple, source: Shard | str, reached: int) -> bool:
    """Whether a member follows the one at the offset ``reached`` in the same pass over the shard ``source``.

    A stage may turn one member into several. Members that were pickled one by one have equal but not identical shards;
    in this case, the order of the offsets decides.
    """
    own, offset = member[0], member[3]
    if offset <= reached:
        return own is source and offset == reached
    return own is source or (own == source and (isinstance(own, str) or own.number < 0))


def _check_member(member: Any) -> MemberTuple:
    try:
        shard, name, _, offset = member
    except (TypeError, ValueError):
        pass
    else:
        if isinstance(name, str) and isinstance(offset, int) and isinstance(shard, SHARD_TYPES):
            return member  # type: ignore[no-any-return]
    advice, kind = "", type(member).__name__
    if isinstance(member, str):
        advice = ". Put .load_wds_shards() before it, which reads the members of shards"
    elif isinstance(member, dict):
        advice = ". It may already be a sample; records are samples without .group_samples()"
    elif isinstance(member, tuple):
        advice = ". In place of torchdata's .load_from_tar(), write ShardList(urls).load_wds_shards()"
    raise TypeError(
        f"group_samples needs members (shard, name, data, offset), as load_wds_shards yields them, but got {kind}: "
        f"{short_repr(member)}{advice}"
    )


class _FieldNames(dict[str, str]):
    """Maps field names of members to those of samples, so that all samples share the same few strings."""

    def __init__(self, lowercase: bool) -> None:
        self._lowercase = lowercase
        #: Whether it holds all names that were looked up.
        self.is_complete = True

    def __missing__(self, raw: str) -> str:
        if len(self) > 4096:  # an unbounded set of names, such as numbered frames
            self.clear()
            self.is_complete = False
        field = self[raw] = sys.intern(raw.lower() if self._lowercase else raw)
        return field


def shard_metadata(shard: Shard) -> Sample:
    """Return the metadata with which all samples of a shard start."""
    empty: Sample = {"__key__": "", "__url__": shard.url}
    if shard.local_path is not None:
        empty["__local_path__"] = shard.local_path
    return empty


def _duplicate_message(url: str, name: str, key: str | None, field: str, first: int, offset: int) -> Message:
    return Message(
        f"{redact(url)} holds the field {field!r} of the sample {key!r} twice, at bytes {first} and {offset} "
        f"(member {name!r}). Write the shard again with distinct names, or ",
        ON_DUPLICATE,
        " to use the first",
    )


def _repeated_key_message(url: str, key: str, offset: int) -> str:
    return (
        f"{redact(url)} holds the sample {key!r} in parts: one of its files is at byte {offset}, after files of other "
        f"samples. They must be adjacent: write the shard again, sorted by name (tar --sort=name)"
    )
