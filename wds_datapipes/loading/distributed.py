"""The ranks of a distributed run: their common seed, the facts that they must share, and detection of lost ranks."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.utils.data import get_worker_info

from wds_datapipes.errors import RankLostError, text_of
from wds_datapipes.io.daemon_threads import start_call
from wds_datapipes.loading.data_parallel_group import DataParallelGroup
from wds_datapipes.loading.rank_facts import Facts, check_facts_match, digest
from wds_datapipes.pipes.graph import graph_of

#: All ranks of the default process group share the data.
ALL_RANKS = DataParallelGroup.of(True)

#: The default time that ranks wait for each other, in seconds; the default of torch's process groups.
DEFAULT_TIMEOUT_S = 1800.0

#: How long the store may take to respond to a worker.
CONNECT = timedelta(seconds=5)

#: The first and the longest pause between requests to the store, in seconds.
PAUSES_S = 0.0005, 0.05

#: How long the store may take to respond after the ranks' time limit has expired, in seconds.
ANSWER_S = 2.0

#: How long a leaving rank waits for the store and for the other ranks, in seconds.
LEAVE_S = 1.0

#: How long to wait for an abandoned thread, in seconds. Only a thread that is blocked in a store call takes longer.
JOIN_S = 0.1

#: The number of characters shown of another rank's error.
SUMMARY_LENGTH = 500

#: The count of a rank that has arrived; a lower count means that its arrival is incomplete.
ARRIVED = 2

#: What the store returns for a report that does not exist.
MISSING = "-"

T = TypeVar("T")
Pause: TypeAlias = Callable[[], bool]

#: The numbers of pipelines of each kind in this process, and of those whose ranks meet. The n-th one corresponds to the
#: n-th one on other ranks.
_numbers = Counter[str]()


class Ranks:
    """The ranks of a run, which agree through the store of the default process group.

    This compares what each rank has on its own, and waits for all of them. `share_on_host` is for what one rank of a
    host computes for the others.

    `compare` does not wait. The ranks of a `ShardReadingService` also meet when it starts and at the beginning of each
    epoch, but send nothing per item. All ranks, including those that read the same data, as in tensor parallelism, must
    then start their services in the same order, because all of them use the seed of rank 0.

    Each meeting has a gate, which either opens or shuts for all ranks. The rank that arrives last opens it. A rank that
    times out or leaves shuts it and records the reason. Each rank sends a few short messages to the store per meeting,
    and the entries of past meetings are deleted. Because torchrun keeps its store when it restarts ranks, the names of
    entries include the attempt.

    Args:
        pipe: the pipeline. The n-th one with the same stages corresponds to the n-th one on other ranks.
        group: the ranks that share the data; by default, all.
        timeout_s: how long a rank waits for the others, in seconds; ``None`` means half an hour.

    Attributes:
        rank: the number of this rank in the default process group.
        size: the number of ranks in it.
        instance: this rank among those that share the data.
    """

    def __init__(self, pipe: Any, group: DataParallelGroup = ALL_RANKS, timeout_s: float | None = None) -> None:
        self.size, self.rank = ALL_RANKS.rank.ranks, ALL_RANKS.rank.rank
        self.instance = group.rank
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._name = _number(f"alike/{self.size}/{digest(type(stage).__name__ for stage in graph_of(pipe).stages)}")
        self._address: tuple[str, int] | None = None
        self._meetings = ""
        self._host: Any = None  # the store of the meetings, even if the group is destroyed
        self._begun = self._arrived = -1  # the last meeting that succeeded, and the last one at which this rank arrived
        self._is_silent = self._has_left = False
        self._owner_pid = os.getpid()

    def compare(self, facts: Facts) -> None:
        """Publish facts, and compare them with those that neighboring ranks have published so far under the same names.

        The rank that comes last finds any difference. A worker process opens its own connection if the store is a
        ``TCPStore``.

        Raises:
            RuntimeError: the facts differ.
        """
        found: dict[int, Facts] = {}
        with suppress(RuntimeError):  # the group was destroyed, or its store is unreachable
            if self.size > 1 and (store := self._store()) is not None:
                name = f"{self._name}/{' '.join(facts)}"
                store.set(f"{name}/{self.rank}", json.dumps(facts))
                for rank in {(self.rank + step) % self.size for step in (1, -1)} - {self.rank}:
                    if store.check([f"{name}/{rank}"]):
                        found[rank] = json.loads(store.get(f"{name}/{rank}"))
        for rank, others in found.items():
            check_facts_match(self.rank, facts, rank, others)

    def gather(self, seed: int | None = None, facts: Mapping[str, Any] | None = None) -> int | None:
        """Wait until all ranks have started their services.

        Args:
            seed: the seed of the epoch that this rank resumes mid-epoch; ``None`` if it begins one.
            facts: the facts that must be equal on all ranks.

        Returns:
            The seed of any rank that resumes mid-epoch, or ``None``.

        Raises:
            RankLostError: a rank has failed, or does not arrive in time.
            RuntimeError: there is no process group; or the facts differ from those of rank 0.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ShardReadingService(distributed=True) requires a process group: first call "
                'torch.distributed.init_process_group, such as `init_process_group("gloo")` under torchrun. Without '
                "one, pass distributed=(rank, world_size)."
            )
        self._meetings, self._host = _number("meetings"), self._store()
        own = dict(facts or {})
        found, firsts = self._meet(seed, own)
        check_facts_match(self.rank, own, 0, firsts)
        return found

    def meet(self, seed: int) -> int:
        """Wait until all ranks have reached the next epoch, and return the seed of rank 0.

        Raises:
            RankLostError: a rank has failed, has left, or does not arrive in time.
        """
        found, _ = self._meet(seed if self.rank == 0 else None)
        return seed if found is None else found

    def share(self, report: str, *, reads: bool) -> list[str]:
        """Publish a report of this rank without waiting for other ranks.

        Args:
            report: the report.
            reads: whether to return the latest report of each rank that has published one, which takes a request per
                rank; otherwise, there is a single request.

        Raises:
            RankLostError: the store of the process group does not respond.
        """

        def exchange(_: Pause) -> list[str]:
            if not self._has_left:
                self._host.set(self._key("report", self.rank), report)
            keys = [self._key("report", rank) for rank in range(self.size)] if reads else []
            found = [self._host.compare_set(key, MISSING, MISSING).decode() for key in keys]
            return [text for text in found if text != MISSING]

        return self._ask(None, exchange)

    def leave(self, error: BaseException | None = None) -> None:
        """Announce to the other ranks that this rank will not join their next meeting.

        Args:
            error: the exception that ends this rank, if any.
        """
        # A forked process has a copy of this object, but is not a rank.
        if os.getpid() != self._owner_pid or self._has_left or self._is_silent or not self._meetings:
            return
        self._has_left = True
        # Closing a generator early is not a failure.
        after = "" if error is None or isinstance(error, GeneratorExit) else f" after {_summarize(error)}"
        why = f"rank {self.rank} has ended its service{after}"
        # The store may have ended with the process that hosts it, and threads cannot start during interpreter shutdown.
        with suppress(RuntimeError, futures.TimeoutError):
            self._in_thread(lambda pause: self._leave(pause, why), LEAVE_S, LEAVE_S)

    def _meet(self, seed: int | None, facts: Facts | None = None) -> tuple[int | None, Facts]:
        """Meet the other ranks; return the seed that any of them brings, or None, and the facts of rank 0."""
        epoch = self._begun + 1
        return self._ask(epoch, lambda pause: self._arrive(pause, epoch, seed, facts))

    def _ask(self, epoch: int | None, action: Callable[[Pause], T]) -> T:
        """Return the result of an action that calls the store, for an epoch or for a report.

        Raises:
            RankLostError: the store does not respond.
        """
        try:
            return self._in_thread(action, self._timeout_s, self._timeout_s + ANSWER_S)
        except RankLostError:
            raise
        except futures.TimeoutError:
            self._is_silent = True
            why = f"the process group's store has not responded for {self._timeout_s:g} s (timeout_s)"
            raise _lost(epoch, f"{why}: rank 0 or torchrun, which hosts it, is unreachable") from None
        except RuntimeError as error:
            why = f"the process group's store does not respond ({_summarize(error)})"
            raise _lost(epoch, f"{why}: rank 0 or torchrun, which hosts it, has ended") from error

    def _arrive(self, pause: Pause, epoch: int, seed: int | None, facts: Facts | None) -> tuple[int | None, Facts]:
        """Arrive at a meeting, wait at its gate, and return the seed and the facts with which it was opened."""
        store = self._host
        if self._arrived < epoch:  # otherwise, this is a retry after Ctrl-C at the gate
            self._arrived = epoch
            if seed is not None:
                store.set(self._key(epoch, "seed"), json.dumps(seed))
            if facts is not None and self.rank == 0:
                store.set(self._key(epoch, "facts"), json.dumps(facts))
            store.add(self._key(epoch, self.rank), 1)
            if store.add(self._key(epoch, "present"), 1) == self.size:
                brought = {
                    name: json.loads(store.get(self._key(epoch, name)))
                    for name in ("seed", "facts")
                    if store.check([self._key(epoch, name)])
                }
                # Opens the gate, unless it is shut.
                store.compare_set(self._key(epoch, "gate"), "", json.dumps(brought))
                self._forget(epoch, "seed", "facts", "present")
                self._forget(epoch - 1, "gate")
            store.add(self._key(epoch, self.rank), 1)  # a rank that dies in between never gets here, and is detected
        while not store.check([self._key(epoch, "gate")]):
            if not pause():
                self._shut(epoch)
        verdict = json.loads(store.get(self._key(epoch, "gate")))
        self._forget(epoch, self.rank)
        if "lost" in verdict:
            raise _lost(epoch, verdict["lost"])
        self._begun = epoch
        return verdict.get("seed"), verdict.get("facts", {})

    def _shut(self, epoch: int) -> None:
        """Shut a gate at which this rank has timed out, unless it is open."""
        store, keys = self._host, [self._key(epoch, rank) for rank in range(self.size)]
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key]) or store.add(key, 0) < ARRIVED]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        why = f"rank {self.rank} waited {self._timeout_s:g} s (timeout_s) for {names}, dead or busy elsewhere"
        if self.instance.ranks < self.size:
            why += ". If some ranks have no loader, pass distributed=(rank, world_size), and seed the loaders alike"
        store.compare_set(self._key(epoch, "gate"), "", json.dumps({"lost": why}))

    def _leave(self, pause: Pause, why: str) -> None:
        """Shut the next gate, and delete the entries that are no longer needed."""
        store, following = self._host, self._arrived + 1
        # The store sends no response to set(), so this does not wait.
        store.set(self._key(following, "gate"), json.dumps({"lost": why}))
        self._forget("report", self.rank)
        if store.add(self._key(following, "left"), 1) == self.size:
            self._forget(following, "left", "gate")
            self._forget(self._arrived, "gate")
        elif self.rank == 0:  # its process may host the store, and may exit now
            others = [self._key(self._arrived, rank) for rank in range(1, self.size)]
            while any(store.check([name]) for name in others) and pause():
                pass

    def _store(self) -> Any:
        """Return the store of the process group; ``None`` in a worker that cannot connect to it."""
        # Imported here because builds of torch without distributed support lack these. __all__ does not list them.
        from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

        if get_worker_info() is not None:
            # A fork shares the main process's connection, so it needs its own.
            return self._address and TCPStore(*self._address, is_master=False, timeout=CONNECT)
        store = distributed_c10d._get_default_store()
        host = store
        while isinstance(host, PrefixStore):
            host = host.underlying_store
        if isinstance(host, TCPStore):
            self._address = host.host, host.port
        return host

    def _key(self, epoch: int | str, name: object) -> str:
        return f"{self._meetings}/{epoch}/{name}"

    def _forget(self, epoch: int | str, *names: object) -> None:
        for name in names:
            self._host.delete_key(self._key(epoch, name))

    def _in_thread(self, action: Callable[[Pause], T], timeout_s: float, limit_s: float) -> T:
        """Run an action in a thread, because torch's stores wait for some responses without a limit and ignore Ctrl-C.

        Args:
            action: called with a function that waits before the next request and returns whether time remains.
            timeout_s: how long that function returns True, in seconds.
            limit_s: how long to wait for the result, in seconds.
        """
        ended, deadline = threading.Event(), time.monotonic() + timeout_s
        pauses_s = (min(PAUSES_S[0] * 1.5**number, PAUSES_S[1]) for number in range(sys.maxsize))

        def pause() -> bool:
            left_s = deadline - time.monotonic()
            if ended.wait(max(0.0, min(next(pauses_s), left_s))):
                raise futures.CancelledError  # the result is no longer needed
            return left_s > 0

        # A daemon thread, because the interpreter waits for all others before it exits. Besides, a loader may be
        # garbage-collected while the threading module holds a lock that only non-daemon threads need.
        answer = start_call(lambda: action(pause))
        try:
            return answer.result(limit_s)
        finally:
            ended.set()
            futures.wait([answer], JOIN_S)


def _number(what: str) -> str:
    """Return the name of the next object of a kind; the name differs between attempts of torchrun."""
    number, attempt = _numbers[what], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _numbers[what] += 1
    return f"wds_datapipes/{attempt}/{what}/{number}"


def _lost(epoch: int | None, why: str) -> RankLostError:
    what = f"begin epoch {epoch} of a ShardReadingService" if epoch else "start a ShardReadingService"
    what = "report" if epoch is None else what
    return RankLostError(f"The ranks cannot {what} together: {why}.")


def _summarize(error: BaseException) -> str:
    """Return an error's type and the first line of its message, because torch adds tracebacks."""
    return f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}".removesuffix(": ")[:SUMMARY_LENGTH]
