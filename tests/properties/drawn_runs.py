"""Runs of drawn loaders, each of their ranks a process of its own, with states that pass through files."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from built_pipelines import build
from drawn_pipelines import Topology
from pipeline_model import Steps
from torch.utils.data import DataLoader

from wds_datapipes import ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService  # isort: skip
from torchdata.stateful_dataloader import StatefulDataLoader  # isort: skip

__all__ = ["Answer", "Run", "packed", "run_on_ranks", "unpacked"]

#: How long a run may take, in seconds.
LIMIT_S = 90
FORK = multiprocessing.get_context("fork")
END = object()


@dataclass
class Run:
    """What each rank does: so many epochs with a loader, which saves its state at the cuts."""

    steps: Steps
    loader: str
    topology: Topology
    batch: tuple[int, bool] | None
    seed: int
    epochs: int
    cuts: tuple[tuple[int, int], ...] = ()
    format: str = "pickle"
    #: One for each rank, or none.
    states: list[Any] | None = None
    #: Whether the states are those of other ranks or workers.
    is_resharded: bool = False


@dataclass
class Answer:
    """What came of it on a rank.

    Attributes:
        epochs: the items of each.
        states: what was saved at the cuts, or why nothing was.
        ended: at which cuts the loop had met the end of the epoch.
        refusal: why the pipeline or its state was not loaded.
    """

    epochs: list[list[Any]] = field(default_factory=list)
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    refusal: str = ""


class Refused(NamedTuple):
    """The message of a `StateError`, where a state was asked for."""

    message: str


class Loader(NamedTuple):
    epoch: Callable[[], Iterator[Any]]
    save: Callable[[], Any]


def run_on_ranks(run: Run, folder: Path) -> list[Answer]:
    """Return what comes of a run on each rank.

    Raises:
        RuntimeError: a rank has raised an error, or left a process behind, or did not end.
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
    """Return the processes of a group that go on for seconds."""
    deadline = time.monotonic() + 5
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
    """Be one rank of a run, in a process of its own."""
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
        answers.send(answer_of(run, None if run.states is None else run.states[rank]))
        if run.topology.ranks > 1:
            dist.barrier()
    except BaseException:
        answers.send(traceback.format_exc())
    finally:
        answers.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def answer_of(run: Run, state: Any) -> Answer:
    answer = Answer()
    try:
        with opened(run, state) as loader:
            for epoch in range(run.epochs):
                note_epoch(answer, run, epoch, loader)
    except StateError as error:
        if answer.epochs:
            raise
        answer.refusal = str(error)
    return answer


def note_epoch(answer: Answer, run: Run, epoch: int, loader: Loader) -> None:
    items: list[Any] = []
    iterator: Iterator[Any] | None = None
    has_ended = False
    for cut in [*(cut for cut in run.cuts if cut[0] == epoch), None]:
        while not has_ended and (cut is None or len(items) < cut[1]):
            iterator = loader.epoch() if iterator is None else iterator
            if (item := next(iterator, END)) is END:
                has_ended = True
            else:
                items.append(plain(item))
        if cut is not None:
            answer.states[cut] = saved(loader, run)
            if has_ended:
                answer.ended.add(cut)
    answer.epochs.append(items)


def plain(item: Any) -> Any:
    """Return an item without what says where it was read, which a listing may write in another way."""
    if isinstance(item, dict):
        return {name: value for name, value in item.items() if name not in ("__url__", "__local_path__")}
    return [plain(each) for each in item] if isinstance(item, list) else item


def saved(loader: Loader, run: Run) -> Any:
    try:
        return packed(loader.save(), run.format)
    except StateError as error:
        return Refused(str(error))


def packed(state: Any, form: str) -> bytes:
    """Return a state as the bytes of a file."""
    if form.endswith("json"):
        return json.dumps(state).encode()
    if form == "torch":
        file = io.BytesIO()
        torch.save({"model": torch.zeros(2), "data": state}, file)
        return file.getvalue()
    return pickle.dumps(state)


def unpacked(file: bytes, form: str) -> Any:
    if form.endswith("json"):
        return json.loads(file)
    if form == "torch":
        return torch.load(io.BytesIO(file), weights_only=True)["data"]
    return pickle.loads(file)


@contextmanager
def opened(run: Run, state: Any) -> Iterator[Loader]:
    """Make a loader, and load a state in it."""
    yield from OPENING[run.loader](run, state)


def open_pipeline(run: Run, state: Any) -> Iterator[Loader]:
    torch.manual_seed(run.seed)
    pipe = build(run.steps)
    yield Loader(lambda: iter(pipe), dict)


def open_torchs(run: Run, state: Any) -> Iterator[Loader]:
    generator = torch.Generator().manual_seed(run.seed)
    workers = run.topology.workers
    # Only workers that stay keep the place in a stream.
    options: Any = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader: Any = DataLoader(
        build(run.steps), batch_size=None, num_workers=workers, collate_fn=unchanged, generator=generator, **options
    )
    yield Loader(lambda: iter(loader), dict)


def unchanged(item: Any) -> Any:
    """Leave tuples as they are, of which torch would make lists."""
    return item


def open_stock(run: Run, state: Any) -> Iterator[Loader]:
    service = MultiProcessingReadingService(run.topology.workers, multiprocessing_context="fork")
    loader: Any = DataLoader2(build(run.steps), reading_service=service)
    loader.seed(run.seed)
    try:
        yield Loader(lambda: iter(loader), dict)
    finally:
        loader.shutdown()


def open_ours(run: Run, state: Any) -> Iterator[Loader]:
    service = ShardReadingService(run.topology.workers, distributed=run.topology.ranks > 1, timeout_s=LIMIT_S)
    with DataLoader2(build(run.steps), reading_service=service) as loader:
        loader.seed(run.seed)
        if isinstance(state, dict) and "reading_service_state" in state:
            loader.load_state_dict(state)
        elif state is not None:
            loader.reading_service.load_state_dict(state)
        own = run.format.startswith("service")
        yield Loader(lambda: iter(loader), loader.reading_service.state_dict if own else loader.state_dict)


def open_data_set(run: Run, state: Any) -> Iterator[Loader]:
    data = StatefulShards(build(run.steps), seed=run.seed)
    kind: Any = StatefulDataLoader if run.loader == "StatefulDataLoader" else DataLoader
    size, drop_last = run.batch or (None, False)
    workers = run.topology.workers
    loader: Any = kind(
        data,
        batch_size=size,
        drop_last=drop_last,
        num_workers=workers,
        collate_fn=list if size else unchanged,
        multiprocessing_context="fork" if workers else None,
    )
    # The loop over a stream is tracked in both, since the workers do not know where its epochs end.
    asks_itself = run.loader == "StatefulDataLoader" and all(step[0] != "with_epoch" for step in run.steps)
    if state is not None:
        # Its own method takes its own states, for as many workers.
        is_own = asks_itself and not run.is_resharded and bool({"_snapshot", "dataset_state"} & state.keys())
        (loader if is_own else data).load_state_dict(state)
    if asks_itself:
        yield Loader(lambda: iter(loader), loader.state_dict)
    else:
        yield Loader(lambda: data.tracked(loader), data.state_dict)


OPENING: dict[str, Callable[[Run, Any], Iterator[Loader]]] = {
    "pipeline": open_pipeline,
    "DataLoader": open_torchs,
    "stock": open_stock,
    "DataLoader2": open_ours,
    "StatefulShards": open_data_set,
    "StatefulDataLoader": open_data_set,
}
