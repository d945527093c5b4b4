"""Runs of random loaders, with each rank in a separate process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from drawn_loaders import LIMIT_S, Loader, Run, opened, packed

from wds_datapipes.errors import RankLostError, StateError

FORK = multiprocessing.get_context("fork")
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
    """The message of a `StateError`, in place of a state."""

    message: str


def run_on_ranks(run: Run, folder: Path) -> list[Answer]:
    """Return the result of a run on each rank.

    Raises:
        RuntimeError: a rank has raised an error, left a process behind, or not ended.
    """
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    started = []
    for rank in range(run.topology.ranks):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=be_rank, args=(theirs, rank, run, folder, meeting))
        process.start()
        theirs.close()
        started.append((process, ours))
    deadline = time.monotonic() + LIMIT_S
    answers, errors = [], []
    for rank, (process, ours) in enumerate(started):
        answer: Any = f"did not end within {LIMIT_S} s"
        with suppress(EOFError):
            answer = ours.recv() if ours.poll(max(deadline - time.monotonic(), 0)) else answer
        if isinstance(answer, str):
            errors.append(f"rank {rank}: {answer}")
            deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it
        else:
            answers.append(answer)
        process.join(max(deadline - time.monotonic(), 0))
        if left := left_in_group(process.pid or 0):
            errors.append(f"rank {rank} has left {left}")
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        ours.close()
    if errors:
        raise RuntimeError("\n".join(errors))
    return answers


def left_in_group(group: int) -> list[str]:
    """Return the processes of a group that keep running for a minute."""
    deadline = time.monotonic() + 60
    while True:
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"process {process.pid}")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def be_rank(answers: Any, rank: int, run: Run, folder: Path, meeting: Path) -> None:
    """Be one rank of a run, in a separate process."""
    os.setpgid(0, 0)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    logging.disable()
    try:
        if run.topology.ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=run.topology.ranks,
                timeout=timedelta(seconds=LIMIT_S),
            )
        answers.send(answer_of(run, None if run.files is None else run.files[rank]))
        if run.topology.ranks > 1:
            dist.barrier()
    except BaseException:
        answers.send(traceback.format_exc())
    finally:
        answers.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def answer_of(run: Run, file: bytes | None) -> Answer:
    answer = Answer()
    try:
        with opened(run, file) as loader:
            for epoch in range(run.epochs):
                note_epoch(answer, run, epoch, loader)
    except (StateError, RankLostError) as error:  # the latter if another rank was refused first, and says so
        if answer.epochs or (isinstance(error, RankLostError) and "StateError" not in str(error)):
            raise
        answer.refusal = str(error)
    return answer


def note_epoch(answer: Answer, run: Run, epoch: int, loader: Loader) -> None:
    items: list[Any] = []
    iterator: Iterator[Any] | None = None
    has_ended = False
    end = (epoch, (0 if run.broken is None or epoch else run.broken) or sys.maxsize)
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
