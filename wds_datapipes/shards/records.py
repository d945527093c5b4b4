"""Options for reading record shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.records.formats import FORMATS, FormatName, find_format
from wds_datapipes.records.reader import KEY, read_records
from wds_datapipes.shards.loading import StreamOptions
from wds_datapipes.types import MemberTuple, Shard


@dataclass(frozen=True)
class RecordOptions(StreamOptions):
    """How record shards are read; `RecordLoader` describes each option.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an invalid value.
    """

    stage: ClassVar[str] = "load_wds_records"
    counts_shards: ClassVar[bool] = False

    format: FormatName | None = None
    key: str = KEY
    fields: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"format must be None or one of {', '.join(map(repr, FORMATS))}, not {self.format!r}")
        if not isinstance(self.key, str):
            raise TypeError(f"key must be the name of a field, not {self.key!r}")
        if self.fields is not None:
            if not all(isinstance(name, str) for name in self.fields):
                raise TypeError(f"fields must be names of fields, not {self.fields!r}")
            if len({*self.fields}) < len(self.fields):
                raise ValueError(f"fields must be different names, not {self.fields!r}")

    def items(self, stream: BinaryIO, shard: Shard, start: int, policy: ErrorPolicy) -> Iterator[MemberTuple]:
        """Yield the records of a shard: the shard, their keys, their fields as dictionaries and their offsets."""
        return read_records(
            stream,
            shard=shard,
            record_format=find_format(shard.url, self.format),
            key=self.key,
            fields=self.fields,
            start=start,
            limits=self.limits,
            policy=policy,
        )
