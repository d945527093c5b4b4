"""Scenarios of several ranks. Run by torchrun with "restarted", or alone with "forked", which starts ranks itself.

Each rank writes its results as JSON. The ranks of "forked" are forks of a process that has already imported torch,
because the import takes seconds; the process has not used torch otherwise.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore
from torch.distributed import distributed_c10d
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardList, ShardReadingService

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService  # isort: skip
from torchdata.datapipes.iter import IterableWrapper  # isort: skip

WORKERS = (0, 2)

#: The time limit for waiting ranks in seconds, if one is lost and if none is.
LOST_S, NOT_LOST_S = 6.0, 60.0

#: The time limit of all scenarios, in seconds.
LIMIT_S = 300.0

#: The number of items of `numbers` on each rank.
SHARE = 20

Seen = list[list[Any]]


class Seeded(IterDataPipe[tuple[str, int]]):
    """Yields each sample's key, and the seed of this stage."""

    def __init__(self, source: IterDataPipe[dict[str, Any]]) -> None:
        self.source = source
        self.seed = 0

    def set_seed(self, seed: int) -> Seeded:
        self.seed = seed
        return self

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for sample in self.source:
            yield sample["__key__"], self.seed


class Flags:
    """Files through which processes report their progress to each other, independent of everything under test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def show(self, name: str, content: str = "") -> None:
        hidden = self.folder / f".{name}"
        hidden.write_text(content)
        hidden.rename(self.folder / name)

    def wait(self, *names: str) -> str:
        wait_until(lambda: all((self.folder / name).exists() for name in names))
        return (self.folder / names[-1]).read_text()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


def samples(shards: list[str]) -> IterDataPipe[Any]:
    return Seeded(ShardList(shards).shuffle().sharding_filter().load_wds_shards().group_samples())


def numbers(total: int) -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(total), deepcopy=False).sharding_filter()
    return pipe


def load(pipe: IterDataPipe[Any], workers: int = 2, timeout_s: float = NOT_LOST_S, **options: Any) -> DataLoader2[Any]:
    service = ShardReadingService(workers, timeout_s=timeout_s, distributed=True, **options)
    return DataLoader2(pipe, reading_service=service)


def read(loader: DataLoader2[Any], epochs: int, seed: int | None = None) -> Seen:
    with loader:
        if seed is not None:
            loader.seed(seed)
        return [list(loader) for _ in range(epochs)]


# Under torchrun


def restarted(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Fail at first, in the middle of an epoch, and succeed once torchrun has restarted all ranks."""
    loader = load(numbers(world * SHARE), 1)
    epochs: Seen = []
    for _ in range(3):
        epochs.append([])
        for item in loader:
            epochs[-1].append(item)
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                if rank == 1:
                    raise LookupError("no such label")
                time.sleep(LIMIT_S)  # until torchrun ends this
    loader.shutdown()
    return {"epochs": epochs, "found": Flags(folder).wait("found").split()}


def tidy_up(flags: Flags) -> None:
    """Remove the keys that gloo leaves in the store of restarted ranks, because gloo itself fails on them."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return
    if os.environ["RANK"] == "0":
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        ours = [name for name in store.list_keys() if "wds_datapipes" in name]
        for name in {*store.list_keys()} - {*ours}:
            store.delete_key(name)
        flags.show("found", "\n".join(ours))
    flags.wait("found")


# Lost ranks


class Rank:
    """A rank of a scenario, and its results."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.flags = Flags(folder)
        self.results: dict[str, Any] = {"epochs": []}

    def load(self, workers: int = 2, timeout_s: float = LOST_S, **options: Any) -> DataLoader2[Any]:
        return load(numbers(self.world * SHARE), workers, timeout_s, **options)

    def read(self, loader: DataLoader2[Any], epochs: int = 2, pause: Callable[[], object] = lambda: None) -> None:
        """Read some epochs, and call ``pause`` in the middle of the first."""
        for number in range(epochs):
            items: list[Any] = []
            self.results["epochs"].append(items)
            for item in loader:
                items.append(item)
                if number == 0 and len(items) == SHARE // 2:
                    pause()

    def write_results(self) -> None:
        self.flags.show(f"{self.rank}.json", json.dumps(self.results))

    def others(self, state: str) -> list[str]:
        return [f"{other} {state}" for other in range(self.world) if other != self.rank]

    def wait_for_news(self) -> None:
        """Wait until every other rank has written its results."""
        self.flags.wait(*(f"{other}.json" for other in range(self.world) if other != self.rank))

    @contextmanager
    def keeping_the_store(self) -> Iterator[None]:
        """Keep rank 0, which hosts the store, until every other rank has ended the block."""
        try:
            yield
        finally:
            if self.rank == 0:
                self.wait_for_news()


def killed(rank: Rank, who: int, workers: int = 2) -> None:
    rank.read(rank.load(workers), pause=lambda: os.kill(os.getpid(), signal.SIGKILL) if rank.rank == who else None)


def killed_at_the_gate(rank: Rank) -> None:
    """Rank 1 is the last to reach an epoch, and dies before the ranks can begin it."""
    loader = rank.load()
    rank.read(loader, 1)
    if rank.rank == 1:
        kind: Any = TCPStore
        default: Any = distributed_c10d._get_default_store()
        store = default.underlying_store
        wait_until(lambda: any(store.add(key, 0) == 2 for key in store.list_keys() if key.endswith("/present")))
        kind.compare_set = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    rank.read(loader, 1)


def exits(rank: Rank) -> None:
    rank.read(rank.load(), pause=lambda: sys.exit(3) if rank.rank == 1 else None)


def fails(rank: Rank) -> None:
    def fail() -> None:
        raise LookupError("no such label")

    rank.read(rank.load(), pause=fail if rank.rank == 1 else lambda: None)


def refuse(number: int) -> int:
    if number >= SHARE:
        raise ValueError(f"{number} is no sample")
    return number


def bad_sample(rank: Rank) -> None:
    pipe = numbers(rank.world * SHARE)
    with rank.keeping_the_store():
        rank.read(load(pipe.map(refuse) if rank.rank == 1 else pipe, timeout_s=LOST_S))


def find_no_disk(pipe: Any, info: Any) -> Any:
    raise OSError("no such disk")


def cannot_start(rank: Rank) -> None:
    with rank.keeping_the_store():
        rank.read(rank.load(0, worker_init_fn=find_no_disk if rank.rank == 1 else None))


def epochs_differ(rank: Rank) -> None:
    """Rank 0 reads one epoch fewer, and then does something else, so its store stays available."""
    with rank.load() as loader:
        rank.read(loader, 1 if rank.rank == 0 else 2)
    if rank.rank == 0:
        rank.wait_for_news()


def never_starts(rank: Rank) -> None:
    if rank.rank == 0:
        rank.wait_for_news()
    else:
        rank.read(rank.load())


def ends_first(rank: Rank, who: int) -> None:
    """One rank finishes and exits before the others have read half of the only epoch."""
    rank.flags.show(f"{rank.rank} pid", str(os.getpid()))

    def pause() -> None:
        if rank.rank != who:
            process = Path("/proc", rank.flags.wait(f"{who} pid"))
            wait_until(lambda: not process.exists())

    with rank.load(timeout_s=NOT_LOST_S) as loader:
        rank.read(loader, 1, pause)


def without_shutdown(rank: Rank) -> None:
    """No rank shuts its loader down; a reference in a cycle keeps the loader until the interpreter exits."""
    loader = rank.load(timeout_s=NOT_LOST_S)
    loader.itself = loader
    rank.read(loader, 2)


def silent_store(rank: Rank) -> None:
    """The process that hosts the store is alive but does not respond."""

    def pause() -> None:
        if rank.rank == 0:
            rank.flags.wait(*rank.others("begun"))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            rank.flags.show(f"{rank.rank} begun")
            pid = int(rank.flags.wait("0 pid"))
            wait_until(lambda: is_stopped(pid))

    rank.flags.show(f"{rank.rank} pid", str(os.getpid()))
    rank.read(rank.load(), pause=pause)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def interrupted(rank: Rank) -> None:
    """Ctrl-C interrupts rank 1 while it waits for rank 2, and the loop is retried."""
    loader = rank.load(timeout_s=NOT_LOST_S)
    rank.read(loader, 1)
    if rank.rank == 2:
        pid = int(rank.flags.wait("1 waits"))
        time.sleep(1)
        os.kill(pid, signal.SIGINT)
        rank.flags.wait("1 is interrupted")
        time.sleep(1)
        rank.flags.show("2 comes")
    elif rank.rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may make its background jobs ignore it
        try:
            rank.flags.show("1 waits", str(os.getpid()))
            iter(loader)
        except KeyboardInterrupt:
            rank.flags.show("1 is interrupted")
    iterator = iter(loader)
    rank.results["all have come"] = (rank.folder / "2 comes").exists()
    rank.results["epochs"].append(list(iterator))
    rank.read(loader, 1)
    loader.shutdown()


def file_store(rank: Rank) -> None:
    """The ranks use a file store that a killed run left behind."""
    with rank.load(timeout_s=NOT_LOST_S) as loader:
        rank.read(loader, 3)


def alone(rank: Rank) -> None:
    store = distributed_c10d._get_default_store()
    before = store.num_keys()
    with rank.load() as loader:
        loader.seed(7)
        rank.read(loader, 1)
        early = store.num_keys()
        rank.read(loader, 9)
        grown = store.num_keys() - early
    rank.results["keys"] = {"grown": grown, "left": store.num_keys() - before}


def together(rank: Rank) -> None:
    """No rank is lost."""
    store, world, seen = distributed_c10d._get_default_store(), rank.world, rank.results
    shards = sorted(map(str, rank.folder.parent.glob("*.tar")))
    for workers in WORKERS:
        # The seed of rank 0 decides.
        seed = 7 if rank.rank == 0 else None
        seen[f"seeded {workers}"] = read(load(samples(shards), workers), 3, seed)
        seen[f"one shard {workers}"] = read(load(samples(shards[:1]), workers), 2)
        service = SequentialReadingService(DistributedReadingService(), ShardReadingService(workers))
        seen[f"sequential {workers}"] = read(DataLoader2(samples(shards), reading_service=service), 2, seed)
        gc.collect()  # torchdata's FullSync is in a cycle, and blocks forever if a starting thread collects it
        seen[f"no waiting {workers}"] = no_waiting(rank, workers)

    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    with load(numbers(world)) as train, load(numbers(2 * world), 0) as validation:
        seen["two services"] = [[list(train), list(validation)] for _ in range(3)]
        dist.barrier()
        early = store.num_keys()
        dist.barrier()
        for _ in range(10):
            list(train), list(validation)
        dist.barrier()
        late = store.num_keys()
        dist.barrier()
    dist.barrier()
    seen["keys"] = {"grown": late - early, "left": store.num_keys() - before}
    dist.barrier()

    with load(numbers(world * SHARE)) as loader:
        seen["before a fork"] = list(loader)
        if (child := os.fork()) == 0:
            loader.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        seen["after a fork"] = list(loader)
    never = load(numbers(world))
    del never
    with load(numbers(world)):
        pass

    loader = load(numbers(world * SHARE))
    iterator = iter(loader)
    first = [next(iterator)]
    dist.barrier()
    dist.destroy_process_group()
    seen["no group"], seen["still no group"] = first + list(iterator), list(loader)
    loader.shutdown()
    try:
        list(load(numbers(world)))
    except RuntimeError as error:
        seen["no group any more"] = str(error)


def no_waiting(rank: Rank, workers: int) -> int:
    """Let rank 1 take its first item after all the others have taken their last one."""
    with load(numbers(rank.world * 10_000), workers) as loader:
        iterator = iter(loader)
        if rank.rank == 1:
            rank.flags.wait(*rank.others(f"has read {workers}"))
        count = sum(1 for _ in iterator)
        rank.flags.show(f"{rank.rank} has read {workers}")
    return count


SCENARIOS: dict[str, tuple[int, Callable[[Rank], None]]] = {
    "killed": (3, partial(killed, who=1)),
    "killed without workers": (2, partial(killed, who=1, workers=0)),
    "killed at the gate": (3, killed_at_the_gate),
    "killed with the store": (3, partial(killed, who=0)),
    "exits": (3, exits),
    "fails": (3, fails),
    "bad sample": (3, bad_sample),
    "cannot start": (3, cannot_start),
    "epochs differ": (3, epochs_differ),
    "never starts": (3, never_starts),
    "ends first": (2, partial(ends_first, who=1)),
    "ends first with the store": (2, partial(ends_first, who=0)),
    "without shutdown": (2, without_shutdown),
    "silent store": (3, silent_store),
    "interrupted": (3, interrupted),
    "file store": (2, file_store),
    "alone, HashStore": (1, alone),
    "together": (4, together),
}

#: The number of scenarios that run at a time.
AT_ONCE = 6

STORES: dict[str, Callable[[Path, int], Any]] = {
    "FileStore": lambda folder, world: FileStore(str(folder / "store"), world),
    "HashStore": lambda folder, world: HashStore(),
}


#: Scenarios that run the whole exit of the interpreter; others only call exit functions, because torch makes the rest
#: take a second of CPU time.
ENDINGS = ("exits", "fails", "killed with the store", "silent store", "without shutdown")


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def be(folder: Path, name: str, number: int, output: int) -> None:
    """Run a rank of a scenario in a separate process, until it exits normally."""
    end_with_parent()
    os.dup2(output, 2)
    world, scenario = SCENARIOS[name]
    rank = Rank(folder, number, world)
    if (make_store := STORES.get(name.rpartition(" ")[2])) is not None:
        store = make_store(folder, world)
    else:
        port = 0 if number == 0 else int(rank.flags.wait("port"))
        store = TCPStore("127.0.0.1", port, world, is_master=number == 0, wait_for_workers=False)
        if number == 0:
            rank.flags.show("port", str(store.port))
    dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timedelta(seconds=LIMIT_S))
    try:
        scenario(rank)
    except BaseException as error:
        rank.results["error"] = f"{type(error).__name__}: {error}"
        if name in ENDINGS:
            raise
    finally:
        rank.write_results()
    if name not in ENDINGS:
        atexit._run_exitfuncs()
        os._exit(0)


def run_forked(folder: Path, names: list[str]) -> None:
    """Run scenarios, several at a time, each with its own ranks."""
    names = names[::-1]
    running: dict[str, dict[int, int]] = {}
    codes: dict[str, dict[int, int]] = {}
    while names or running:
        while names and len(running) < AT_ONCE:
            name = names.pop()
            (folder / name).mkdir()
            codes[name], running[name] = {}, {}
            for number in range(SCENARIOS[name][0]):
                with (folder / name / f"{number}.stderr").open("wb") as output:
                    if (pid := os.fork()) == 0:
                        # The exception that ends a rank must propagate from here as in any script.
                        be(folder / name, name, number, output.fileno())
                        return
                running[name][pid] = number
        time.sleep(0.02)
        for name, ranks in list(running.items()):
            for pid in list(ranks):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[name][ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            if all(map(is_stopped, ranks)):
                for pid in ranks:
                    os.kill(pid, signal.SIGKILL)
            if not ranks:
                del running[name]
                Flags(folder / name).show("codes.json", json.dumps(codes[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["restarted", "forked"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    gc.freeze()  # skip collecting imported modules at exit, which takes a second
    if chosen.what == "forked":
        run_forked(chosen.folder, chosen.names or list(SCENARIOS))
        return
    end_with_parent()
    tidy_up(Flags(chosen.folder))
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    results = restarted(chosen.folder, rank, dist.get_world_size())
    Flags(chosen.folder).show(f"{rank}.json", json.dumps(results))


if __name__ == "__main__":
    main()
