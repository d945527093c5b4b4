"""What four ranks read that share the data between fewer. It forks the ranks, and each writes what it reads as JSON.

python topology_scenarios.py FOLDER
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_pipelines import EPOCHS, indexed, stream
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from wds_datapipes import DirectoryShards, IndexedSamples, ShardReadingService, StatefulShards, merge_states
from wds_datapipes.errors import StateError

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the import above

RANKS = 4
WORKERS = (0, 2)
#: After how many batches a state is saved; some ranks of a stream have no more.
CUTS = (1, 4)
LIMIT_S = 120.0


def with_numbers(keys: list[str]) -> list[tuple[str, float]]:
    """Return keys with random numbers, as augmentations draw them in a worker."""
    return [(key, random.random()) for key in keys]


KINDS: dict[str, Callable[[Path, int], Any]] = {"stream": stream, "indexed": indexed}


def open_service(pipe: Any, workers: int, distributed: Any, seed: int | None = 7, state: Any = None) -> Any:
    service = ShardReadingService(workers, timeout_s=LIMIT_S, distributed=distributed)
    loader: Any = DataLoader2(pipe, reading_service=service)
    if seed is not None:
        loader.seed(seed)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def by_service(pipe: Any, workers: int, distributed: Any, seed: int | None = 7, epochs: int = EPOCHS) -> list[Any]:
    with open_service(pipe, workers, distributed, seed) as loader:
        return [list(loader) for _ in range(epochs)]


def by_torch(pipe: Any, workers: int, distributed: Any, seed: int = 7) -> list[Any]:
    data = StatefulShards(pipe, seed=seed, distributed=distributed)
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    return [list(loader) for _ in range(EPOCHS)]


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Read in every way with two data-parallel ranks, of two ranks of tensor parallelism each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))["replicate", "shard"]
    dp, pair = mesh["dp"], (mesh["dp"].get_local_rank(), 2)
    told: dict[str, Any] = {}
    for kind, make in KINDS.items():
        for workers in WORKERS:
            name = f"{kind} {workers}"
            # Only the seed of rank 0 matters, where the ranks agree on one.
            told[f"mesh, {name}"] = by_service(make(folder, 2), workers, dp, 7 if rank == 0 else None)
            told[f"other seeds, {name}"] = by_service(make(folder, 2), workers, dp, 7 + rank)
            told[f"no seed, {name}"] = by_service(make(folder, 2), workers, dp, None)
            told[f"process group, {name}"] = by_service(make(folder, 2), workers, dp.get_group())
            told[f"flattened mesh, {name}"] = by_service(make(folder, 2), workers, flat._flatten("both"))
            told[f"pair, {name}"] = by_service(make(folder, 2), workers, pair)
            told[f"torch, {name}"] = by_torch(make(folder, 2), workers, dp)
            told[f"torch with a pair, {name}"] = by_torch(make(folder, 2), workers, pair)
    told["augmented"] = by_service(stream(folder, 2).map(with_numbers), 2, dp)
    with open_service(indexed(folder, 2), 0, dp) as loader:
        told["length"] = len(loader)
    told["alone"] = by_service(stream(folder, 1), 2, init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))["dp"])
    return told


def resume(folder: Path, rank: int) -> dict[str, Any]:
    """Save states with two data-parallel ranks, and resume with as many, with four and with one."""
    told: dict[str, Any] = {}
    groups: dict[int, Any] = {
        dp: init_device_mesh("cpu", (dp, RANKS // dp), mesh_dim_names=("dp", "tp"))["dp"] for dp in (1, 2, 4)
    }
    for kind, make in KINDS.items():
        for workers, cut in zip(WORKERS, CUTS, strict=True):
            with open_service(make(folder, 2), workers, groups[2]) as loader:
                begun = [*islice(loader, cut)]
                states = gathered(loader.state_dict())
            merged = merge_states(states)
            assert merged == merge_states(states[1::2]) == merge_states([merged, *states])
            for dp, group in groups.items():
                with open_service(make(folder, dp), workers, group, state=merged) as loader:
                    told[f"{kind} {workers} on {dp}"] = [begun, list(loader), list(loader)]
            with open_service(make(folder, 2), workers, (rank // 2, 2), state=merged) as loader:
                told[f"{kind} {workers} with a pair"] = [begun, list(loader), list(loader)]
            with open_service(make(folder, 2), workers, groups[2], state=states[rank]) as loader:
                told[f"{kind} {workers} with its own"] = [begun, list(loader), list(loader)]
    return told


def faults(folder: Path, rank: int) -> dict[str, Callable[[], Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, group = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), dist.new_group([0, 1])
    dp, pair = mesh["dp"], (rank // 2, 2)

    def merge_different() -> None:
        with open_service(stream(folder, 2), 0, dp) as loader:
            iterator = iter(loader)
            states = []
            for _ in range(1 + (rank == 3)):
                next(iterator)
            states = gathered(loader.state_dict())
        merge_states(states)

    def without_loader() -> None:
        if rank != 3:
            service = ShardReadingService(timeout_s=2, distributed=dp)
            next(iter(DataLoader2(stream(folder, 2), reading_service=service)))

    return {
        "two dimensions": lambda: ShardReadingService(distributed=mesh),
        "no such dimension": lambda: ShardReadingService(distributed=mesh["data"]),
        "not in the mesh": lambda: ShardReadingService(distributed=part),
        "not in the group": lambda: ShardReadingService(distributed=group),
        "different groups": lambda: by_service(stream(folder, 2), 0, dp if rank else True),
        "different workers": lambda: by_service(stream(folder, 2), 2 * (rank % 2), dp),
        "different workers with a pair": lambda: by_service(stream(folder, 2), 2 * (rank % 2), pair),
        "different seeds": lambda: StatefulShards(stream(folder, 2), seed=rank % 2, distributed=dp),
        "different seeds with a pair": lambda: by_service(stream(folder, 2), 0, pair, rank % 2),
        "no seed with a pair": lambda: by_service(stream(folder, 2), 0, pair, None),
        "a queue of shards": lambda: by_service(DirectoryShards(str(folder)).load_wds_shards(), 0, dp),
        "an uneven batch": lambda: by_service(IndexedSamples(str(folder / "*.tar"), global_batch_size=7), 0, dp),
        "different states": merge_different,
        "a rank without a loader": without_loader,
    }


def come_of(scenario: Callable[[], Any]) -> str:
    try:
        scenario()
    except (RuntimeError, ValueError, KeyError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def be(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    told: dict[str, Any] = {"read": read(folder, rank), "resumed": resume(folder, rank), "faults": {}}
    for name, scenario in faults(folder, rank).items():
        dist.barrier()
        told["faults"][name] = come_of(scenario)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    pids = []
    for number in range(RANKS):
        if not (pid := os.fork()):
            be(place, number)
            os._exit(0)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))
