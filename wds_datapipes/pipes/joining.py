"""Fields from elsewhere: from a table, by key, and from shards that stand beside those being read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.stage import OpaqueValue, Stage, register_stage
from wds_datapipes.pipes.state.graph import position_reader_of
from wds_datapipes.samples.joined_position import JoinedPosition, source_of
from wds_datapipes.samples.joining import Entry, add_columns, associate, parse_url_of
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.samples.select import Lacking
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["Associator", "ColumnAdder"]


@register_stage("associate")
class Associator(Stage[Sample]):
    """Add the fields that a table or a function has for a sample's key or shard (functional name: ``associate``).

    What is found takes the place of fields of the same name; ``__key__``, ``__url__`` and ``__local_path__`` stay.

    Yields:
        dict: a new one, with the fields of the sample and those that were found.

    Args:
        source: yields samples.
        table: a mapping from ``__key__`` to a dict of fields; or a function of the key that returns one, or None if
            there is none. Each worker process has a copy of a table; for a large one, a function that looks into a
            file or a database is better.
        by: the field to look up instead of ``__key__``, such as ``"__url__"`` for facts about whole shards.
        missing: what to do with a sample for which nothing is found: ``"raise"``; hand it on as it is (``"keep"``); or
            leave it out, which is no error and is not reported (``"skip"``).
        on_error: ``"raise"``; or, to pass over the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingEntryError: nothing is found for a sample.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "png": b"..."}])
        >>> list(samples.associate({"a": {"label": 3}}))
        [{'__key__': 'a', 'png': b'...', 'label': 3}]
    """

    is_stateless = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        table: Mapping[Any, Mapping[str, Any]] | Callable[[Any], Entry],
        *,
        by: str = "__key__",
        missing: Lacking = "raise",
        on_error: OnError = "raise",
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        if missing not in ("raise", "keep", "skip"):
            raise ValueError(f'missing is "raise", "keep" or "skip", not {missing!r}')
        if not isinstance(table, Mapping) and not callable(table):
            raise TypeError(f"associate takes a mapping from keys to fields, or a function of a key, not {table!r}")
        self.source = source
        self.by = by
        self.missing = missing
        self.on_error = on_error
        self._table = OpaqueValue(table)

    def __iter__(self) -> Iterator[Sample]:
        table = self._table.value
        find: Callable[[Any], Entry] = table.get if isinstance(table, Mapping) else table
        yield from associate(self.source, find, by=self.by, missing=self.missing, on_error=self.on_error)


@register_stage("add_columns")
class ColumnAdder(Stage[Sample]):
    """Add the fields that samples have in parallel shards (functional name: ``add_columns``).

    Where the images are in ``images-000.tar`` and the captions, under the same keys and in the same order, in
    ``captions-000.tar``, the first are read as ever, and this stage walks through the others in step. It stands
    directly after ``group_samples``, before anything that leaves out, shuffles or mixes samples; shards may be shuffled
    and split before. A sample gets all of its columns or is not handed on.

    A policy that passes over errors never shifts one shard against the other, as samples are told by their keys. Where
    a sample is missing in the parallel shard, or a part of it cannot be read, the samples concerned are passed over
    and counted, each. Where it has up to 63 samples that the first has not, such as ones that an earlier stage has
    passed over, these are given up, and counted once. What is left in it when the first ends is counted once too.

    Yields:
        dict: a new one, with the fields of the sample and those of the parallel shards.

    Args:
        source: yields samples with ``__url__``, as ``group_samples`` does.
        url_of: makes the URL of the parallel shard: what to replace and by what, as in ``("images", "captions")``, or a
            function of the URL; or a list of such, for several.
        fields: the fields to add, which have to be there; all by default.
        key_rule: splits the names in the parallel shards, as in ``group_samples``.
        rename_files: gets a file's name in a parallel shard and returns the one to use, where the keys are written
            differently.
        on_error: ``"raise"``; or, to pass over the samples that lack columns, ``"warn"``, ``"skip"``, an `ErrorBudget`
            or a handler.
        storage_options: what fsspec needs to open the parallel shards.

    Raises:
        MisalignedShardsError: the shards do not hold the same keys in the same order.
        DuplicateFieldError: a field is in two of the shards.
        MissingFieldError: one of ``fields`` is not there.
        ShardError: a parallel shard cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> images = build_shard("images-0.tar", [{"__key__": "a", "jpg": b"..."}])
        >>> captions = build_shard("captions-0.tar", [{"__key__": "a", "txt": b"A cat."}])
        >>> samples = ShardList("images-0.tar").load_wds_shards().group_samples()
        >>> [(sample["jpg"], sample["txt"]) for sample in samples.add_columns(("images", "captions"))]
        [(b'...', b'A cat.')]
    """

    rereads_samples = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        url_of: Callable[[str], str] | tuple[str, str] | list[Callable[[str], str] | tuple[str, str]],
        *,
        fields: Collection[str] | None = None,
        key_rule: KeyRule = first_dot,
        rename_files: Callable[[str], str] | None = None,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        if isinstance(fields, str):
            raise TypeError(f'fields is a collection of names, as in ["txt", "cls"], not the string {fields!r}')
        if not callable(key_rule):
            raise TypeError(f"key_rule is first_dot, last_dot or another function of a name, not {key_rule!r}")
        if rename_files is not None and not callable(rename_files):
            raise TypeError(f"rename_files is a function that gets a file's name, not {rename_files!r}")
        self.source = source
        self.fields = fields
        self.key_rule = key_rule
        self.rename_files = rename_files
        self.on_error = on_error
        self._url_of = OpaqueValue(parse_url_of(url_of))
        # Not under its own name, which torch would print with its value in the text of every error.
        self._storage_options = storage_options
        self._beside = JoinedPosition()
        self._loaded: tuple[Mapping[str, Any], list[SamplePosition]] | None = None

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the sample that was yielded last, in all of its shards."""
        return None if position_reader_of(self.source) is None else lambda: self._beside.address()

    def state_dict(self) -> dict[str, Any]:
        """Return where the sample is that was yielded last, in its own shard and in those beside."""
        return self._beside.state_dict() if self._loaded is None else {"waiting": [], "columns": [], **self._loaded[0]}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns."""
        return recorder.keep_values(self, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only samples that come again are left.
            again: samples that wait in later stages, and are yielded first.
        """
        self._loaded = state, [*again]

    def reset_state(self) -> None:
        """Begin anew when it is iterated next."""
        self._loaded = None

    def positions_before(self, again: Iterable[SamplePosition]) -> list[SamplePosition]:
        """Return the positions that samples have before this stage, of those that they have after it."""
        return [source_of(address) for address in again]

    def __iter__(self) -> Iterator[Sample]:
        (state, again), self._loaded = self._loaded or ({}, []), None
        self._beside = JoinedPosition(state, again)
        yield from add_columns(
            self.source,
            self._url_of.value,
            key_rule=self.key_rule,
            fields=self.fields,
            rename_files=self.rename_files,
            storage_options=self._storage_options,
            on_error=self.on_error,
            state=self._beside,
            address=position_reader_of(self.source),
        )
