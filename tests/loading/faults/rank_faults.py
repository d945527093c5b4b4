"""Faults of ranks: a rank is killed, fails, hangs or exits early, and the other ranks raise an error that names it."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from fault_table import Cause, fault
from faulty_pipelines import FOLDER, describe_error
from main_programs import Become
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import distributed_c10d
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardReadingService

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip
from torchdata.datapipes.iter import IterableWrapper  # isort: skip

#: How long ranks wait for one that is lost, and for one that is not, in seconds.
LOST_S, NOT_LOST_S = 6.0, 60.0

#: The time limit of what ranks wait for otherwise, in seconds; it is shorter than that of a fault.
LIMIT_S = 240.0

#: The number of items of each rank in an epoch.
SHARE = 20


# the processes of ranks


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


def numbers(world: int) -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(world * SHARE), deepcopy=False).sharding_filter()
    return pipe


class Rank:
    """A rank that meets a fault, and the items of each of its epochs."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.flags = Flags(folder)
        self.epochs: list[list[int]] = []

    def load(
        self, workers: int = 2, timeout_s: float = LOST_S, pipe: IterDataPipe[int] | None = None, **options: Any
    ) -> DataLoader2[int]:
        service = ShardReadingService(workers, timeout_s=timeout_s, distributed=True, **options)
        return DataLoader2(numbers(self.world) if pipe is None else pipe, reading_service=service)

    def read(self, loader: DataLoader2[int], epochs: int = 2, pause: Callable[[], object] = lambda: None) -> None:
        """Read some epochs, and call ``pause`` in the middle of the first."""
        for number in range(epochs):
            items: list[int] = []
            self.epochs.append(items)
            for item in loader:
                items.append(item)
                if number == 0 and len(items) == SHARE // 2:
                    pause()

    def tell(self, end: str) -> None:
        """Write how much of each epoch this rank has read, and how it ended."""
        share = [*range(self.rank, self.world * SHARE, self.world)]
        epochs = ["whole" if sorted(items) == share else f"{len(items)} items" for items in self.epochs]
        self.flags.show(f"{self.rank} end", f"{', '.join(epochs)}; {end}")

    def others(self, state: str) -> list[str]:
        return [f"{other} {state}" for other in range(self.world) if other != self.rank]

    def wait_for_ends(self) -> None:
        """Wait until every other rank has told its end."""
        self.flags.wait(*self.others("end"))

    @contextmanager
    def keeping_the_store(self) -> Iterator[None]:
        """Keep rank 0, which hosts the store, until every other rank has ended the block."""
        try:
            yield
        finally:
            if self.rank == 0:
                self.wait_for_ends()


def on_ranks(
    world: int, *, store: Callable[[Rank], Any] | None = None, exits_whole: bool = False
) -> Callable[[Callable[[Rank], object]], Cause]:
    """Run a function on several ranks, and return the outcome of each rank.

    Args:
        world: the number of ranks.
        store: creates the store of a rank, instead of a ``TCPStore`` of rank 0.
        exits_whole: whether the interpreters of the ranks exit as those of scripts. Otherwise they only call exit
            functions, because torch makes the rest take a second of CPU time.
    """

    def made(program: Callable[[Rank], object]) -> Cause:
        return partial(run_ranks, program, world, store or tcp_store, exits_whole)

    return made


def run_ranks(program: Callable[[Rank], object], world: int, store: Callable[[Rank], Any], exits_whole: bool) -> str:
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    running, codes = dict[int, int](), dict[int, int]()
    for number in range(world):
        if (pid := os.fork()) == 0:
            # The exception that ends a rank must propagate from the top level of a script.
            raise Become(partial(be, Rank(folder, number, world), program, store, exits_whole))
        running[pid] = number
    while running:
        time.sleep(0.02)
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if all(map(is_stopped, running)):
            for pid in running:
                os.kill(pid, signal.SIGKILL)
    ends = [folder / f"{number} end" for number in range(world)]
    return "\n".join(
        f"rank {number}: {end.read_text() if end.exists() else 'tells nothing'}; exit code {codes[number]}"
        for number, end in enumerate(ends)
    )


def be(rank: Rank, program: Callable[[Rank], object], store: Callable[[Rank], Any], exits_whole: bool) -> None:
    """Run a rank until it exits."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the process of the fault
    options: dict[str, Any] = {"rank": rank.rank, "world_size": rank.world, "timeout": timedelta(seconds=LIMIT_S)}
    dist.init_process_group("gloo", store=store(rank), **options)
    end = "end"
    try:
        program(rank)
    except BaseException as error:
        end = describe_error(error)
        if exits_whole:
            raise
    finally:
        rank.tell(end)
    if not exits_whole:
        atexit._run_exitfuncs()
        os._exit(0)


def tcp_store(rank: Rank) -> Any:
    is_host = rank.rank == 0
    port = 0 if is_host else int(rank.flags.wait("port"))
    store = TCPStore("127.0.0.1", port, rank.world, is_master=is_host, wait_for_workers=False)
    if is_host:
        rank.flags.show("port", str(store.port))
    return store


def file_store(rank: Rank) -> Any:
    return FileStore(str(rank.flags.folder / "store"), rank.world)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# what they tell

#: The causes in the errors of the other ranks.
WAITED = r"rank \d waited 6 s \(timeout_s\) for rank {}, dead or busy elsewhere\."
ENDED = r"rank {} has ended its service\."
FAILED = r"rank {} has ended its service after {}\."
STORE = "the process group's store "
GONE = STORE + r"does not respond \(Dist.*Error: .+\): rank 0 or torchrun, which hosts it, has ended\."
SILENT = STORE + r"has not responded for 6 s \(timeout_s\): rank 0 or torchrun, which hosts it, is unreachable\."

#: Patterns of what all ranks print: anything, and no error.
ANY, NO_ERROR = ".*", r"((?!Traceback).)*"


def lost_in(epoch: int, why: str) -> str:
    return rf"RankLostError: The ranks cannot begin epoch {epoch} of a ShardReadingService together: {why}"


def told(world: int, others: str, own: dict[int, str]) -> str:
    """The expected result: what some ranks tell, and what all others do."""
    return "\n".join(f"rank {rank}: {own.get(rank, others)}" for rank in range(world))


def left_by(lost: int, why: str, *, own: str = ".*", code: int, world: int = 3) -> str:
    """The expected result if all ranks but one read an epoch, and then get an error that names the lost one."""
    return told(world, rf"whole, 0 items; {lost_in(2, why)}; exit code \d", {lost: f"{own}; exit code {code}"})


def undisturbed(world: int, epochs: int) -> str:
    """The expected result if all ranks read all epochs to their end without an error."""
    return told(world, f"{', '.join(['whole'] * epochs)}; end; exit code 0", {})


# a rank is lost


def kill(rank: Rank, who: int, workers: int = 2) -> None:
    rank.read(rank.load(workers), pause=lambda: os.kill(os.getpid(), signal.SIGKILL) if rank.rank == who else None)


KILLED = "tells nothing"
fault("rank killed", says=left_by(1, WAITED.format(1), own=KILLED, code=-9), noise=ANY)(
    on_ranks(3)(partial(kill, who=1))
)
fault("rank killed without workers", says=left_by(1, WAITED.format(1), own=KILLED, code=-9, world=2), noise=ANY)(
    on_ranks(2)(partial(kill, who=1, workers=0))
)
fault("rank killed with the store", says=left_by(0, GONE, own=KILLED, code=-9), noise=ANY)(
    on_ranks(3, exits_whole=True)(partial(kill, who=0))
)


@fault("rank killed at the gate", says=left_by(1, WAITED.format(1), own=KILLED, code=-9), noise=ANY)
@on_ranks(3)
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


@fault("rank exits", says=left_by(1, ENDED.format(1), code=3), noise=ANY)
@on_ranks(3, exits_whole=True)
def exits(rank: Rank) -> None:
    rank.read(rank.load(), pause=lambda: sys.exit(3) if rank.rank == 1 else None)


@fault(
    "rank fails",
    says=left_by(1, FAILED.format(1, "LookupError: no such label"), own=".*; LookupError: no such label", code=1),
    noise=r"((?!Exception ignored).)*",
)
@on_ranks(3, exits_whole=True)
def fails(rank: Rank) -> None:
    def fail() -> NoReturn:
        raise LookupError("no such label")

    rank.read(rank.load(), pause=fail if rank.rank == 1 else lambda: None)


def refuse_large(number: int) -> int:
    if number >= SHARE:
        raise ValueError(f"{number} is no sample")
    return number


@fault(
    "rank with a bad sample",
    says=left_by(
        1, FAILED.format(1, r"ValueError: Caught .+ process \d\."), own=".*; ValueError: .*is no sample.*", code=0
    ),
    noise=ANY,
)
@on_ranks(3)
def bad_sample(rank: Rank) -> None:
    pipe = numbers(rank.world)
    with rank.keeping_the_store():
        rank.read(rank.load(pipe=pipe.map(refuse_large) if rank.rank == 1 else pipe))


def find_no_disk(pipe: Any, info: Any) -> Any:
    raise OSError("no such disk")


@fault(
    "rank that cannot start",
    says=told(
        3,
        f"0 items; {lost_in(1, FAILED.format(1, 'OSError: no such disk'))}; exit code 0",
        {1: "0 items; OSError: no such disk; exit code 0"},
    ),
    noise=ANY,
)
@on_ranks(3)
def cannot_start(rank: Rank) -> None:
    with rank.keeping_the_store():
        rank.read(rank.load(0, worker_init_fn=find_no_disk if rank.rank == 1 else None))


@fault("rank with fewer epochs", says=left_by(0, ENDED.format(0), own="whole; end", code=0), noise=ANY)
@on_ranks(3)
def epochs_differ(rank: Rank) -> None:
    """Rank 0 reads one epoch fewer, and then does something else, so its store stays available."""
    with rank.load() as loader:
        rank.read(loader, 1 if rank.rank == 0 else 2)
    if rank.rank == 0:
        rank.wait_for_ends()


@fault(
    "rank that never starts",
    says=told(
        3,
        rf".*; RankLostError: The ranks cannot start .+ together: {WAITED.format(0)}; exit code 0",
        {0: "; end; exit code 0"},
    ),
    noise=ANY,
)
@on_ranks(3)
def never_starts(rank: Rank) -> None:
    if rank.rank == 0:
        rank.wait_for_ends()
    else:
        rank.read(rank.load())


@fault("rank with a silent store", says=left_by(0, SILENT, own=KILLED, code=-9), noise=ANY)
@on_ranks(3, exits_whole=True)
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


# no rank is lost


def end_first(rank: Rank, who: int) -> None:
    """One rank finishes and exits before the others have read half of the only epoch."""
    rank.flags.show(f"{rank.rank} pid", str(os.getpid()))

    def pause() -> None:
        if rank.rank != who:
            process = Path("/proc", rank.flags.wait(f"{who} pid"))
            wait_until(lambda: not process.exists())

    with rank.load(timeout_s=NOT_LOST_S) as loader:
        rank.read(loader, 1, pause)


for who, name in ((1, "rank ends first"), (0, "rank ends first with the store")):
    fault(name, says=undisturbed(2, 1), noise=NO_ERROR)(on_ranks(2)(partial(end_first, who=who)))


@fault("ranks without shutdown", says=undisturbed(2, 2), noise=NO_ERROR)
@on_ranks(2, exits_whole=True)
def without_shutdown(rank: Rank) -> None:
    """No rank shuts its loader down; a reference in a cycle keeps the loader until the interpreter exits."""
    loader: Any = rank.load(timeout_s=NOT_LOST_S)
    loader.itself = loader
    rank.read(loader, 2)


@fault("rank interrupted", says=undisturbed(3, 3), noise=NO_ERROR)
@on_ranks(3)
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
    assert (rank.flags.folder / "2 comes").exists(), "an epoch began without rank 2"
    rank.epochs.append(list(iterator))
    rank.read(loader, 1)
    loader.shutdown()


@fault("ranks with a file store", says=undisturbed(2, 3), noise=NO_ERROR)
@on_ranks(2, store=file_store)
def with_a_file_store(rank: Rank) -> None:
    with rank.load(timeout_s=NOT_LOST_S) as loader:
        rank.read(loader, 3)
