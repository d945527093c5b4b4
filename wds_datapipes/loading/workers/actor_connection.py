"""The main process's connection to a worker on another host: calls of a Ray actor, and their replies."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wds_datapipes.counters import Skipped, sum_skipped
from wds_datapipes.errors import StateError, WorkerDiedError, plural, text_of
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.report import LOGGER, WorkerReport
from wds_datapipes.loading.transport.flow_control import CALLS_AHEAD, MAX_TOGETHER
from wds_datapipes.loading.transport.message_reader import ReceivedMessage
from wds_datapipes.loading.transport.protocol import HEADER, Header, Kind
from wds_datapipes.loading.transport.replies import Reply, ReplyReader
from wds_datapipes.loading.transport.status_page import Work
from wds_datapipes.loading.workers.connection import PULSE_S, WorkerConnection
from wds_datapipes.pipes.state.replay import is_replayed

#: A worker that dies this many times in succession before another of its items arrives is not started again.
MAX_DEATHS = 3

#: A worker that has not started after this time is logged, in seconds.
START_S = 60.0

#: The number of characters from the beginning of Ray's description of a death, and from its end, in messages.
DESCRIPTION = 200

#: Ray sends smaller replies along with the answer to a call, and others are fetched from the store of their node.
STORED_BYTES = 100_000

#: What may keep a worker from starting.
NOT_STARTED = (
    "The cluster may lack what worker_options requests, which `ray status` shows; or its host is still installing the "
    "runtime_env"
)

#: What is known of a worker before its first reply.
NO_REPLY = Reply([], Work(), Counter(), "")


class ActorConnection(WorkerConnection):
    """Receives items from an actor; another may take the place of one that has died.

    Args:
        name: the name of the worker, for messages.
        start: starts an actor, given the number of its first items that have a message each.
        timeout_s: the maximum time to wait for a reply, in seconds; ``None`` means no limit.
        restarts: how often another actor may take its place.

    Attributes:
        others: the connections to the workers of the loader, which are replaced at the same time.
    """

    def __init__(self, name: str, start: Callable[[int], Any], timeout_s: float | None, restarts: float) -> None:
        import ray

        super().__init__(name, ReplyReader(), timeout_s)
        self._ray: Any = ray
        self._session = self._find_session()
        self._start, self._restarts = start, restarts
        self.others: Sequence[ActorConnection] = ()
        self._start_actor(0)
        self._calls: deque[Any] = deque()
        self._messages: deque[ReceivedMessage] = deque()
        self._is_over = True
        self._request: Any = None
        self._taken = self._taken_bytes = 0
        self._deaths = self._deaths_here = 0
        self._last = NO_REPLY
        self._earlier = Work(), Counter[str](), Skipped()  # of the actors that have died
        self._skipped_before = self._skipped_again = Skipped()  # until this epoch, and until its last replay

    def begin(self, epoch: int, payload: object, base: WorkerState | str | None = None) -> None:
        """Begin an epoch in the actor."""
        self._check_connected()
        self.expect(epoch, base)
        self._skipped_before = self._sums()[2]
        with self._lock:
            self._request = payload
            self._call_first(payload)  # the actor first answers the calls of the previous epoch that are in flight

    def report(self) -> WorkerReport:
        """Return statistics of the worker until its last reply."""
        return replace(super().report(), host=self._find_place(), skipped=self._sums()[2])

    @property
    def shard(self) -> str:
        """The last shard that the worker has opened until its last reply, or ""."""
        return self._last.shard

    def close(self) -> None:
        """Forget the replies, and what actors start with, which frees the memory of both."""
        self._find_place()  # for reports
        is_free = self._lock.acquire(timeout=PULSE_S)  # it is not if a signal handler ends the loader
        del self._start, self._actor
        self._place, self.others = None, ()
        self._calls.clear()
        self._messages.clear()
        self._backlog.clear()
        if is_free:
            self._lock.release()

    def cut(self) -> None:
        """End the actor, which wakes any thread that waits for it."""
        self._closed = True
        self._kill()

    def replace_dead(self) -> None:
        """Replace the actor now if it has died, although the loop does not wait for its items yet."""
        errors = self._ray.exceptions
        with self._lock:
            if self._closed or self._is_over:
                return
            try:
                self._ray.get(self._place, timeout=0)
                self._place = self._actor.place.remote()  # it may have answered all other calls before it died
            except errors.GetTimeoutError:
                pass
            except errors.RayError:
                with suppress(WorkerDiedError):  # which is raised when it is the turn of this worker
                    while self._keep_next():
                        pass

    def _start_actor(self, alone: int) -> None:
        self._actor = self._start(alone)
        self._started, self._has_warned = time.monotonic(), False
        self._host, self._pid, self._place = "", 0, self._actor.place.remote()

    def _find_session(self) -> tuple[str, str]:
        """Return what identifies the connection of this process to a cluster."""
        context = self._ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    def _is_connected(self) -> bool:
        """Whether this process has the connection with which the actor was started."""
        return self._ray.is_initialized() and self._find_session() == self._session

    def _check_connected(self) -> None:
        """Raise an error if this process has left the cluster, because Ray would start another one."""
        if not self._is_connected():
            raise RuntimeError(
                f"This process has left the Ray cluster of {self.name} by ray.shutdown(), which has ended the worker. "
                "Call loader.shutdown() before that, and create a new loader after ray.init()"
            )

    def _find_place(self) -> str:
        """Return the name of the host on which the actor has started, or ""."""
        place = self._place
        if not self._host and place is not None and self._is_connected():
            with suppress(self._ray.exceptions.RayError):  # including that it has not started yet
                self._host, self._pid = self._ray.get(place, timeout=0)
        return self._host

    def _kill(self) -> None:
        if self._is_connected():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor)

    def _begin(self, epoch: int) -> None:  # noqa: ARG002  of every connection
        self._messages.clear()

    def _call_first(self, request: object) -> None:
        """Make the first calls of an epoch."""
        self._calls.clear()
        self._taken, self._taken_bytes, self._is_over = 0, 0, False
        self._call(request)
        for _ in range(CALLS_AHEAD - 1):
            self._call()

    def _call(self, request: object = None) -> None:
        method = self._actor.next_message
        self._calls.append(method.remote(self.epoch, self._taken, self._taken_bytes, request))

    def _receive_any(self) -> ReceivedMessage | None:
        errors = self._ray.exceptions
        while not self._messages:
            if not self._calls:
                return None
            self._check_connected()
            try:
                reply: Reply = self._ray.get(self._calls[0], timeout=0)
            except errors.GetTimeoutError:
                return None
            except errors.RayTaskError:  # the code of the actor could not run at all
                raise
            except errors.RayError as error:
                self._replace(error)
                return None
            self._calls.popleft()
            self._take(reply)
        return self._messages.popleft()

    def _take(self, reply: Reply) -> None:
        self._last = reply._replace(messages=[])
        size = 0
        for data, attached in reply.messages:
            header = Header._make(HEADER.unpack_from(data))
            size += header.size
            if header.kind in (Kind.ITEMS, Kind.PLAIN_ITEMS):
                self._taken += 1
                self._taken_bytes += header.size
                self._deaths_here = 0
            elif header.kind in (Kind.END, Kind.ERROR):
                self._is_over, self._deaths_here = True, 0
            self._messages.append(ReceivedMessage.of(header, data, attached))
        if not self._is_over:
            self._call()
        if size > STORED_BYTES:  # fetch the replies that are ready while the loop works
            self._ray.wait([*self._calls], num_returns=len(self._calls), timeout=0)

    def _wait_s(self, limit_s: float, events: int) -> bool:  # noqa: ARG002  of every connection
        if calls := [*self._calls]:
            self._ray.wait(calls[:1], timeout=limit_s)
        if self._deaths_here:  # others may have died with the same host, and start at the same time
            for other in self.others:
                other.replace_dead()
        if not self._has_warned and time.monotonic() - self._started > START_S and not self._find_place():
            self._has_warned = True
            LOGGER.warning("%s has not started for %g s. %s", self.name, START_S, NOT_STARTED)
        return False

    def _replace(self, error: Exception) -> None:
        """Continue with another actor after the last item that has arrived.

        Raises:
            WorkerDiedError: no other actor may take the place of this one, or can.
        """
        if self._closed:
            raise RuntimeError(self._closed_message())
        self._deaths += 1
        self._deaths_here += 1
        how = self._describe(error)
        if self._deaths > self._restarts:
            limit = (
                f" restart= allows {plural(int(self._restarts), 'restart')} of each worker." if self._restarts else ""
            )
            raise WorkerDiedError(f"{how}{limit}") from error
        if self._deaths_here >= MAX_DEATHS:
            raise WorkerDiedError(f"{how} It has died {MAX_DEATHS} times before the same item.") from error
        try:
            state = self.position.replace_process()
        except StateError as reason:
            raise WorkerDiedError(f"{how} It cannot be restarted: {reason}") from error
        LOGGER.warning("%s Another actor continues with the next item", how)
        self._kill()
        work, figures, skipped = self._sums()
        if is_replayed(state.stages):  # the next one skips the items of this epoch again
            self._skipped_again, skipped = skipped, self._skipped_before
        self._earlier = work, figures, skipped
        self._last, self.skipped = NO_REPLY._replace(shard=self._last.shard), Skipped()
        # One by one, up to the item that may have ended the process, so that the others before it are not lost again.
        self._start_actor(MAX_TOGETHER)
        if self._closed:  # by another thread meanwhile, which may not have seen the new actor
            self._kill()
            raise RuntimeError(self._closed_message())
        self._call_first((*self._request[:-1], state))

    def _describe(self, error: Exception) -> str:
        """Describe a death."""
        host, shard = self._find_place(), self._last.shard
        where = f" on host {host} (pid {self._pid})" if host else ", which has sent nothing yet,"
        shard = f" The last shard that it is known to have opened is {shard}." if shard else ""
        text = " ".join(text_of(error).split())
        text = text.partition("The actor is dead because ")[2] or text  # after a list of IDs
        text = text.partition(" Some common causes")[0].rstrip(". ")
        if len(text) > 2 * DESCRIPTION:
            text = f"{text[:DESCRIPTION]} ... {text[-DESCRIPTION:]}"
        return f"{self.name}{where} has died while its data was still needed ({type(error).__name__}: {text}).{shard}"

    def _sums(self) -> tuple[Work, Counter[str], Skipped]:
        """Return what the actors of this worker have done, their figures, and what they have skipped."""
        work, figures, skipped = self._earlier
        work = Work(*map(sum, zip(work, self._last.work, strict=True)))
        skipped = max(sum_skipped([skipped, self.skipped]), self._skipped_again, key=lambda each: each.total)
        return work, figures + self._last.figures, skipped

    def _status(self) -> tuple[int, Work, Counter[str]]:
        self._find_place()
        return self._pid, *self._sums()[:2]

    def _timeout_message(self) -> str:
        begin = f"{self.name} has sent nothing for timeout_s={self._timeout_s:g} s"
        if not (host := self._find_place()):
            return f"{begin}, and has not started. {NOT_STARTED}"
        return (
            f"{begin}. It runs on host {host} (pid {self._pid}), and the last shard that it is known "
            f"to have opened is {self.shard or 'none'}. It may be waiting for a disk or a store that does not respond; "
            "`py-spy dump --pid` shows where"
        )
