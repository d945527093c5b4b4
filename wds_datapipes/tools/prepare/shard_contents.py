"""Shard contents: the index of the readable part of a shard, and its faults."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from wds_datapipes import errors
from wds_datapipes.errors import MissingDependencyError, ShardError, StaleSidecarError, UnknownSchemeError, WdsError
from wds_datapipes.index.format.builder import index_scan
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.shard_index import IndexedSample, ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.samples.keys import is_meta
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.tools.prepare.read_options import DEFAULT_READING, ReadOptions
from wds_datapipes.types import MemberTuple

#: The number of recorded names of files that belong to no sample.
MAX_STRAY_NAMES = 3


@hides_credentials
class ShardFault(NamedTuple):
    """A fault of a shard.

    Attributes:
        shard: its URL, without credentials.
        kind: the error that reading would raise, such as ``"TruncatedShardError"``.
        key: the sample, or "".
        field: the field, or "".
        message: the full error message.
    """

    shard: str
    kind: str
    key: str
    field: str
    message: str

    @property
    def error(self) -> WdsError:
        """The error that reading would raise."""
        error: WdsError = getattr(errors, self.kind)(self.message)
        return error


@dataclass
class ShardContents:
    """The contents of a shard according to its headers.

    Attributes:
        url: the shard.
        index: the index of the samples. For a truncated shard, it has no size and omits the last sample, which may lack
            a field.
        faults: the faults in the order found.
        strays: the number of files that belong to no sample.
        stray_names: some of their names.
    """

    url: str
    index: ShardIndex
    faults: list[ShardFault] = field(default_factory=list)
    strays: int = 0
    stray_names: list[str] = field(default_factory=list)

    @cached_property
    def samples(self) -> list[IndexedSample]:
        """The samples, in order."""
        return list(self.index)

    @property
    def bytes(self) -> int | None:
        """The size of the file, or ``None`` if it was not read to the end."""
        return self.index.facts.bytes


def read_contents(url: str, options: ReadOptions = DEFAULT_READING, *, digest: bool = False) -> ShardContents:
    """Read the headers of a shard as far as possible and record its faults.

    The data is skipped if the shard supports range requests.

    Args:
        url: the shard, a path or a URL.
        options: how it is read.
        digest: compute the SHA-256 of the file, which requires reading all of it.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "four"}])
        >>> contents = read_contents(url)
        >>> [(sample.key, sample.fields) for sample in contents.samples], contents.faults
        ([('x', {'txt': 3}), ('y', {'txt': 4})], [])
    """
    archive = redact(url)
    faults: list[ShardFault] = []

    def note(error: Exception, key: str, field: str) -> None:
        faults.append(ShardFault(archive, type(error).__name__, key, field, str(error)))

    scan = ShardScan(
        url,
        digest=digest,
        end_marker=options.end_marker,
        storage_options=options.storage_options,
        limits=options.limits,
    )
    strays, stray_names = 0, list[str]()

    def readable() -> Generator[MemberTuple, None, None]:
        nonlocal strays
        try:
            for member in scan:
                name = member[1]
                if options.key_rule(name) is None and not is_meta(name):
                    strays += 1
                    stray_names.extend([name] if strays <= MAX_STRAY_NAMES else [])
                yield member
        except (MissingDependencyError, UnknownSchemeError):
            raise
        except (ShardError, StaleSidecarError) as error:
            note(error, "", "")

    rules = IndexOptions(key_rule=options.key_rule)
    index = index_scan(scan, readable(), options=rules, on_repeated_key="raise", on_fault=note)
    return ShardContents(url, index, faults, strays, stray_names)
