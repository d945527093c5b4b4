"""A worker on any host of a cluster, which answers each call with a message of items."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wds_datapipes.loading.transport.flow_control import CALL_TOGETHER_S
from wds_datapipes.loading.transport.message_writer import MessageWriter
from wds_datapipes.loading.transport.protocol import HEADER, Header, Kind
from wds_datapipes.loading.transport.serialization import SendableError, serialize
from wds_datapipes.loading.transport.shared_memory import Bytes
from wds_datapipes.loading.transport.status_page import Work
from wds_datapipes.loading.workers.worker import Worker, WorkerJob


class Reply(NamedTuple):
    """The answer to a call.

    Attributes:
        messages: the messages, each with the array that is its segment, the list of its arrays, or None. There are none
            if the worker is too far ahead, or its epoch is over.
        work: what the worker has done.
        figures: its figures.
        shard: the last shard that it opened, or "".
    """

    messages: list[tuple[bytes, Any]]
    work: Work
    figures: Counter[str]
    shard: str


class OwnPiece:
    """A piece of the memory of this process, which is copied when its message is sent.

    Attributes:
        number: the same for all, because each travels with its message.
        memory: its bytes.
    """

    def __init__(self, size: int) -> None:
        self.number = 0
        self.memory: Bytes = np.empty(size, np.uint8)

    def pass_on(self) -> Bytes:
        """Return the memory."""
        return self.memory


class OwnMemory:
    """The memory for the messages of a reply. A large piece is used again for the next reply."""

    passes_arrays = True

    def __init__(self) -> None:
        self._spare: OwnPiece | None = None
        self._taken: list[OwnPiece] = []

    def take(self, size: int) -> OwnPiece:
        """Return a piece of at least ``size`` bytes."""
        piece, self._spare = self._spare, None
        if piece is None or piece.memory.size < size:
            piece = OwnPiece(size)
        self._taken.append(piece)
        return piece

    def give_back(self, number: int) -> None:
        """Do nothing: `reuse` frees all pieces."""

    def reuse(self) -> None:
        """Use the memory of the previous reply again, of which the caller has a copy."""
        if self._taken:
            self._spare = max(self._taken, key=lambda piece: piece.memory.size)
            self._taken = []


class ReplyWriter(MessageWriter):
    """Collects the messages of a reply.

    Args:
        job: the job of the worker.
        host: the name of its host.
        alone: the number of its first items that have a message each.

    Attributes:
        messages: the messages for the next reply.
    """

    pool: OwnMemory

    def __init__(self, job: WorkerJob, host: str, alone: int) -> None:
        limits = {"window": job.window, "together": job.together}
        super().__init__(OwnMemory(), **limits, together_s=CALL_TOGETHER_S, name=f"{job.name} on host {host}")
        self._most, self._alone = job.together, alone
        self.messages: list[tuple[bytes, Any]] = []
        self.begin(0)

    def call(self, epoch: int, taken: int, taken_bytes: int) -> None:
        """Record how many messages of an epoch, and bytes in them, the loop had taken when it made the current call."""
        self.messages = []
        self.pool.reuse()
        self._together = 1 if self._items < self._alone else self._most
        self._count_waiting(self._ready)
        if epoch == self.epoch:
            self._taken, self._taken_bytes = taken, taken_bytes

    def reply(self) -> Reply:
        """Return the reply to the current call."""
        self._count_making()
        return Reply(self.messages, self._work(), self.counters.figures(), self.counters.shard)

    def receive_requests(self) -> None:
        """Do nothing: requests arrive with calls."""

    def wait(self) -> None:
        """Do nothing: there is nothing to do until the next call."""

    def pack_error(self) -> bytes:
        """Return the current exception for `send`, with the last shard, and what to do if this host lacks a file."""
        error, where = sys.exc_info()[1], self._where()
        while error is not None:
            if isinstance(error, FileNotFoundError) and error.filename:
                where += (
                    f". This host has no {error.filename!r}: the shards of workers on several hosts must be reachable "
                    "from each of them, in a file system that all mount under the same path, or in a store"
                )
                break
            if isinstance(error, ModuleNotFoundError):
                where += (
                    f". This host lacks the module {error.name!r}: install it there, or pass it with the runtime_env "
                    "of ray.init or of worker_options"
                )
                break
            error = error.__cause__ or error.__context__
        return serialize(SendableError(where))

    def _flush_later(self) -> None:
        """Do nothing: a reply has its items when the call returns."""

    def _send(self, header: Header, body: Sequence[bytes] = (), attached: Any = None) -> None:
        if isinstance(attached, np.ndarray):
            attached = attached[: header.size]
        self.messages.append((b"".join((HEADER.pack(*header), *body)), attached))


class RemoteWorker:
    """Runs a pipeline as a worker process does, one call at a time.

    Args:
        job: the job of the worker, without the code of the user.
        code: the pickle of its pipeline and of its two functions, which is opened where errors can be reported.
        folder: the working folder of the main process, which is entered if this host has it.
        alone: the number of its first items that have a message each.
    """

    def __init__(self, job: WorkerJob, code: bytes, folder: str | None, alone: int) -> None:
        torch.set_num_threads(1)
        if folder is not None and Path(folder).is_dir():
            os.chdir(folder)
        self._job, self._code = job, code
        self._writer = ReplyWriter(job, socket.gethostname(), alone)
        self._worker: Worker | None = None

    def place(self) -> tuple[str, int]:
        """Return the name of this host, and the ID of this process."""
        return socket.gethostname(), os.getpid()

    def next_message(self, epoch: int, taken: int, taken_bytes: int, request: Any = None) -> Reply:
        """Return the next message of items, or none if the worker is too far ahead, or the epoch is over.

        Args:
            epoch: the epoch.
            taken: the number of its messages that the loop has taken.
            taken_bytes: their size, in bytes.
            request: the data that the worker needs to begin the epoch, with the first call of an epoch.
        """
        writer = self._writer
        writer.call(epoch, taken, taken_bytes)
        if request is not None:
            writer.requests.append((epoch, request))
        try:
            if self._worker is None:
                pipe, init_fn, reset_fn = pickle.loads(self._code)  # noqa: S301  the main process has made it
                job = replace(self._job, pipe=pipe, init_fn=init_fn, reset_fn=reset_fn)
                self._worker = Worker(job, writer)
        except Exception:  # noqa: BLE001  the main process raises it again
            writer.send(Kind.ERROR, writer.pack_error())
            return writer.reply()
        while not (writer.messages or self._worker.is_waiting):
            self._worker.step()
        return writer.reply()
