"""The pool of worker processes on this host."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from multiprocessing.process import BaseProcess
from socket import socket
from typing import Any

from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.loading.transport.protocol import new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.workers.process_connection import ProcessConnection
from wds_datapipes.loading.workers.shutdown import (
    ParentWatch,
    close_process,
    disown_process,
    end_processes,
    run_watched,
)
from wds_datapipes.loading.workers.worker import Connections, Payload, WorkerJob, run_worker


class WorkerPool:
    """Starts worker processes, and ends them.

    Args:
        jobs: the job of each worker.
        method: the start method of the processes, such as ``"fork"``.
        timeout_s: the maximum time to wait without a message from a worker, in seconds; ``None`` means no limit.
        dispatching: the job of the dispatching process, if there is one.

    Attributes:
        workers: the connection to each worker.
        dispatcher: the connection to the dispatching process, if there is one.
    """

    def __init__(
        self, jobs: Sequence[WorkerJob], method: str, timeout_s: float | None, dispatching: WorkerJob | None = None
    ) -> None:
        self.workers: list[ProcessConnection] = []
        self.dispatcher: ProcessConnection | None = None
        self._timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._channels: list[socket] = []
        self._context: Any = multiprocessing.get_context(method)
        self._owner_pid = os.getpid()
        self._closed = False
        if multiprocessing.current_process().daemon:
            raise RuntimeError("A daemonic process, such as a worker, cannot start processes: use num_workers=0 in it.")
        self._parent_watch = ParentWatch()
        links: list[tuple[socket, socket]] = []
        try:
            if dispatching is not None:
                links = [new_channel() for _ in jobs]
                self.dispatcher = self._start("The dispatching process", dispatching, links)
            for number, job in enumerate(jobs):
                self.workers.append(self._start(f"Worker {number}", job, links, number))
            # If one process ends, every reader needs to know, because data is missing.
            pairs = list(zip(self._connections(), self._processes, strict=True))
            for number, (connection, _) in enumerate(pairs):
                connection.dispatcher = None if connection is self.dispatcher else self.dispatcher
                for other in (pairs[number], *pairs[:number], *pairs[number + 1 :]):
                    connection.watch(*other)
        except BaseException:
            self.close()
            raise
        finally:
            for end in chain.from_iterable(links):
                end.close()

    def close(self) -> None:
        """Terminate all processes, whatever their state, and free their resources."""
        # A forked process has a copy of this object, but does not own the processes.
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        for connection in self._connections():
            connection.cut()
        end_processes(self._processes)
        for connection in self._connections():
            connection.close()
        for channel in self._channels:  # including those of processes that could not be started
            channel.close()
        for process in self._processes:
            close_process(process)
        self._parent_watch.close()

    def _connections(self) -> list[ProcessConnection]:
        """Return the connections to the processes, in the order in which they were started."""
        return [*([] if self.dispatcher is None else [self.dispatcher]), *self.workers]

    def _start(
        self, name: str, job: WorkerJob, links: Sequence[tuple[socket, socket]], number: int | None = None
    ) -> ProcessConnection:
        """Start a process; return the connection to it.

        Args:
            name: its name.
            job: its job.
            links: the two ends of the connection of the dispatching process to each worker.
            number: the number of the worker, or ``None`` for the dispatching process.
        """
        try:
            near, far = new_channel()
            self._channels.append(near)
            if number is None:
                connections = Connections(far, targets=[target for target, _ in links])
            else:
                connections = Connections(far, source=links[number][1] if links else None)
            with far:
                self._start_process(job, connections, list(chain.from_iterable(links)))
        except OSError as error:
            raise OSError(error.errno, f"{name} cannot be started: {error.strerror}") from error
        return ProcessConnection(name, Receiver(near, window=job.window), self._timeout_s)

    def _start_process(self, job: WorkerJob, connections: Connections, ends: Sequence[socket]) -> None:
        # A fork closes its copies of the objects that only other processes need.
        own = {id(connections.source), *map(id, connections.targets)}
        unwanted = [*self._channels, *(end for end in ends if id(end) not in own)]
        unwanted = unwanted if self._context.get_start_method() == "fork" else []
        payload, facts = Payload(job), (job.name, job.window, job.together)
        with closing(payload), defer_interrupts():
            arguments = self._parent_watch, run_worker, payload, *facts, connections, unwanted
            process = self._context.Process(target=run_watched, args=arguments, daemon=True)
            self._processes.append(process)
            process.start()
            disown_process(process)
