"""The outline of a shard: what its samples are called and how large their fields are, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wds_datapipes.errors import MissingDependencyError, ShardError, StaleSidecarError, UnknownSchemeError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.scanner import scan_shard

__all__ = ["ListedSample", "ShardContents", "ShardFault", "outline_shard"]

#: How many names of files that belong to no sample are kept.
STRAYS_KEPT = 3


class ShardFault(NamedTuple):
    """Something that is wrong with a shard.

    Attributes:
        shard: its URL, without credentials.
        kind: the error that reading would raise, such as ``"TruncatedShardError"``.
        key: the sample, or "".
        field: the field, or "".
        message: what is wrong, with all facts.
    """

    shard: str
    kind: str
    key: str
    field: str
    message: str


class ListedSample(NamedTuple):
    """A sample without its data.

    Attributes:
        key: of the sample.
        offset: where its first header begins, in the uncompressed archive.
        fields: each field in lower case, and the size of its data in bytes.
    """

    key: str
    offset: int
    fields: dict[str, int]

    @property
    def bytes(self) -> int:
        """The size of all fields together."""
        return sum(self.fields.values())


@dataclass
class ShardContents:
    """What the headers of a shard tell.

    Attributes:
        url: the shard.
        samples: its samples, in their order. Of a shard that breaks off, those before the last one, which may lack
            a field, as in reading.
        faults: what is wrong, in the order in which it was found.
        bytes: the size of the file, or ``None`` if it was not read to its end.
        sha256: its digest, if that was asked for.
        compression: how it is compressed, if it is.
        strays: how many files belong to no sample.
        stray_names: some of their names.
    """

    url: str
    samples: list[ListedSample] = field(default_factory=list)
    faults: list[ShardFault] = field(default_factory=list)
    bytes: int | None = None
    sha256: str | None = None
    compression: str | None = None
    strays: int = 0
    stray_names: list[str] = field(default_factory=list)


def outline_shard(
    url: str,
    *,
    key_rule: KeyRule = first_dot,
    end_marker: EndMarker = "required",
    digest: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> ShardContents:
    """Read the headers of a shard, as far as they can be read, and note what is wrong.

    Data are passed over where the shard can be read by ranges, so that it takes little time.

    Args:
        url: the shard, a path or a URL.
        key_rule: splits the members' names.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        digest: form the SHA-256 of the file, for which all of it is read.
        storage_options: passed to a remote file system.
        limits: what the shard may ask for.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind cannot be read at all.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "four"}])
        >>> outline = outline_shard(url)
        >>> [(sample.key, sample.fields) for sample in outline.samples], outline.faults
        ([('x', {'txt': 3}), ('y', {'txt': 4})], [])
    """
    outline = ShardContents(url)
    gatherer = _Gatherer(outline, key_rule)
    try:
        scan = scan_shard(
            url,
            gatherer.add,
            digest=digest,
            end_marker=end_marker,
            storage_options=storage_options,
            limits=limits,
        )
    except (MissingDependencyError, UnknownSchemeError):
        raise
    except (ShardError, StaleSidecarError) as error:
        gatherer.fault(type(error).__name__, "", "", str(error))
        return outline
    gatherer.flush()
    outline.bytes, outline.sha256, outline.compression = scan.bytes, scan.sha256, scan.compression
    return outline


class _Gatherer:
    """Gathers members into samples, by the rules of `group_samples`, and goes on where that raises."""

    def __init__(self, outline: ShardContents, key_rule: KeyRule) -> None:
        self._outline, self._key_rule = outline, key_rule
        self._archive = redact(outline.url)
        self._key: str | None = None
        self._start = 0
        self._fields: dict[str, int] = {}
        self._seen: set[str] = set()

    def add(self, name: str, start: int, _offset: int, size: int) -> None:
        """Take the next file of the shard."""
        parts = None if name[:2] == "__" and is_meta(name) else self._key_rule(name)
        if parts is None:
            if not is_meta(name):
                self._outline.strays += 1
                if len(self._outline.stray_names) < STRAYS_KEPT:
                    self._outline.stray_names.append(name)
            return
        key, field = parts[0], parts[1].lower()
        if key != self._key:
            self._begin(key, start)
        if field in self._fields:
            self.fault(
                "DuplicateFieldError",
                key,
                field,
                f"{self._archive} holds the field {field!r} of the sample {key!r} twice, the second time at byte "
                f"{start} (member {name!r})",
            )
        else:
            self._fields[field] = size

    def flush(self) -> None:
        """End the sample that is being gathered."""
        if self._key is not None and self._fields:
            self._outline.samples.append(ListedSample(self._key, self._start, self._fields))

    def fault(self, kind: str, key: str, field: str, message: str) -> None:
        """Note what is wrong."""
        self._outline.faults.append(ShardFault(self._archive, kind, key, field, message))

    def _begin(self, key: str, start: int) -> None:
        self.flush()
        self._key, self._start, self._fields = key, start, {}
        if key in self._seen:
            self.fault(
                "RepeatedKeyError",
                key,
                "",
                f"{self._archive} holds the sample {key!r} in parts: a file of it stands at byte {start}, after files "
                f"of other samples",
            )
        self._seen.add(key)
