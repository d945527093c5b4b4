"""A worker on any host of a cluster, which answers each call with a message of items."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from wds_datapipes.loading.transport.protocol import Kind
from wds_datapipes.loading.transport.replies import Reply, ReplyWriter
from wds_datapipes.loading.workers.worker import Worker, WorkerJob


class RemoteWorker:
    """Runs a pipeline as a worker process does, one call at a time.

    Args:
        job: the job of the worker, without the code of the user.
        code: the pickle of its pipeline and of its two functions, which is opened where errors can be reported.
        folder: the working folder of the main process, which is entered if this host lets it.
        alone: the number of its first items that have a message each.
    """

    def __init__(self, job: WorkerJob, code: bytes, folder: str | None, alone: int) -> None:
        torch.set_num_threads(1)
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)
        self._job, self._code = job, code
        name = f"{job.name} on host {socket.gethostname()}"
        self._writer = ReplyWriter(window=job.window, together=job.together, name=name, alone=alone)
        self._worker: Worker | None = None
        self._error = b""  # of its start

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
            self._make_message()
        except (Exception, SystemExit):
            raise
        except BaseException as error:  # such as KeyboardInterrupt, which Ray would take for the end of the call alone
            traceback.print_exc()  # Ray does not say where it was raised
            raise SystemExit(1) from error
        return writer.reply()

    def _make_message(self) -> None:
        writer = self._writer
        if self._worker is None and not self._error:
            try:
                self._worker = self._start()
            except Exception:  # noqa: BLE001  the main process raises it again
                self._error = writer.pack_error()
        if self._worker is None:
            writer.send(Kind.ERROR, self._error)
            return
        while not (writer.messages or self._worker.is_waiting):
            self._worker.step()

    def _start(self) -> Worker:
        """Open the code, once, since its pickle may take as much memory as it does, and its functions run once."""
        code, self._code = self._code, b""
        pipe, init_fn, reset_fn = pickle.loads(code)  # noqa: S301  the main process has made it
        del code
        return Worker(replace(self._job, pipe=pipe, init_fn=init_fn, reset_fn=reset_fn), self._writer)
