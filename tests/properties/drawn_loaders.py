"""The loaders of random pipelines, and the file formats of their states."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from built_pipelines import build
from drawn_pipelines import Options, Topology
from pipeline_model import Steps
from torch.utils.data import DataLoader

from wds_datapipes import ShardReadingService, StatefulShards

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip
from torchdata.stateful_dataloader import StatefulDataLoader  # isort: skip

#: How long a service waits for its workers and ranks, in seconds, which is less than the time limit of a run.
LIMIT_S = 120


@dataclass
class Run:
    """The work of each rank: several epochs with a loader, which saves its state at the cuts.

    Attributes:
        broken: the numbers of items after which the loop leaves the first epochs.
        format: the format of the saved states.
        files: the states to load, one per rank, or none.
        loaded: the format of the loaded states.
        is_resharded: whether the loaded states come from a different number of ranks or workers.
        is_distributed: whether a single rank is said to be rank 0 of 1.
    """

    steps: Steps
    loader: str
    topology: Topology
    batch: tuple[int, bool] | None
    seed: int
    options: Options
    epochs: int
    cuts: tuple[tuple[int, int], ...] = ()
    broken: tuple[int, ...] = ()
    format: str = "pickle"
    files: list[bytes] | None = None
    loaded: str = "pickle"
    is_resharded: bool = False
    is_distributed: bool = False

    @property
    def distributed(self) -> Any:
        """The ranks of a loader: those of the process group, or this one of one."""
        return (0, 1) if self.is_distributed and self.topology.ranks == 1 else None


class Loader(NamedTuple):
    epoch: Callable[[], Iterator[Any]]
    save: Callable[[], Any]


def packed(state: Any, form: str) -> bytes:
    """Return a state as the bytes of a file."""
    return json.dumps(state).encode() if form.endswith("json") else pickle.dumps(state)


def unpacked(file: bytes, form: str) -> Any:
    """Return a state that was packed."""
    return json.loads(file) if form.endswith("json") else pickle.loads(file)


@contextmanager
def opened(run: Run, file: bytes | None) -> Iterator[Loader]:
    """Create a loader, and load a state into it."""
    yield from OPENING[run.loader](run, file)


def open_pipeline(run: Run, file: bytes | None) -> Iterator[Loader]:
    torch.manual_seed(run.seed)
    pipe = build(run.steps)
    yield Loader(lambda: iter(pipe), dict)


def open_torchs(run: Run, file: bytes | None) -> Iterator[Loader]:
    generator = torch.Generator().manual_seed(run.seed)
    workers = run.topology.workers
    # Only persistent workers keep the position in a stream.
    options: Any = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader: Any = DataLoader(
        build(run.steps), batch_size=None, num_workers=workers, collate_fn=unchanged, generator=generator, **options
    )
    yield Loader(lambda: iter(loader), dict)


def unchanged(item: Any) -> Any:
    """Keep tuples, which torch would turn into lists."""
    return item


def open_ours(run: Run, file: bytes | None) -> Iterator[Loader]:
    ahead = run.options.prefetch
    service = ShardReadingService(
        run.topology.workers,
        worker_prefetch_cnt=ahead,
        main_prefetch_cnt=ahead,
        distributed=run.distributed or run.topology.ranks > 1,
        timeout_s=LIMIT_S,
    )
    with DataLoader2(build(run.steps), reading_service=service) as loader:
        loader.seed(run.seed)
        if file is not None:
            loader.load_state_dict(unpacked(file, run.loaded))
        own = run.format.startswith("service")
        yield Loader(lambda: iter(loader), loader.reading_service.state_dict if own else loader.state_dict)


def open_data_set(run: Run, file: bytes | None) -> Iterator[Loader]:
    data = StatefulShards(build(run.steps), seed=run.seed, distributed=run.distributed)
    kind: Any = StatefulDataLoader if run.loader == "StatefulDataLoader" else DataLoader
    size, drop_last = run.batch or (None, False)
    workers, options = run.topology.workers, run.options
    more: Any = {"snapshot_every_n_steps": options.snapshot} if kind is StatefulDataLoader else {}
    if workers:
        more |= {"persistent_workers": options.is_persistent, "prefetch_factor": options.prefetch}
    loader: Any = kind(
        data,
        batch_size=size,
        drop_last=drop_last,
        num_workers=workers,
        collate_fn=list if size else unchanged,
        multiprocessing_context="fork" if workers else None,
        **more,
    )
    # The loop over a stream is tracked in both, because the workers do not know where its epochs end.
    asks_itself = run.loader == "StatefulDataLoader" and all(step[0] != "with_epoch" for step in run.steps)
    if file is not None:
        state = unpacked(file, run.loaded)
        # Its own method accepts its own states, for the same number of workers.
        is_own = asks_itself and not run.is_resharded and bool({"_snapshot", "dataset_state"} & state.keys())
        (loader if is_own else data).load_state_dict(state)
    if asks_itself:
        yield Loader(lambda: iter(loader), loader.state_dict)
    else:
        yield Loader(lambda: data.tracked(loader), data.state_dict)


OPENING: dict[str, Callable[[Run, Any], Iterator[Loader]]] = {
    "pipeline": open_pipeline,
    "DataLoader": open_torchs,
    "DataLoader2": open_ours,
    "StatefulShards": open_data_set,
    "StatefulDataLoader": open_data_set,
}
