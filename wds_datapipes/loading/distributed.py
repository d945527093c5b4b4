"""The ranks of a distributed run: their shares, the seed they share, and ranks that are missing."""

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
from wds_datapipes.loading.rank_agreement import check_alike
from wds_datapipes.loading.rank_and_worker import RankIdentity, split_by_rank

__all__ = ["Ranks"]

#: How long ranks wait for each other when nothing else is said, in seconds; that of torch's process groups.
DEFAULT_TIMEOUT_S = 1800.0

#: How long the first and the longest pause is before the store is asked again, in seconds.
PAUSES_S = 0.0005, 0.05

#: How long the store may take to answer after the ranks have waited for as long as they may, in seconds.
ANSWER_S = 2.0

#: How long a rank that leaves waits for the store and for the others, in seconds.
FAREWELL_S = 1.0

#: How long the end of a thread that is no longer needed may take, in seconds; it takes longer only in a store's hands.
JOIN_S = 0.1

#: How much of another rank's error is told, in characters.
GIST_LENGTH = 500

T = TypeVar("T")

#: What is in the place of a seed where no rank goes on in the middle of an epoch.
BEGINS = -1

#: What is at the place of a rank that has come; with less, it has not come all the way.
COME = 2

_numbers = itertools.count()


class Ranks:
    """Lets the ranks of a run meet when a service starts and at the beginning of each epoch, and only there.

    They meet at the store that torch's process group was set up with, so nothing is sent for each item, and no
    process group has to be kept. All ranks must start their services in the same order.

    At each meeting there is a gate, which all find open or all find shut. The rank that comes last opens it. A rank
    that has waited for too long, or that has left, shuts it, and says why. A meeting takes each rank a few short
    messages to the store, which keeps nothing of meetings that are over.

    Args:
        timeout_s: how long a rank waits for the others, in seconds; None is for half an hour.

    Attributes:
        rank: the number of this one.
        size: how many there are.

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(self, timeout_s: float | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ShardReadingService(distributed=True) needs torch.distributed.init_process_group to have been called, "
                'as `init_process_group("gloo")` under torchrun does.'
            )
        from torch.distributed import distributed_c10d  # where torch has no distributed part, it cannot be imported

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        store = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"wds_datapipes/{next(_numbers)}", store)
        self._run = ""  # no other run that the store has seen has this name
        self._begun, self._came = -1, -1  # meetings: the last that was a success, and the last that this rank came to
        self._going_on: int | None = None
        self._facts: Mapping[str, Any] = {}
        self._firsts: Mapping[str, Any] = {}  # those of rank 0
        self._is_silent = self._has_left = False
        self._owner_pid = os.getpid()

    def gather(self, seed: int | None = None, facts: Mapping[str, Any] | None = None) -> int | None:
        """Wait until all ranks have started their services.

        Args:
            seed: of the epoch in the middle of which this rank goes on; None if it begins one.
            facts: what all ranks have to have alike.

        Returns:
            That of any rank which goes on in the middle of an epoch, or None.

        Raises:
            RankLostError: one of them has failed, or does not come in time.
            RuntimeError: the facts are not those of rank 0.
        """
        self._going_on, self._facts = seed, dict(facts or {})
        # torchrun restarts ranks with the store as they left it. So no name in it can be trusted, until rank 0 has
        # answered to a word that this process has made up.
        found = self._in_time(self._call if self.rank == 0 else self._answer)
        check_alike(self.rank, self._facts, 0, self._firsts)
        return None if found == BEGINS else found

    @property
    def place(self) -> RankIdentity:
        """Which rank this is, and among how many."""
        return RankIdentity(self.size, self.rank)

    def split(self, pipe: Any) -> Any:
        """Give this rank its share of the data."""
        return split_by_rank(pipe, self.place)

    def meet(self, seed: int) -> int:
        """Wait until all ranks have come to the next epoch, and return the seed of rank 0.

        Raises:
            RankLostError: one of them has failed, has left, or does not come in time.
        """
        return self._in_time(lambda patience: self._come(patience, seed))

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others, once they wait for it at their next meeting, that this rank will not come.

        Args:
            error: what went wrong here, if anything did.
        """
        # A forked process has a copy of this object, and is no rank.
        if os.getpid() != self._owner_pid or self._has_left or self._is_silent or not self._run:
            return
        self._has_left = True
        # A generator that is broken off has not failed.
        after = "" if error is None or isinstance(error, GeneratorExit) else f" after {_gist(error)}"
        why = f"rank {self.rank} has ended its service{after}"
        # The store goes with the process that has it, and no thread starts when the interpreter ends.
        with suppress(RuntimeError, futures.TimeoutError):
            # The store does not answer to this, so this does not wait for it.
            self._store.set(self._gate(self._came + 1), json.dumps({"lost": why}))
            self._in_thread(self._take_leave, FAREWELL_S, FAREWELL_S)

    def _call(self, patience: RankTimeout) -> int:
        """As rank 0: give the run its name, and tell it every rank that asks."""
        self._run = secrets.token_hex(8)
        self._tell()
        self._store.set(self._place(0, "facts"), json.dumps(self._facts))
        self._store.add(self._place(0, 0), COME)
        told: dict[int, str] = {}
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self._has(self._place(0, rank))]:
            for rank in missing:
                if self._has(f"word/{rank}") and told.get(rank) != (word := self._get(f"word/{rank}")):
                    self._store.set(f"name/{rank}", json.dumps([word, self._run]))
                    told[rank] = word
            if self._has(self._gate(0)):
                break
            if not patience.pause():
                self._shut(0)
        self._came = 0
        place = self._place(0, "seed")
        self._open(0, int(self._get(place)) if self._has(place) else BEGINS)
        self._store.delete_key(place)
        return self._pass(patience, 0)

    def _answer(self, patience: RankTimeout) -> int:
        """As another rank: ask rank 0 for the run's name."""
        word, own = secrets.token_hex(8), (f"word/{self.rank}", f"name/{self.rank}")
        self._store.set(own[0], word)
        run = ""
        while not run:
            if self._has(own[1]):
                answered, name = json.loads(self._get(own[1]))
                run = name if answered == word else ""
            if not run and not patience.pause():
                raise RankLostError(
                    _complaint(0, f"rank {self.rank} waited {self._timeout_s:g} s (timeout_s) for rank 0")
                )
        self._run, self._came = run, 0
        self._tell()
        self._store.add(self._place(0, self.rank), COME)
        found = self._pass(patience, 0)
        self._firsts = json.loads(self._get(self._place(0, "facts")))
        for name in own:
            self._store.delete_key(name)
        return found

    def _tell(self) -> None:
        """Tell the others in which epoch this rank goes on."""
        if self._going_on is not None:
            self._store.set(self._place(0, "seed"), str(self._going_on))

    def _come(self, patience: RankTimeout, seed: int) -> int:
        """Come to the next epoch, and return its seed."""
        epoch = self._begun + 1
        if self._came < epoch:  # else somebody has pressed Ctrl-C at the gate, and tries again
            self._came = epoch
            if self.rank == 0:
                self._store.set(self._place(epoch, "seed"), json.dumps(seed))
            self._store.add(self._place(epoch, self.rank), 1)
            if self._store.add(self._place(epoch, "present"), 1) == self.size:
                self._open(epoch, json.loads(self._get(self._place(epoch, "seed"))))
                # Nobody needs these any more.
                over = self._place(epoch, "seed"), self._place(epoch, "present"), self._gate(epoch - 1)
                for name in (*over, self._place(epoch - 1, "facts")):
                    self._store.delete_key(name)
            self._store.add(self._place(epoch, self.rank), 1)  # so that whoever dies in between is known
        return self._pass(patience, epoch)

    def _pass(self, patience: RankTimeout, epoch: int) -> int:
        """Wait at a gate, and return the seed that it was opened with."""
        while not self._has(self._gate(epoch)):
            if not patience.pause():
                self._shut(epoch)
        verdict = json.loads(self._get(self._gate(epoch)))
        self._store.delete_key(self._place(epoch, self.rank))
        if "lost" in verdict:
            raise RankLostError(_complaint(epoch, verdict["lost"]))
        self._begun = self._came = epoch
        return int(verdict["seed"])

    def _open(self, epoch: int, seed: int) -> None:
        """Open a gate, unless it is shut."""
        self._store.compare_set(self._gate(epoch), "", json.dumps({"seed": seed}))

    def _shut(self, epoch: int) -> None:
        """Shut a gate where this rank has waited for too long, unless it is open."""
        missing = [str(rank) for rank in range(self.size) if not self._has_come(epoch, rank)]
        whom = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        why = f"rank {self.rank} waited {self._timeout_s:g} s (timeout_s) for {whom}, dead or busy with something else"
        self._store.compare_set(self._gate(epoch), "", json.dumps({"lost": why}))

    def _take_leave(self, patience: RankTimeout) -> None:
        """Leave nothing in the store that nobody needs, and do not take the store away from who does."""
        epochs = range(max(self._begun, 0), self._came + 2)
        if self._store.add(f"{self._run}/left", 1) == self.size:
            for epoch, name in itertools.product(epochs, ("seed", "present", "facts", "gate")):
                self._store.delete_key(self._place(epoch, name))
            self._store.delete_key(f"{self._run}/left")
        elif self.rank == 0:  # its process may have the store, and may end now
            others = [self._place(self._came, rank) for rank in range(1, self.size)]
            while any(map(self._has, others)) and patience.pause():
                pass

    def _in_time(self, action: Callable[[RankTimeout], T]) -> T:
        """Do what needs other ranks, and say what is wrong when they, or the store, do not answer."""
        epoch = self._begun + 1
        try:
            return self._in_thread(action, self._timeout_s, self._timeout_s + ANSWER_S)
        except RankLostError:
            raise
        except futures.TimeoutError:
            self._is_silent = True
            why = f"the process group's store has not answered for {self._timeout_s:g} s (timeout_s)"
            raise RankLostError(
                _complaint(epoch, f"{why}: rank 0 or torchrun, which has it, is out of reach")
            ) from None
        except RuntimeError as error:
            why = f"the process group's store does not answer ({_gist(error)})"
            raise RankLostError(_complaint(epoch, f"{why}: rank 0 or torchrun, which has it, has ended")) from error

    def _in_thread(self, action: Callable[[RankTimeout], T], patience_s: float, limit_s: float) -> T:
        """Do something in a thread, since torch's stores wait for ever for some answers, and also after Ctrl-C."""
        patience = RankTimeout(patience_s)
        answer: futures.Future[T] = futures.Future()

        def act() -> None:
            try:
                answer.set_result(action(patience))
            except Exception as error:  # noqa: BLE001 - the other thread raises it
                answer.set_exception(error)

        # A daemon, because an interpreter waits for other threads before it ends; and a loader may be found to be
        # garbage while the threading module holds a lock that it takes for others only.
        threading.Thread(target=act, name="wds_datapipes ranks", daemon=True).start()
        try:
            return answer.result(limit_s)
        finally:
            patience.end()
            futures.wait([answer], JOIN_S)

    def _gate(self, epoch: int) -> str:
        return self._place(epoch, "gate")

    def _place(self, epoch: int, name: object) -> str:
        return f"{self._run}/{epoch}/{name}"

    def _has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def _has_come(self, epoch: int, rank: int) -> bool:
        place = self._place(epoch, rank)
        return self._has(place) and int(self._store.add(place, 0)) == COME

    def _get(self, name: str) -> str:
        """Return what the store has under a name that is there; for another one it would wait."""
        return str(self._store.get(name), "utf-8")


class RankTimeout:
    """Says how long to wait until the store is asked again, and when it has been asked for long enough.

    Args:
        limit_s: how long that is, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._pause_s, self._longest_s = PAUSES_S
        self._ended = threading.Event()

    def pause(self) -> bool:
        """Wait a little; return whether there is time left.

        Raises:
            CancelledError: nobody waits for the answer any more.
        """
        left_s = self._deadline - time.monotonic()
        if self._ended.wait(max(0.0, min(self._pause_s, left_s))):
            raise futures.CancelledError
        self._pause_s = min(1.5 * self._pause_s, self._longest_s)
        return left_s > 0

    def end(self) -> None:
        """End the thread that waits."""
        self._ended.set()


def _complaint(epoch: int, why: str) -> str:
    what = f"begin epoch {epoch} of a ShardReadingService" if epoch else "start a ShardReadingService"
    return f"The ranks cannot {what} together: {why}."


def _gist(error: BaseException) -> str:
    """Return an error's type and message, without the tracebacks that torch puts into the message."""
    torchs = ("Original Traceback", "Traceback", "This exception is thrown by", "Exception raised from", "frame #")
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", *torchs))]
    gist = f"{type(error).__name__}: {' '.join(lines)}".removesuffix(": ")
    return gist if len(gist) <= GIST_LENGTH else f"{gist[:GIST_LENGTH]} ..."
