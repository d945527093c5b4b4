"""The list of shards before the split, which must be the same in every worker and when training resumes."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import ChangedShardError, plural
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.inspection import splits
from wds_datapipes.pipes.roles import Loader
from wds_datapipes.pipes.stage import EngineStage, iterated_by_loader
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.redaction import redact
from wds_datapipes.redaction.signatures import without_signature
from wds_datapipes.redaction.urls import mask_credentials, may_hold_credentials
from wds_datapipes.seeds import derived_seed

Seen = list[Any]
"""The digest of the part of a list that was read: the number of items, their digest, and the text of the last item."""

#: The maximum length of an item's text in a message.
MAX_TEXT = 200
#: The maximum number of items to add to the digest at once.
MAX_UNSEEN = 4096


@iterated_by_loader
class ShardOrder(Loader, EngineStage[Any]):
    """Yields the items of a list, such as the URLs of shards, while computing their digest.

    Loaders insert it before the stage that splits the list. The digest is part of the state, so a changed list is
    detected on resume, and workers with different lists are detected at the end of a pass.

    If the list may depend on the global generators, for example through a user's ``random.shuffle``, their state is
    derived from the seed of the epoch while the list is read. The list is then the same in every worker, on every rank,
    and when training resumes.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields the list.
        is_split: whether a later stage splits the list, which must then be the same in every worker.
        may_draw: whether the list may depend on the global generators.

    Attributes:
        whole: the digest of the first pass of the epoch once it has ended; None before.
        seeds: the seeds of the passes, if the list may depend on them. This stage has no ``set_seed``, because loaders
            draw a seed for each stage that has one, which would change the orders of all other stages.

    Raises:
        ChangedShardError: the list differs from that of the loaded state.
    """

    is_transparent = True
    is_stateless = True
    #: The number of changes to ``seen`` in all instances, in a list because setting a class attribute takes longer.
    changes: ClassVar[list[int]] = [0]

    def __init__(self, source: IterDataPipe[Any], *, is_split: bool = True, may_draw: bool = False) -> None:
        self.source = source
        self.is_split = is_split
        self.seeds = SeededStage() if may_draw else None
        self.whole: Seen | None = None
        self._seen: Seen = [0, "", ""]
        self._unseen: list[str] = []
        self._drawn: UrlList | None = None
        self._expected: Seen | None = None

    def expect(self, seen: Seen) -> None:
        """Require the next pass to start with the same items as an earlier one."""
        self._expected = seen

    def __iter__(self) -> Iterator[Any]:
        yield from self.read_share(1, 0)

    def read_share(self, count: int, first: int) -> Iterator[Any]:
        """Yield every ``count``-th item, starting with number ``first``; in a long list, the others are not read."""
        expected, self._expected = self._expected or [0, "", ""], None
        self._seen, self._unseen, self._number_of_samples_yielded = [0, "", ""], [], 0
        ShardOrder.changes[0] += 1
        self._drawn = None if self.seeds is not None else declared(self.source).draw_list()
        if self._drawn is None:
            yield from islice(self._read(expected), first, None, count)
        else:
            yield from self._choose(self._drawn, expected, count, first)
        self.whole = self.whole or self.seen

    def _choose(self, drawn: UrlList, expected: Seen, count: int, first: int) -> Iterator[str]:
        """Yield the share of a list whose order is known."""
        self._number_of_samples_yielded = min(expected[0], len(drawn.order))
        if self.seen != expected:  # earlier releases saved the digest of the URLs
            _check([drawn.urls[number] for number in drawn.order[: expected[0]].tolist()], expected)
        self._seen = [0, "", ""]
        for place in range(first, len(drawn.order), count):
            self._number_of_samples_yielded = place + 1
            ShardOrder.changes[0] += 1
            yield drawn.urls[drawn.order[place]]
        self._number_of_samples_yielded = len(drawn.order)
        ShardOrder.changes[0] += 1

    def _read(self, expected: Seen) -> Iterator[Any]:
        """Yield all items."""
        unseen, changes = self._unseen, ShardOrder.changes
        items = iter(self.source) if self.seeds is None else _draw_alike(self.source, self.seeds.take_seed())
        begun = list(islice(items, expected[0]))
        _check(begun, expected)
        for item in chain(begun, items):
            unseen.append(item if type(item) is str else _text(item, mask_credentials))  # a sample may be large
            if len(unseen) == MAX_UNSEEN:
                self._seen = self.seen
            changes[0] += 1
            self._number_of_samples_yielded += 1
            yield item

    def __len__(self) -> int:
        return len(self.source)

    @property
    def seen(self) -> Seen:
        """The digest of the current pass; the same object until the next item."""
        if self._drawn is not None and self._number_of_samples_yielded > self._seen[0]:
            self._seen = self._drawn.seen(self._number_of_samples_yielded, self._seen)
        elif self._unseen:
            self._seen = _with(self._seen, self._unseen)
            self._unseen.clear()
        return self._seen


class UrlList:
    """URLs of shards, hidden from torch, which would search a list in an attribute for datapipes in each epoch.

    Args:
        urls: the URLs.

    Attributes:
        order: the numbers of the URLs in the order in which a pass yields them.
    """

    order: npt.NDArray[np.int32]  # half the memory and, when shuffled, two thirds of the time of int64

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def in_order(self, order: npt.NDArray[np.int32]) -> UrlList:
        """Return a copy of the list with an order."""
        self.digest  # noqa: B018  cached once for all orders
        found = copy.copy(self)
        found.order = order
        return found

    def seen(self, count: int, before: Seen) -> Seen:
        """Return the digest of the list and the first ``count`` numbers in the order, given that of fewer numbers."""
        begun = int(before[1], 16) if before[1] else crc32(self.digest.encode())
        crc = crc32(self.order[before[0] : count].astype("<i8").data, begun)
        return [count, f"{crc:08x}", _text(self.urls[self.order[count - 1]], _shown)[-MAX_TEXT:]]

    @cached_property
    def digest(self) -> str:
        """The digest of all URLs; for a million URLs, it takes less than a tenth of a second."""
        return fingerprint(self.urls)

    def fingerprint(self) -> str:
        """Return the number of shards, the first and last URL, and a digest of all URLs."""
        text = f"{len(self.urls)} shards"
        if self.urls:
            text += f" from {_shown(self.urls[0])} to {_shown(self.urls[-1])}"
        return f"{text} #{self.digest[:12]}"


def _draw_alike(source: IterDataPipe[Any], seed: int) -> Iterator[Any]:
    """Yield the items of a list while the states of the global generators are derived from a seed."""
    own = [derived_seed("global generators", seed, number) for number in range(3)]
    torchs = torch.Generator().manual_seed(own[2] >> 1)
    numpys = np.random.RandomState(own[1] >> 32)
    states = random.Random(own[0]).getstate(), numpys.get_state(), torchs.get_state()
    items: Iterator[Any] | None = None
    end = object()
    while True:
        others = _states()
        _set_states(states)
        try:
            items = iter(source) if items is None else items
            item = next(items, end)
        finally:
            states = _states()
            _set_states(others)
        if item is end:
            return
        yield item


def guard_listings(pipe: Any, seed: int, *, drawn_only: bool = False) -> PipelineGraph:
    """Insert a `ShardOrder` before each stage that splits the data, or reads an unsplit list of shards.

    The graph of the pipeline is then another one, which is returned.

    Args:
        pipe: the last stage.
        seed: the seed of the epoch, which all workers and ranks share, so that their listings draw the same numbers.
        drawn_only: insert it only if a stage may draw from the global generators; for loaders without a state.
    """
    graph = graph_of(pipe)
    for stage in graph.stages:
        is_split = splits(stage)
        if is_split or declared(stage).shard_access == "read":
            for name, source in [*vars(stage).items()]:
                if not isinstance(source, IterDataPipe) or isinstance(source, ShardOrder):
                    continue
                before = graph.at(source).stages
                if any(map(splits, before)):
                    continue
                # A process that distributes the items to the workers leaves nothing to split.
                is_split = is_split and not any(declared(each).process_boundary == "remote" for each in before)
                may_draw = any(declared(each).draws_globally for each in before)
                if may_draw or not drawn_only:
                    setattr(stage, name, ShardOrder(source, is_split=is_split, may_draw=may_draw))
    graph = PipelineGraph(graph.pipe)
    for number, listing in enumerate(listings_before(graph)):
        listing.whole = None
        if listing.seeds is not None:
            listing.seeds.set_seed(derived_seed("listing", seed, number))
    return graph


def remove_listings(pipe: Any) -> PipelineGraph:
    """Remove the stages that `guard_listings` has inserted, so that users' functions find their own stages.

    The graph of the pipeline is then another one, which is returned.
    """
    graph, has_changed = graph_of(pipe), False
    for stage in graph.stages:
        for name, source in [*vars(stage).items()]:
            if isinstance(source, ShardOrder):
                setattr(stage, name, source.source)
                has_changed = True
    return PipelineGraph(graph.pipe) if has_changed else graph


def listings_before(pipe: Any) -> list[ShardOrder]:
    """Return the listings in a pipeline, given its last stage."""
    return [stage for stage in graph_of(pipe).stages if isinstance(stage, ShardOrder)]


def merge_seen(parts: Sequence[Sequence[Seen]]) -> list[Seen]:
    """Return the digest of each list from the instance that has read the most of it."""
    return [max(seen, key=lambda each: int(each[0])) for seen in zip(*(part for part in parts if part), strict=False)]


def _check(begun: list[Any], expected: Seen) -> None:
    """Check that a list begins as before.

    Raises:
        ChangedShardError: it begins differently.
    """
    found: Seen = [0, "", ""]
    if begun:
        found = _with(found, [_text(item, mask_credentials) for item in begun])
    if found != expected:
        raise ChangedShardError(
            f"The list of shards has changed since the state was saved. It began with {plural(expected[0], 'item')}, "
            f"up to {expected[2]}, but now begins with {found[0]:,}, up to {found[2]}. The state records positions in "
            "this list, so samples would be repeated or skipped. Resume with the same list, in the same order"
        )


def _with(seen: Seen, texts: Sequence[str]) -> Seen:
    """Extend a digest by the texts of more items; the result does not depend on how they are grouped into calls."""
    count, digest, _ = seen
    joined = "\0".join(texts)
    if may_hold_credentials(joined):
        joined = "\0".join([_text(text, mask_credentials) for text in texts])
    crc = crc32(f"{joined}\0".encode("utf-8", "surrogatepass"), int(digest or "0", 16))
    return [count + len(texts), f"{crc:08x}", _text(texts[-1], _shown)[-MAX_TEXT:]]


def _shown(url: str) -> str:
    """Return a URL as a state shows it: equal after it was signed again."""
    return redact(without_signature(url))


def _text(item: Any, hide: Callable[[str], str]) -> str:
    """Return the text of an item of a list, with credentials hidden."""
    if isinstance(item, os.PathLike):
        item = os.fspath(item)
    if isinstance(item, str):
        return hide(item) if may_hold_credentials(item) else item
    if isinstance(item, dict):
        named = [str(item[name]) for name in ("__url__", "__key__") if name in item]
        return _text(" ".join(named), hide) if named else f"{len(item)} fields"
    if isinstance(item, tuple | list) and item:
        return f"{len(item)} from {_text(item[0], hide)}"  # the rest may differ between workers
    return repr(item) if isinstance(item, int | float | complex | None) else type(item).__name__


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
