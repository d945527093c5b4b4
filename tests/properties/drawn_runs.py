"""Runs of random loaders, with each rank in a separate process."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from drawn_loaders import Loader, Run, opened, packed
from forked_ranks import on_ranks

from wds_datapipes.errors import RankLostError, StateError

END = object()


@dataclass
class Answer:
    """The result of a rank.

    Attributes:
        epochs: the items of each epoch.
        states: the states saved at the cuts, or why there is none.
        ended: the cuts at which the loop had reached the end of the epoch.
        refusal: why the pipeline or its state was refused.
    """

    epochs: list[list[Any]] = field(default_factory=list)
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    refusal: str = ""


class Refused(NamedTuple):
    """The message of a `StateError` instead of a state."""

    message: str


def run_on_ranks(run: Run, folder: Path) -> list[Answer]:
    """Return the result of a run on each rank.

    Raises:
        RuntimeError: a rank raised an error, left a process behind, or did not end.
    """

    def answer(rank: int) -> Answer:
        os.chdir(folder)
        warnings.simplefilter("ignore")
        logging.disable()
        answer = answer_of(run, None if run.files is None else run.files[rank])
        if run.topology.ranks > 1:
            dist.barrier()  # no rank ends while another one may need it
        return answer

    return on_ranks(run.topology.ranks, answer)


def answer_of(run: Run, file: bytes | None) -> Answer:
    answer = Answer()
    try:
        with opened(run, file) as loader:
            for epoch in range(run.epochs):
                note_epoch(answer, run, epoch, loader)
    except (StateError, RankLostError) as error:  # the latter if another rank was refused first
        if answer.epochs or (isinstance(error, RankLostError) and "StateError" not in str(error)):
            raise
        answer.refusal = str(error)
    return answer


def note_epoch(answer: Answer, run: Run, epoch: int, loader: Loader) -> None:
    items: list[Any] = []
    iterator: Iterator[Any] | None = None
    has_ended = False
    end = (epoch, run.broken[epoch] if epoch < len(run.broken) else sys.maxsize)
    for cut in [*(cut for cut in run.cuts if cut[0] == epoch), end]:
        while not has_ended and len(items) < cut[1]:
            iterator = loader.epoch() if iterator is None else iterator
            if (item := next(iterator, END)) is END:
                has_ended = True
            else:
                items.append(plain(item))
        if cut is not end:
            answer.states[cut] = saved(loader, run)
            if has_ended:
                answer.ended.add(cut)
    answer.epochs.append(items)


def plain(item: Any) -> Any:
    """Return an item without its origin, which a listing may write differently."""
    if isinstance(item, dict):
        return {name: value for name, value in item.items() if name not in ("__url__", "__local_path__")}
    return [plain(each) for each in item] if isinstance(item, list) else item


def saved(loader: Loader, run: Run) -> Any:
    try:
        return packed(loader.save(), run.format)
    except StateError as error:
        return Refused(str(error))
