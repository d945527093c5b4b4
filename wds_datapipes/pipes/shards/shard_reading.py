"""The base class of stages that read shards."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.roles import Source
from wds_datapipes.pipes.sharding import unsplit
from wds_datapipes.pipes.shards.shuffle import with_whole_lists
from wds_datapipes.pipes.split_advice import warn_of_copies
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.shards.loading import ShardReader, StreamOptions
from wds_datapipes.shards.position import ALL_SHARDS, Resume

T_co = TypeVar("T_co", covariant=True)


class ShardReadingStage(Source, EngineStage[T_co]):
    """Base class of stages that open shards, whose options determine the format."""

    shard_access = "read"
    argument_uses: ClassVar = {"options": "ignored"}

    source: Any
    open_shards: int
    on_error: OnError

    def _store(self, source: IterDataPipe[str], options: StreamOptions) -> None:
        """Store the arguments; options that determine the items become public, for the fingerprint of the pipeline."""
        self.source = with_whole_lists(source)
        # Not public as a whole: torch prints public attributes in messages, and the options may contain credentials.
        self._options = options
        hidden = {each.name for each in fields(StreamOptions)} - {"open_shards", "on_error"}
        for each in fields(options):
            if each.name not in hidden:
                setattr(self, each.name, getattr(options, each.name))

    def open_reader(self, resume: Resume = ALL_SHARDS) -> ShardReader:
        """Return the shards with their members or records as plain tuples, without torch's hook around each item.

        Args:
            resume: the part of the shards that is still to be read.
        """
        warn_of_copies(self.source)
        open_shards = self._options.open_shards
        for stage in graph_of(self.source).stages if open_shards > 1 else ():
            if declared(stage).shard_access == "claimed":
                raise RuntimeError(
                    f"{self._options.stage}(open_shards={open_shards}) requests shards before it has read earlier "
                    f"ones, but {name_of(stage)} counts a shard as read when the next one is requested, and may delete "
                    "it. Use open_shards=1"
                )
        source = self.source if resume.share is None else unsplit(self.source)  # the list that the state refers to
        return ShardReader(source, replace(self._options, on_error=self.counted_errors), resume)
