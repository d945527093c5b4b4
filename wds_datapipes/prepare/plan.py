"""The plan of new shards: which samples there will be, in which order, and which shard each of them is for."""

from __future__ import annotations

import string
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import NamedTuple

import numpy as np

from wds_datapipes.errors import EncodeError, SampleSourceError, UnwritableSampleError
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.prepare.sample_spec import MeasuredSample, SampleSpec, Source, measure
from wds_datapipes.prepare.subset import check_rekey
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.tar.header_writer import END, TOO_LARGE, HeaderWriter
from wds_datapipes.writing.sample_packer import SamplePacker

__all__ = ["Plan", "check_new_key", "draft_of", "make_plan"]

#: How many drafts are made before their files are looked at, by how many threads, and how many by one at a time.
AT_ONCE, THREADS, BATCH = 8192, 16, 128
#: What would break a line of a listing.
CONTROL = {*map(chr, range(32)), "\x7f"}


class Plan(NamedTuple):
    """What to write. It has a few numbers for each sample, and no names."""

    #: Where each sample to be written is in its source, in the order in which they are written.
    order: array[int]
    #: How many bytes all fields of a sample have, by its place in the source; -1 if only its command can tell.
    payloads: array[int]
    #: What tells a sample from a changed one, by its place in the source.
    stamps: array[int]
    #: The end of each shard in ``order``.
    ends: list[int]

    def shard(self, number: int) -> array[int]:
        """Return the samples of a shard, by their places in the source."""
        return self.order[self.ends[number - 1] if number else 0 : self.ends[number]]


def check_new_key(pattern: str) -> None:
    """Raise unless keys can be made by a pattern of ``{number}``, ``{key}`` and ``{name}``.

    Raises:
        ValueError: they cannot.
    """
    check_rekey(pattern)
    if any(name == "shard" for _, name, _, _ in string.Formatter().parse(pattern)):
        raise ValueError(f"The new key {pattern!r} has {{shard}}, and the samples come from no shard. Leave it out")


def draft_of(source: Source, number: int, rekey: str) -> SampleSpec:
    """Return a draft with its final key.

    Raises:
        SampleSourceError: the source cannot tell what the sample is made of.
        EncodeError: a value has no encoding.
    """
    draft = source.draft(number)
    if not rekey:
        return draft
    return draft._replace(key=rekey.format(number=number, key=draft.key, name=draft.key.rpartition("/")[2]))


def make_plan(
    source: Source,
    *,
    maxcount: int,
    maxsize: float,
    rekey: str,
    seed: int | None,
    key_rule: KeyRule,
    policy: ErrorPolicy,
    on_looked: Callable[[int, int], object] | None = None,
) -> Plan:
    """Look at all samples and their files, and divide them into shards as `ShardWriter` would.

    Args:
        source: the samples.
        maxcount: how many samples a shard has at the most.
        maxsize: how many bytes.
        rekey: a pattern for new keys, or nothing.
        seed: of a random order, if that is wanted.
        key_rule: how the shards will be read.
        policy: what to do about a sample that cannot be written.
        on_looked: called with how many samples were looked at, and the bytes of their fields.

    Raises:
        SampleSourceError: a file is not there or is none, two samples have one key, or a key has unsuitable characters.
        UnwritableSampleError: a sample would be read back as another.
        EncodeError: a value has no encoding.
    """
    headers = HeaderWriter(user="", group="", mode=0o644, mtime=0)
    packer = SamplePacker(headers, False, unsafe=False, keep_meta=False, key_rule=key_rule)
    count = len(source)
    payloads, sizes = array("q", bytes(8 * count)), array("q", bytes(8 * count))
    stamps, hashes = array("Q", bytes(8 * count)), np.zeros(count, np.int64)
    bad: set[int] = set()

    def refuse(number: int, error: Exception, key: str = "") -> None:
        if not policy.goes_on(error, key=key):
            raise error
        bad.add(number)

    for number, draft, found in _looked_at(source, rekey):
        if isinstance(found, Exception):
            refuse(number, found, "" if draft is None else draft.key)
            continue
        assert draft is not None  # noqa: S101  it was measured
        try:
            sizes[number] = _size(draft, found, packer, headers)
        except (SampleSourceError, UnwritableSampleError) as error:
            refuse(number, error, draft.key)
            continue
        payload = sum(found.sizes)
        payloads[number] = payload if found.is_exact else -1
        stamps[number], hashes[number] = found.stamp, hash(draft.key)
        if on_looked is not None:
            on_looked(1, payload)
    for number, repeated in _repeated_keys(source, rekey, hashes, bad):
        refuse(number, repeated)
    order = array("L", (number for number in range(count) if number not in bad))
    if seed is not None:
        Random(seed).shuffle(order)
    return Plan(order, payloads, stamps, _shard_ends((sizes[number] for number in order), maxcount, maxsize))


def _looked_at(source: Source, rekey: str) -> Iterator[tuple[int, SampleSpec | None, MeasuredSample | Exception]]:
    """Yield each sample in its order, with what is known of its files, or what is wrong with it."""
    with ThreadPoolExecutor(THREADS) as pool:  # a store on the network takes its time for each file
        for begin in range(0, len(source), AT_ONCE):
            drafts = [_read_spec(source, number, rekey) for number in range(begin, min(begin + AT_ONCE, len(source)))]
            batches = [drafts[at : at + BATCH] for at in range(0, len(drafts), BATCH)]
            found = (each for batch in pool.map(_measure, batches) for each in batch)
            for number, (draft, facts) in enumerate(zip(drafts, found, strict=True), begin):
                yield number, draft if isinstance(draft, SampleSpec) else None, facts


def _read_spec(source: Source, number: int, rekey: str) -> SampleSpec | Exception:
    try:
        return draft_of(source, number, rekey)
    except (SampleSourceError, EncodeError) as error:
        return error


def _measure(drafts: list[SampleSpec | Exception]) -> list[MeasuredSample | Exception]:
    return [_facts(draft) if isinstance(draft, SampleSpec) else draft for draft in drafts]


def _facts(draft: SampleSpec) -> MeasuredSample | Exception:
    try:
        return measure(draft)
    except SampleSourceError as error:
        return error


def _size(draft: SampleSpec, found: MeasuredSample, packer: SamplePacker, headers: HeaderWriter) -> int:
    """Return the bytes of a sample in an archive, and refuse one that could not be read back."""
    key = draft.key
    if not key.isalnum():
        if not CONTROL.isdisjoint(key):
            raise SampleSourceError(_odd(draft, "a control character, such as the end of a line"))
        try:
            key.encode()
        except UnicodeEncodeError:
            raise SampleSourceError(_odd(draft, "bytes that are no UTF-8")) from None
    try:
        total = packer.pack({"__key__": key, **dict.fromkeys(draft.parts, b"")}).size
    except UnwritableSampleError as error:
        cure = ", or make new keys" if str(error).startswith("The key") else ""
        raise UnwritableSampleError(f"{draft.origin}: {error}{cure}") from None
    for field, size in zip(draft.parts, found.sizes, strict=True):
        total += size + -size % 512
        if size >= TOO_LARGE:
            total += len(headers.header(f"{key}.{field}", size)) - len(headers.header(f"{key}.{field}", 0))
    return total


def _odd(draft: SampleSpec, what: str) -> str:
    return f"The key {draft.key!r} of {draft.origin!r} has {what}. Give its file another name, or make new keys"


def _repeated_keys(
    source: Source, rekey: str, hashes: np.ndarray[tuple[int], np.dtype[np.int64]], bad: Iterable[int]
) -> Iterator[tuple[int, SampleSourceError]]:
    """Yield the samples whose keys other samples before them have."""
    good = np.ones(len(hashes), bool)
    good[list(bad)] = False
    numbers = np.flatnonzero(good)
    numbers = numbers[np.argsort(hashes[numbers], kind="stable")]
    same = hashes[numbers][1:] == hashes[numbers][:-1]
    suspects = np.unique(np.concatenate([numbers[:-1][same], numbers[1:][same]]))
    first: dict[str, str] = {}
    for number in suspects.tolist():
        key, _, origin = draft_of(source, number, rekey)
        if key in first:
            told = f"The key {key!r} is that of {first[key]} and of {origin}, and samples of one key could not be"
            yield number, SampleSourceError(f"{told} told apart. Give one of them another name, or make new keys")
        else:
            first[key] = origin


def _shard_ends(sizes: Iterable[int], maxcount: int, maxsize: float) -> list[int]:
    """Return the ends of shards.

    >>> _shard_ends([512] * 5, 2, 1e9), _shard_ends([1024, 1024, 9000, 512], 9, 4096), _shard_ends([], 1, 1)
    ([2, 4, 5], [2, 3, 4], [])
    """
    ends: list[int] = []
    samples = total = at = 0
    for at, size in enumerate(sizes, 1):
        if samples and (samples >= maxcount or total + size + len(END) > maxsize):
            ends.append(at - 1)
            samples = total = 0
        samples += 1
        total += size
    return [*ends, at] if samples else ends
