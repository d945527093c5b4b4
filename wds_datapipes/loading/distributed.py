"""The ranks of a distributed run: their common seed, and detection of lost ranks."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from wds_datapipes.errors import RankLostError
from wds_datapipes.loading.data_parallel import DataParallelGroup
from wds_datapipes.loading.rank_agreement import check_facts_match, default_store

__all__ = ["Ranks"]

#: All ranks of the default process group share the data.
ALL_RANKS = DataParallelGroup.of(True)

#: The default time that ranks wait for each other, in seconds; the default of torch's process groups.
DEFAULT_TIMEOUT_S = 1800.0

#: The first and the longest pause between requests to the store, in seconds.
PAUSES_S = 0.0005, 0.05

#: How long the store may take to respond after the ranks' time limit has expired, in seconds.
ANSWER_S = 2.0

#: How long a leaving rank waits for the store and for the other ranks, in seconds.
LEAVE_S = 1.0

#: How long to wait for an abandoned thread, in seconds. Only a thread that is blocked in a store takes longer.
JOIN_S = 0.1

#: The number of characters shown of another rank's error.
SUMMARY_LENGTH = 500

T = TypeVar("T")

#: Replaces the seed if no rank resumes mid-epoch.
BEGINS = -1

#: The count of a rank that has arrived; a lower count means that it has not arrived completely.
ARRIVED = 2

#: Numbers the services of this process. Only their order, which is the same on all ranks, identifies them.
_numbers = itertools.count()


class Ranks:
    """Synchronizes the ranks of a run when a service starts and at the beginning of each epoch, and only then.

    The ranks use the store that torch's process group was initialized with, so nothing is sent per item, and the
    process group may be destroyed. All ranks must start their services in the same order, including those that read the
    same data as others, as in tensor parallelism: all ranks use the seed of rank 0.

    Each meeting has a gate, which either opens or shuts for all ranks. The rank that arrives last opens it. A rank
    that times out or leaves shuts it and records the reason. For a meeting, each rank sends a few short messages to the
    store. The entries of past meetings are deleted.

    Args:
        timeout_s: how long a rank waits for the others, in seconds; ``None`` means half an hour.
        group: the ranks that share the data; by default, all.

    Attributes:
        rank: the number of this rank in the default process group.
        size: the number of ranks in it.
        identity: the identity of this rank among those that share the data.

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(self, timeout_s: float | None, group: DataParallelGroup = ALL_RANKS) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ShardReadingService(distributed=True) requires a process group: first call "
                'torch.distributed.init_process_group, such as `init_process_group("gloo")` under torchrun. Without '
                "one, pass distributed=(rank, world_size)."
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.identity = group.identity
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        name = f"wds_datapipes/{next(_numbers)}"
        self._store = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]  # it is not in __all__
        self._run = ""  # unique among the runs that use the store
        self._begun, self._arrived = (
            -1,
            -1,
        )  # the last meeting that succeeded, and the last one at which this rank arrived
        self._resumed_seed: int | None = None
        self._facts: Mapping[str, Any] = {}
        self._firsts: Mapping[str, Any] = {}  # the facts of rank 0
        self._is_silent = self._has_left = False
        self._owner_pid = os.getpid()

    def gather(self, seed: int | None = None, facts: Mapping[str, Any] | None = None) -> int | None:
        """Wait until all ranks have started their services.

        Args:
            seed: the seed of the epoch that this rank resumes mid-epoch; ``None`` if it begins one.
            facts: what must be equal on all ranks.

        Returns:
            The seed of any rank that resumes mid-epoch, or ``None``.

        Raises:
            RankLostError: a rank has failed, or does not arrive in time.
            RuntimeError: the facts differ from those of rank 0.
        """
        self._resumed_seed, self._facts = seed, dict(facts or {})
        # torchrun restarts ranks but keeps the store. So no name in it is trusted until rank 0 has answered with a
        # token that this process has generated.
        found = self._in_time(self._name_run if self.rank == 0 else self._join_run)
        check_facts_match(self.rank, self._facts, 0, self._firsts)
        return None if found == BEGINS else found

    def meet(self, seed: int) -> int:
        """Wait until all ranks have reached the next epoch, and return the seed of rank 0.

        Raises:
            RankLostError: a rank has failed, has left, or does not arrive in time.
        """
        return self._in_time(lambda timeout: self._arrive(timeout, seed))

    def leave(self, error: BaseException | None = None) -> None:
        """Announce to the other ranks that this rank will not join their next meeting.

        Args:
            error: the exception that ends this rank, if any.
        """
        # A forked process has a copy of this object, but is not a rank.
        if os.getpid() != self._owner_pid or self._has_left or self._is_silent or not self._run:
            return
        self._has_left = True
        # Closing a generator early is not a failure.
        after = "" if error is None or isinstance(error, GeneratorExit) else f" after {_summarize(error)}"
        why = f"rank {self.rank} has ended its service{after}"
        # The store may have ended with the process that hosts it, and threads cannot start during interpreter shutdown.
        with suppress(RuntimeError, futures.TimeoutError):
            # The store sends no response to this, so this does not wait.
            self._store.set(self._gate(self._arrived + 1), json.dumps({"lost": why}))
            self._in_thread(self._clean_up, LEAVE_S, LEAVE_S)

    def _name_run(self, timeout: RankTimeout) -> int:
        """As rank 0: name the run, and send the name to every rank that requests it."""
        self._run = secrets.token_hex(8)
        self._publish_seed()
        self._store.set(self._key(0, "facts"), json.dumps(self._facts))
        self._store.add(self._key(0, 0), ARRIVED)
        answered_words: dict[int, str] = {}
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self._has(self._key(0, rank))]:
            for rank in missing:
                if self._has(f"word/{rank}") and answered_words.get(rank) != (word := self._get(f"word/{rank}")):
                    self._store.set(f"name/{rank}", json.dumps([word, self._run]))
                    answered_words[rank] = word
            if self._has(self._gate(0)):
                break
            if not timeout.pause():
                self._shut(0)
        self._arrived = 0
        identity = self._key(0, "seed")
        self._open(0, int(self._get(identity)) if self._has(identity) else BEGINS)
        self._store.delete_key(identity)
        return self._pass(timeout, 0)

    def _join_run(self, timeout: RankTimeout) -> int:
        """As another rank: request the name of the run from rank 0."""
        word, own = secrets.token_hex(8), (f"word/{self.rank}", f"name/{self.rank}")
        self._store.set(own[0], word)
        run = ""
        while not run:
            if self._has(own[1]):
                answered, name = json.loads(self._get(own[1]))
                run = name if answered == word else ""
            if not run and not timeout.pause():
                raise RankLostError(
                    _lost_message(0, f"rank {self.rank} waited {self._timeout_s:g} s (timeout_s) for rank 0")
                )
        self._run, self._arrived = run, 0
        self._publish_seed()
        self._store.add(self._key(0, self.rank), ARRIVED)
        found = self._pass(timeout, 0)
        self._firsts = json.loads(self._get(self._key(0, "facts")))
        for name in own:
            self._store.delete_key(name)
        return found

    def _publish_seed(self) -> None:
        """Publish the seed of the epoch in which this rank resumes."""
        if self._resumed_seed is not None:
            self._store.set(self._key(0, "seed"), str(self._resumed_seed))

    def _arrive(self, timeout: RankTimeout, seed: int) -> int:
        """Arrive at the next epoch, and return its seed."""
        epoch = self._begun + 1
        if self._arrived < epoch:  # else Ctrl-C was pressed at the gate, and this is a retry
            self._arrived = epoch
            if self.rank == 0:
                self._store.set(self._key(epoch, "seed"), json.dumps(seed))
            self._store.add(self._key(epoch, self.rank), 1)
            if self._store.add(self._key(epoch, "present"), 1) == self.size:
                self._open(epoch, json.loads(self._get(self._key(epoch, "seed"))))
                # These entries are no longer needed.
                over = self._key(epoch, "seed"), self._key(epoch, "present"), self._gate(epoch - 1)
                for name in (*over, self._key(epoch - 1, "facts")):
                    self._store.delete_key(name)
            self._store.add(self._key(epoch, self.rank), 1)  # so that a rank that dies in between is detected
        return self._pass(timeout, epoch)

    def _pass(self, timeout: RankTimeout, epoch: int) -> int:
        """Wait at a gate, and return the seed that it was opened with."""
        while not self._has(self._gate(epoch)):
            if not timeout.pause():
                self._shut(epoch)
        verdict = json.loads(self._get(self._gate(epoch)))
        self._store.delete_key(self._key(epoch, self.rank))
        if "lost" in verdict:
            raise RankLostError(_lost_message(epoch, verdict["lost"]))
        self._begun = self._arrived = epoch
        return int(verdict["seed"])

    def _open(self, epoch: int, seed: int) -> None:
        """Open a gate, unless it is shut."""
        self._store.compare_set(self._gate(epoch), "", json.dumps({"seed": seed}))

    def _shut(self, epoch: int) -> None:
        """Shut a gate at which this rank has timed out, unless it is open."""
        missing = [str(rank) for rank in range(self.size) if not self._has_arrived(epoch, rank)]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        why = f"rank {self.rank} waited {self._timeout_s:g} s (timeout_s) for {names}, dead or busy elsewhere"
        if self.identity.ranks < self.size:
            why += ". If some ranks have no loader, pass distributed=(rank, world_size), and seed the loaders alike"
        self._store.compare_set(self._gate(epoch), "", json.dumps({"lost": why}))

    def _clean_up(self, timeout: RankTimeout) -> None:
        """Delete the entries that are no longer needed; the store itself lives as long as any rank uses it."""
        epochs = range(max(self._begun, 0), self._arrived + 2)
        if self._store.add(f"{self._run}/left", 1) == self.size:
            for epoch, name in itertools.product(epochs, ("seed", "present", "facts", "gate")):
                self._store.delete_key(self._key(epoch, name))
            self._store.delete_key(f"{self._run}/left")
        elif self.rank == 0:  # its process may host the store, and may exit now
            others = [self._key(self._arrived, rank) for rank in range(1, self.size)]
            while any(map(self._has, others)) and timeout.pause():
                pass

    def _in_time(self, action: Callable[[RankTimeout], T]) -> T:
        """Run an action that depends on other ranks; raise if they or the store do not respond in time."""
        epoch = self._begun + 1
        try:
            return self._in_thread(action, self._timeout_s, self._timeout_s + ANSWER_S)
        except RankLostError:
            raise
        except futures.TimeoutError:
            self._is_silent = True
            why = f"the process group's store has not responded for {self._timeout_s:g} s (timeout_s)"
            raise RankLostError(
                _lost_message(epoch, f"{why}: rank 0 or torchrun, which hosts it, is unreachable")
            ) from None
        except RuntimeError as error:
            why = f"the process group's store does not respond ({_summarize(error)})"
            raise RankLostError(
                _lost_message(epoch, f"{why}: rank 0 or torchrun, which hosts it, has ended")
            ) from error

    def _in_thread(self, action: Callable[[RankTimeout], T], timeout_s: float, limit_s: float) -> T:
        """Run an action in a thread: torch's stores wait for some responses without a limit, and ignore Ctrl-C."""
        timeout = RankTimeout(timeout_s)
        answer: futures.Future[T] = futures.Future()

        def act() -> None:
            try:
                answer.set_result(action(timeout))
            except Exception as error:  # noqa: BLE001 - the other thread raises it
                answer.set_exception(error)

        # A daemon thread, because the interpreter waits for other threads before it exits. A loader may also be garbage
        # collected while the threading module holds a lock that it takes for non-daemon threads only.
        threading.Thread(target=act, name="wds_datapipes ranks", daemon=True).start()
        try:
            return answer.result(limit_s)
        finally:
            timeout.end()
            futures.wait([answer], JOIN_S)

    def _gate(self, epoch: int) -> str:
        return self._key(epoch, "gate")

    def _key(self, epoch: int, name: object) -> str:
        return f"{self._run}/{epoch}/{name}"

    def _has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def _has_arrived(self, epoch: int, rank: int) -> bool:
        identity = self._key(epoch, rank)
        return self._has(identity) and int(self._store.add(identity, 0)) == ARRIVED

    def _get(self, name: str) -> str:
        """Return the value of an existing key; the store would block on a missing one."""
        return str(self._store.get(name), "utf-8")


class RankTimeout:
    """A time limit with growing pauses between requests to the store.

    Args:
        limit_s: the limit, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._pause_s, self._longest_s = PAUSES_S
        self._ended = threading.Event()

    def pause(self) -> bool:
        """Wait briefly; return whether any time remains.

        Raises:
            CancelledError: the result is no longer needed.
        """
        left_s = self._deadline - time.monotonic()
        if self._ended.wait(max(0.0, min(self._pause_s, left_s))):
            raise futures.CancelledError
        self._pause_s = min(1.5 * self._pause_s, self._longest_s)
        return left_s > 0

    def end(self) -> None:
        """Make the waiting thread stop."""
        self._ended.set()


def _lost_message(epoch: int, why: str) -> str:
    what = f"begin epoch {epoch} of a ShardReadingService" if epoch else "start a ShardReadingService"
    return f"The ranks cannot {what} together: {why}."


def _summarize(error: BaseException) -> str:
    """Return an error's type and message, without the tracebacks that torch puts into the message."""
    torchs = ("Original Traceback", "Traceback", "This exception is thrown by", "Exception raised from", "frame #")
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", *torchs))]
    gist = f"{type(error).__name__}: {' '.join(lines)}".removesuffix(": ")
    return gist if len(gist) <= SUMMARY_LENGTH else f"{gist[:SUMMARY_LENGTH]} ..."
