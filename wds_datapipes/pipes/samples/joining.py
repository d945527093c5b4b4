"""Stages that add fields from a table, or from parallel shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from wds_datapipes.arguments import check_choice, check_fields
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import functional_name_of, upstream
from wds_datapipes.pipes.stage import FunctionStage, register_stage
from wds_datapipes.samples.fields import Lacking
from wds_datapipes.samples.joining import Entry, add_columns, associate, parse_url_of
from wds_datapipes.samples.keys import KeyRule, check_key_rule, first_dot
from wds_datapipes.types import Sample


@register_stage("associate")
class Associator(FunctionStage[Sample]):
    """Add fields from a table, looked up by a sample's key or shard (functional name: ``associate``).

    Added fields replace fields of the same name, except ``__key__``, ``__url__``, ``__local_path__`` and
    ``__padding__``.

    Yields:
        dict: a new one, with the fields of the sample and those of the table.

    Args:
        source: yields samples.
        table: a mapping from ``__key__`` to a dict of fields; or a function of the key that returns such a dict, or
            None. Each worker process has a copy of the table; for a large one, use a function that queries a file or a
            database.
        by: the field to look up instead of ``__key__``, such as ``"__url__"`` for metadata of whole shards.
        missing: what to do with a sample without an entry: ``"raise"``; ``"keep"`` it unchanged; or ``"skip"`` it,
            which is neither an error nor reported.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        MissingFieldError: a sample has no entry in the table.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "png": b"..."}])
        >>> list(samples.associate({"a": {"label": 3}}))
        [{'__key__': 'a', 'png': b'...', 'label': 3}]
    """

    draws_globally = True
    function = staticmethod(associate)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        table: Mapping[Any, Mapping[str, Any]] | Callable[[Any], Entry],
        *,
        by: str = "__key__",
        missing: Lacking = "raise",
        on_error: OnError = "raise",
    ) -> None:
        check_choice("missing", missing, Lacking)
        if not isinstance(table, Mapping) and not callable(table):
            raise TypeError(f"associate takes a mapping from keys to fields, or a function of a key, not {table!r}")
        super().__init__(source, table=table, by=by, missing=missing, on_error=on_error)


@register_stage("add_columns")
class ColumnAdder(FunctionStage[Sample]):
    """Add the fields of the same samples in parallel shards (functional name: ``add_columns``).

    For example, ``images-000.tar`` contains images, and ``captions-000.tar`` captions with the same keys in the same
    order; the pipeline reads the images, and this stage adds the captions. Put it directly after ``group_samples``,
    before stages that skip, shuffle or mix samples; shards may be shuffled and split before. A sample without all of
    its columns is not yielded.

    Samples are matched by their keys, so skipped errors never misalign the shards. Each sample that is missing or
    unreadable in a parallel shard is skipped and counted. Up to 63 consecutive samples that exist only in a parallel
    shard, for example as an earlier stage has skipped them, are skipped and counted once; so is the rest of a parallel
    shard after the end of the first one. A pipeline with this stage resumes by replay.

    Yields:
        dict: a new one, with the fields of the sample and those of the parallel shards.

    Args:
        source: yields samples with ``__url__``, as ``group_samples`` does.
        url_of: determines the URL of the parallel shard: a replacement, such as ``("images", "captions")``, or a
            function of the URL. For several parallel shards, use the stage repeatedly.
        fields: the fields to add, which must exist; all by default.
        key_rule: splits the names in the parallel shards, as in ``group_samples``; a function may also translate keys
            that are written differently.
        on_error: ``"raise"``; or, to skip the samples that lack columns, ``"warn"``, ``"skip"``, an `ErrorBudget`
            or a handler.
        storage_options: options for fsspec to open the parallel shards.

    Raises:
        RuntimeError: ``load_wds_shards`` keeps several shards open.
        MisalignedShardsError: the shards do not contain the same keys in the same order.
        DuplicateKeyError: two of the shards have the same field.
        MissingFieldError: a sample lacks one of ``fields``.
        ShardError: a parallel shard cannot be read.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> images = build_shard("images-0.tar", [{"__key__": "a", "jpg": b"..."}])
        >>> captions = build_shard("captions-0.tar", [{"__key__": "a", "txt": b"A cat."}])
        >>> samples = ShardList("images-0.tar").load_wds_shards().group_samples()
        >>> [(sample["jpg"], sample["txt"]) for sample in samples.add_columns(("images", "captions"))]
        [(b'...', b'A cat.')]
    """

    is_stateless = False
    ignored_arguments = frozenset({"storage_options"})
    function = staticmethod(add_columns)

    def __init__(
        self,
        source: IterDataPipe[Sample],
        url_of: Callable[[str], str] | tuple[str, str],
        *,
        fields: Collection[str] | None = None,
        key_rule: KeyRule = first_dot,
        on_error: OnError = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_fields(fields)
        check_key_rule(key_rule)
        super().__init__(
            source,
            rule=parse_url_of(url_of),
            fields=fields,
            key_rule=key_rule,
            on_error=on_error,
            storage_options=storage_options,
        )

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function in the iteration that begins.

        Raises:
            RuntimeError: ``load_wds_shards`` keeps several shards open.
        """
        for stage in upstream(self.source):
            if (open_shards := declared(stage).open_shards) > 1:
                raise RuntimeError(
                    "add_columns reads the parallel shards one after the other, but the samples of "
                    f"{functional_name_of(stage)}(open_shards={open_shards}) alternate between shards. Use "
                    "open_shards=1, and a larger shuffle_samples() after add_columns"
                )
        return super().function_options()
