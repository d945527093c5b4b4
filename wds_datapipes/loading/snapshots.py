"""The states of a pipeline after each of its items, and which of the items the loop has received.

A state holds the positions of all samples in a shuffle buffer, but few states are ever needed. A worker therefore takes
only a snapshot after each item, and pickles the snapshots of a message together, with the changes to buffers since the
previous message. The main process unpickles a snapshot on request. Every item has an exact state, even if functions of
the pipeline draw random numbers or occasionally fail.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.samples.position_buffer import BufferHistory, plain_state

Snapshot = list[Any] | str | None
"""The snapshots of the stages with a state, None at the beginning of an epoch, or the reason why there is no state."""


def state_in(snapshot: Snapshot | WorkerState, histories: Mapping[int, BufferHistory] | None = None) -> WorkerState:
    """Return the state in a snapshot, or a state itself; ``histories`` are as in `plain_state`.

    Raises:
        StateError: the pipeline has no state.
    """
    if isinstance(snapshot, str):
        raise StateError(snapshot)
    return snapshot if isinstance(snapshot, WorkerState) else WorkerState.of(plain_state(snapshot, histories))


class SnapshotWriter:
    """Takes snapshots of a pipeline, and packs them for a `LoopPosition`.

    Args:
        pipe: the pipeline, or its graph, at the beginning of an epoch.
    """

    def __init__(self, pipe: Any) -> None:
        self._refusal = ""
        self._sent: dict[int, tuple[int, int]] = {}  # the number of changes and appended positions sent of each history
        try:
            self._snapshots = [stage.snapshot for stage in graph_of(pipe).stateful_stages()]
        except StateError as error:
            self._refusal = str(error)

    def snapshot(self) -> Snapshot:
        """Return a snapshot after the last item yielded; once this has failed, always the error's message."""
        if self._refusal:
            return self._refusal
        try:
            if len(self._snapshots) == 1:  # faster: a comprehension takes as long as a small item
                return [self._snapshots[0]()]
            return [snapshot() for snapshot in self._snapshots]
        except StateError as error:
            self._refusal = str(error)
            return self._refusal

    def pack(self, snapshots: Sequence[Snapshot]) -> bytes:
        """Return snapshots as bytes. Another thread may continue the iteration meanwhile."""
        file = io.BytesIO()
        pickler = _SnapshotPickler(file)
        pickler.dump(snapshots)
        parts: list[_Part] = []
        sent = dict[int, tuple[int, int]]()
        for number, history in pickler.histories.items():
            changes, appended = self._sent.get(number, (0, 0))
            new = history.changes[changes:], history.appended[appended:]
            parts.append((number, new[0], pickle.dumps(new[1], pickle.HIGHEST_PROTOCOL)))
            sent[number] = changes + len(new[0]), appended + len(new[1])
        self._sent = sent
        return pickle.dumps((file.getvalue(), parts), pickle.HIGHEST_PROTOCOL)


_Part: TypeAlias = "tuple[int, array[int], bytes]"
"""The additions to a `BufferHistory` since the previous message: its number, the changes, and the pickled positions."""


class _SnapshotPickler(pickle.Pickler):
    """Pickles snapshots with empty histories, and collects the histories."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.histories: dict[int, BufferHistory] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not BufferHistory:
            return NotImplemented
        self.histories[value.number] = value
        return BufferHistory, (value.number,)


class _Message(NamedTuple):
    """The snapshots of consecutive items.

    Attributes:
        first: the number of items of the epoch, up to and including the first of these.
        snapshots: their pickle.
        process: the number of the process that has sent them.
        histories: the numbers of the histories in that process that they refer to.
    """

    first: int
    snapshots: bytes
    process: int
    histories: Sequence[int]


class LoopPosition:
    """The items of one worker's epoch that the loop has received, and the state after the last of them.

    Args:
        base: the state from which the pipeline starts.

    Attributes:
        delivered: the number of items of this epoch that the loop has received; the loader counts them.
        earlier: the number of items that it received in earlier epochs.
    """

    def __init__(self, base: WorkerState | None = None) -> None:
        self.delivered = self.earlier = self._process = 0
        self.begin(base or WorkerState())

    def begin(self, base: WorkerState | str) -> None:
        """Begin an epoch.

        Args:
            base: the state from which the pipeline starts, or the reason why there is none.
        """
        self.earlier += self.delivered
        self.delivered = 0
        self._base: WorkerState | str = base
        self._received = 0
        self._messages: deque[_Message] = deque()
        self._parts: dict[tuple[int, int], list[_Part]] = {}  # of each history, by process and number

    @property
    def has_snapshots(self) -> bool:
        """Whether any snapshot has arrived."""
        return bool(self._messages)

    def add(self, data: bytes, count: int) -> None:
        """Add the snapshots of the next items.

        Args:
            data: the result of `SnapshotWriter.pack`.
            count: the number of items; if 0, the only snapshot replaces that of the previous item.
        """
        snapshots, parts = pickle.loads(data)  # noqa: S301 - written by this program
        for part in parts:
            self._parts.setdefault((self._process, part[0]), []).append(part)
        messages, numbers = self._messages, [part[0] for part in parts]
        messages.append(_Message(self._received + min(count, 1), snapshots, self._process, numbers))
        self._received += count
        if len(messages) > 1 and messages[1].first <= self.delivered:
            while len(messages) > 1 and messages[1].first <= self.delivered:
                messages.popleft()
            known = {(message.process, number) for message in messages for number in message.histories}
            self._parts = {each: self._parts[each] for each in known}

    def replace_process(self) -> WorkerState:
        """Return the state after the last item that has arrived, from which another process sends the following ones.

        Raises:
            StateError: the pipeline has no state.
        """
        self._process += 1
        return self.arrived()

    def arrived(self) -> WorkerState:
        """Return the state of the pipeline after the last item that has arrived.

        Raises:
            StateError: the pipeline has no state.
        """
        return self._state_after(self._received)

    def state(self) -> WorkerState:
        """Return the state of the pipeline after the last item that the loop has received.

        Raises:
            StateError: the pipeline has no state.
        """
        return self._state_after(self.delivered)

    def _state_after(self, items: int) -> WorkerState:
        """Return the state after some items of the epoch."""
        found = [message for message in [*self._messages] if message.first <= items]  # a thread may add some
        if not found:
            if isinstance(self._base, str):
                raise StateError(self._base)
            return self._base
        snapshots = pickle.loads(found[-1].snapshots)  # noqa: S301 - written by this program
        process, numbers = found[-1].process, found[-1].histories
        histories = {number: self._history(process, number) for number in numbers}
        return state_in(snapshots[items - found[-1].first], histories)

    def _history(self, process: int, number: int) -> BufferHistory:
        """Return the part of a history that has arrived."""
        history = BufferHistory(number)
        for _, changes, appended in [*self._parts[process, number]]:  # another thread may add parts
            history.changes += changes
            history.appended += pickle.loads(appended)  # noqa: S301 - written by this program
        return history
