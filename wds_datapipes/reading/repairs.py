"""What this package mends in torchdata's own ``DataLoader2`` and ``MultiProcessingReadingService``.

torchdata 0.7.1 to 0.9.0 are the last releases that have them, and their faults will not be mended there
(https://github.com/meta-pytorch/data/issues/1196). Pipelines of tar shards meet every one of them: shards are uneven,
so the first epoch ends in an exception. Importing ``wds_datapipes`` therefore replaces the parts below, in these
releases only, and only where the files are, byte for byte, those that were studied. ``wds_datapipes.repairs()`` tells
what was done; the environment variable ``WDS_DATAPIPES_REPAIRS=0`` leaves torchdata as it is.

Each repair is one function here: its docstring says what was wrong and what is done about it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Repair", "apply", "repairs"]

_ISSUES = "https://github.com/meta-pytorch/data/issues/"

#: The files that the repairs rely on, and the beginning of the SHA-256 of each in torchdata 0.7.1 and in 0.8.0 = 0.9.0.
_KNOWN_VERSIONS = ("0.7.1", "0.8.0", "0.9.0")
_KNOWN_FILES = {
    "dataloader2/communication/eventloop.py": ("bd07a7ce4ded5bc5",),
    "dataloader2/communication/iter.py": ("672f67d7faacfd5d",),
    "dataloader2/communication/messages.py": ("b918395161a84395",),
    "dataloader2/communication/protocol.py": ("b3ec99da8ec2a3ea",),
    "dataloader2/dataloader2.py": ("d93f8cdf14f43c29", "752627c2b4103ef6"),
    "dataloader2/random/seed_generator.py": ("90bc8f5830c25b17", "b53449ffa3300c71"),
    "dataloader2/reading_service.py": ("d4119658d124024d", "622e2cceba12003d"),
    "dataloader2/utils/worker.py": ("3e17d79236d6570f",),
    "datapipes/iter/util/prefetcher.py": ("3fbb9b0c02b4b70c",),
}


class Repair(NamedTuple):
    """One fault of torchdata, and whether it is mended in this process.

    Attributes:
        name: the function of this module that mends it.
        what: the fault, in one sentence.
        issue: where others have reported it, or None.
        applied: whether it is mended.
        reason: why it is not, or "".
    """

    name: str
    what: str
    issue: str | None
    applied: bool
    reason: str

    def __str__(self) -> str:
        state = "mended" if self.applied else f"not mended: {self.reason}"
        return f"{self.name}: {self.what} [{state}]" + (f" {self.issue}" if self.issue else "")


_Mend = Callable[[], None]
_TABLE: list[tuple[_Mend, str | None]] = []
_done: list[Repair] = []


def repairs() -> list[Repair]:
    """Return what is wrong in torchdata's DataLoader2, and what of it is mended in this process.

    Examples:
        >>> from wds_datapipes import repairs
        >>> names = [repair.name for repair in repairs()]
        >>> names[:5]
        ['uneven_workers', 'dead_workers', 'lost_errors', 'orphans', 'shutdown']
        >>> names[5:]
        ['stuck_pause', 'repeated_order', 'unseeded_service', 'distributed_state', 'unknown_pipeline', 'no_set_epoch']
    """
    return list(_done)


def apply() -> None:
    """Mend torchdata, once in a process; do nothing where there is nothing to mend."""
    if _done:
        return
    reason = _reason_against()
    for mend, issue in _TABLE:
        if not reason:
            mend()
        what = str(mend.__doc__).partition("\n")[0]
        _done.append(Repair(mend.__name__, what, issue, not reason, reason))


def _reason_against() -> str:
    """Import torchdata's DataLoader2, and return why it must be left alone, or ""."""
    if os.environ.get("WDS_DATAPIPES_REPAIRS") == "0":
        return "WDS_DATAPIPES_REPAIRS=0 is set"
    if os.name != "posix":
        return f"worker processes are only watched on POSIX systems, and this one is {os.name!r}"
    torchdata = _import_quietly()
    if torchdata is None:
        return "torchdata is not installed, or has no DataLoader2"
    version = torchdata.__version__.partition("+")[0]
    if version not in _KNOWN_VERSIONS:
        return f"torchdata {version} is none of {', '.join(_KNOWN_VERSIONS)}"
    for name, digests in _KNOWN_FILES.items():
        path = Path(str(torchdata.__file__)).parent / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest()[:16] not in digests:
            return f"{path} is not the file of torchdata {version} that these repairs were written for"
    return ""


def _import_quietly() -> ModuleType | None:
    """Import torchdata with its DataLoader2, without the one warning that this import always gives."""
    with warnings.catch_warnings():
        banner = r"\n#+\nWARNING!\nThe 'datapipes', 'dataloader2' modules are deprecated"
        warnings.filterwarnings("ignore", message=banner, category=UserWarning)
        try:
            importlib.import_module("torchdata.dataloader2")
        except ImportError:
            return None
    return importlib.import_module("torchdata")


def _repair(issue: int | None) -> Callable[[_Mend], _Mend]:
    """Enter a repair into the table, with the number of the issue in meta-pytorch/data that reports the fault."""

    def enter(mend: _Mend) -> _Mend:
        _TABLE.append((mend, f"{_ISSUES}{issue}" if issue else None))
        return mend

    return enter


def _replace(owner: object, name: str, replacement: object) -> None:
    setattr(owner, name, replacement)


@_repair(issue=1310)
def uneven_workers() -> None:
    """An epoch ends in an exception when the workers do not yield equally many items.

    The next request and the next answer each have a pointer that goes round the workers, and the two fall out of step
    when a worker has finished, so that a worker is asked that has ended: "Can not expect any response without
    submitted request", or "Can not request next item while we are still waiting response for previous request"
    (issues 1228 and 1310). One pointer serves both now, and a worker that has finished leaves the round.

    The same class stops two threads from answering to one worker, which is how a second ``iter()`` over a pipeline
    with ``sharding_round_robin_dispatch`` hangs (issue 1198).
    """
    from torchdata.dataloader2.communication import iter as receiving

    from wds_datapipes.reading.rounds import LiveWorkers

    _replace(receiving, "_IterateQueueDataPipes", LiveWorkers)


@_repair(issue=1198)
def dead_workers() -> None:
    """The main process waits for ever for a worker that was killed, or that called exit.

    All waiting is for the queue alone. It is for the queue and the process now, and raises ``WorkerDied``. Waiting
    also no longer means asking again every millisecond, which limited each worker to about 800 items a second.
    """
    from torchdata.dataloader2.communication import protocol
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.reading.rounds import WatchedClient

    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_and_watch(self: Any, datapipe: Any) -> Any:
        end_datapipe = initialize(self, datapipe)
        for index, (process, _, _) in enumerate(self._worker_processes):
            inbox = self._worker_datapipes[index].protocol.inbox
            inbox.watch(f"Worker {index}", process)
            if self._dispatch_process is not None:
                inbox.watch("The dispatching process", self._dispatch_process[0])
        return end_datapipe

    _replace(protocol, "IterDataPipeQueueProtocolClient", WatchedClient)
    _replace(MultiProcessingReadingService, "initialize", initialize_and_watch)


@_repair(issue=None)
def lost_errors() -> None:
    """A worker that cannot start, or cannot pickle an item, leaves the main process waiting for ever.

    Only what an item raises is sent. Now everything is: what ``worker_init_fn``, ``worker_reset_fn`` and
    ``apply_sharding`` raise, an item that cannot be pickled, with the part at fault, an exception whose class cannot
    be pickled, and what ends a prefetch thread.
    """
    from torchdata.dataloader2.communication import eventloop
    from torchdata.dataloader2.communication import iter as receiving
    from torchdata.datapipes.iter import PinMemory, Prefetcher

    from wds_datapipes.reading.prefetching import guarded
    from wds_datapipes.reading.workers import SendableError, run_dispatcher, run_worker

    _replace(receiving, "ExceptionWrapper", SendableError)
    _replace(eventloop, "DataPipeToQueuesLoop", run_worker)
    _replace(eventloop, "MultipleDataPipesToQueuesLoop", run_dispatcher)
    for prefetcher in (Prefetcher, PinMemory):
        _replace(prefetcher, "thread_worker", staticmethod(guarded(prefetcher.thread_worker)))


@_repair(issue=None)
def orphans() -> None:
    """Workers outlive a main process that is killed, and die of a Ctrl-C that the main process means to handle.

    A worker holds both ends of its queue, so the end of the main process does not wake it. It watches that process
    now, and ignores SIGINT, as the workers of torch's ``DataLoader`` do.
    """
    from torchdata.dataloader2.communication import eventloop

    from wds_datapipes.reading.workers import bind

    for name in ("DataPipeToQueuesLoop", "MultipleDataPipesToQueuesLoop"):
        _replace(eventloop, name, functools.partial(bind, getattr(eventloop, name)))


@_repair(issue=1176)
def shutdown() -> None:
    """Shutting down in the middle of an epoch can hang, and leaves a worker that takes long.

    ``finalize`` waits for answers that the prefetch thread may have taken already, without a limit, and does not
    notice that ``join`` ran out of time. It stops the thread now, does not wait for answers, and ends what has not
    ended by itself. At the end of the interpreter it runs before the prefetch threads are frozen.
    """
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.reading.ending import end_service

    running: weakref.WeakSet[Any] = weakref.WeakSet()
    initialize = MultiProcessingReadingService.initialize

    @functools.wraps(initialize)
    def initialize_or_finalize(self: Any, datapipe: Any) -> Any:
        self._owner_pid = os.getpid()
        running.add(self)
        try:
            return initialize(self, datapipe)
        except BaseException:
            finalize(self)
            raise

    @functools.wraps(MultiProcessingReadingService.finalize)
    def finalize(self: Any) -> None:
        # A forked worker has a copy of the service, and with it of the queues; their processes are not its own.
        if not self._finalized and getattr(self, "_owner_pid", None) == os.getpid():
            self._finalized = True
            end_service(self)

    @atexit.register
    def finalize_all() -> None:
        for service in list(running):
            finalize(service)

    _replace(MultiProcessingReadingService, "initialize", initialize_or_finalize)
    _replace(MultiProcessingReadingService, "finalize", finalize)


@_repair(issue=None)
def stuck_pause() -> None:
    """Pausing waits for ever for a prefetch thread that has just come to its end.

    The thread says a last time that it has paused, and ends a millisecond later. Pausing again in between waits for it
    to say so again. The wait is for the end of the thread, too. What the thread has said of an earlier pause no longer
    counts: it could be taken for this one while the thread goes on.
    """
    from torchdata.datapipes.iter import Prefetcher

    from wds_datapipes.reading.prefetching import pause

    _replace(Prefetcher, "pause", pause)


@_repair(issue=None)
def repeated_order() -> None:
    """Every epoch has the order of the first, with and without ``DataLoader2.seed``.

    With a seed: the workers draw from copies of the loader's generator, and the original never advances. It is seeded
    anew after each epoch has begun, from itself: one ``seed()`` makes a whole run reproducible, and its first epoch is
    the one it always was.

    Without a seed: from 0.8.0 on a seed is drawn from torch's generator inside ``fork_rng``, which puts the generator
    back. It is drawn without it, as in 0.7.1 and as by torch's ``DataLoader``. ``torch.manual_seed`` still makes a run
    reproducible; each epoch takes one number from torch's generator.
    """
    from torchdata.dataloader2.random import seed_generator as seeding
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    initialize_iteration = MultiProcessingReadingService.initialize_iteration

    @functools.wraps(initialize_iteration)
    def initialize_iteration_and_advance(self: Any, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        next_reset_fn = initialize_iteration(self, seed_generator, iter_reset_fn)
        if self._mp:
            seed_generator.seed(seed_generator.generate_shared_seed())
        return next_reset_fn

    def torch_random_seed() -> int:
        import torch

        return int(torch.randint(-(2**63), 2**63 - 1, ()).item()) + 2**63

    _replace(MultiProcessingReadingService, "initialize_iteration", initialize_iteration_and_advance)
    _replace(seeding, "_get_torch_random_seed", torch_random_seed)


@_repair(issue=None)
def unseeded_service() -> None:
    """``DataLoader2.seed`` has no effect without a reading service.

    Seeds reach the pipeline through a reading service. ``InProcessReadingService``, which its own documentation calls
    the default, takes the place of none when a seed is set.
    """
    from torchdata.dataloader2 import DataLoader2, InProcessReadingService

    seed = DataLoader2.seed

    @functools.wraps(seed)
    def seed_through_service(self: Any, value: int) -> None:
        seed(self, value)
        if self.reading_service is None:
            self.reading_service = InProcessReadingService()

    _replace(DataLoader2, "seed", seed_through_service)


@_repair(issue=None)
def distributed_state() -> None:
    """Saving and loading a state behind ``DistributedReadingService`` warns that it has none, and it needs none.

    ``SequentialReadingService`` warns of every service without ``checkpoint`` and ``restore``. What this one gives
    to ranks is drawn from the generator of the loader, which is in the state. It has both now, and saves nothing.
    """
    from torchdata.dataloader2 import DistributedReadingService

    def checkpoint(_: Any) -> bytes:
        return b""

    def restore(self: Any, datapipe: Any, _: bytes) -> Any:
        return self.initialize(datapipe)

    _replace(DistributedReadingService, "checkpoint", checkpoint)
    _replace(DistributedReadingService, "restore", restore)


@_repair(issue=None)
def unknown_pipeline() -> None:
    """``DataLoader2.load_state_dict`` puts the pipeline of a state in the place of another one, and does not tell.

    Whoever has changed the pipeline since, or the list of shards, goes on with what there was before. Now that is a
    ``StateError`` which says what differs, where the state is one of a ``ShardReadingService``. So that the state knows
    its pipeline also before the first iteration, the service is told it when a state is asked for.
    """
    from torchdata.dataloader2 import DataLoader2

    state_dict, load_state_dict = DataLoader2.state_dict, DataLoader2.load_state_dict

    @functools.wraps(state_dict)
    def acquaint_and_save(self: Any) -> dict[str, Any]:
        from wds_datapipes.reading.acquainting import acquaint

        acquaint(self)
        state: dict[str, Any] = state_dict(self)
        return state

    @functools.wraps(load_state_dict)
    def check_and_load(self: Any, state_dict: dict[str, Any]) -> None:
        from wds_datapipes.reading.acquainting import check_pipeline

        check_pipeline(self, state_dict)
        load_state_dict(self, state_dict)

    _replace(DataLoader2, "state_dict", acquaint_and_save)
    _replace(DataLoader2, "load_state_dict", check_and_load)


@_repair(issue=None)
def no_set_epoch() -> None:
    """``DataLoader2`` has no ``set_epoch``, which trainers call that choose an order by the number of the epoch.

    It has one now where a ``ShardReadingService`` is its reading service, or is in it.
    """
    from torchdata.dataloader2 import DataLoader2

    def set_epoch(self: Any) -> Callable[[int], None]:
        from wds_datapipes.reading.acquainting import epoch_setter

        return epoch_setter(self)

    _replace(DataLoader2, "set_epoch", property(set_epoch))
