"""Shutting down worker processes: ask, wait, terminate, kill."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from wds_datapipes.loading.workers.inbox import Inbox

__all__ = ["GRACE_S", "close_process", "end_processes", "end_service", "is_running"]

#: How long a process may take to end by itself, in seconds. Nobody needs the item that it may be making.
GRACE_S = 2.0

#: How long a signal may take to end a process, in seconds.
SIGNAL_S = 1.0

#: Stands for the exit code of a process that nobody got to know.
UNKNOWN = 255


def end_processes(processes: Iterable[BaseProcess], inboxes: Sequence[Inbox] = (), *, grace_s: float = GRACE_S) -> None:
    """Wait for processes that were told to end; after ``grace_s`` seconds terminate, then kill, those that did not.

    Args:
        processes: what to end.
        inboxes: what they send to. These are emptied meanwhile: a process ends only after all that it sent was read.
        grace_s: how long they may take by themselves, in seconds.
    """
    running = [process for process in processes if is_running(process)]
    deadline = time.monotonic() + grace_s
    while running and (left := deadline - time.monotonic()) > 0:
        wait([*(process.sentinel for process in running), *(inbox.connection for inbox in inboxes)], left)
        for inbox in inboxes:
            inbox.drain()
        running = [process for process in running if is_running(process)]
    for signal in (BaseProcess.terminate, BaseProcess.kill):
        for process in running:
            signal(process)
        deadline = time.monotonic() + SIGNAL_S
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [process for process in running if is_running(process)]


def is_running(process: BaseProcess) -> bool:
    """Whether a process has not ended yet."""
    if process.is_alive() and wait([process.sentinel], 0):
        # It is about to end; or it has ended, and the program ignores SIGCHLD, so that nobody can wait for it.
        try:
            os.kill(process.pid or 0, 0)
        except ProcessLookupError:
            return False
    return process.is_alive()


def close_process(process: BaseProcess) -> None:
    """Give back the descriptors of a process that has ended, also where nobody knows how."""
    with suppress(ValueError):  # it is closed, or not even SIGKILL has ended it yet
        if not is_running(process) and (popen := process._popen) is not None:  # type: ignore[attr-defined]  # not public
            # Another thread has been told how it ended, and has not noted it yet; or the program ignores SIGCHLD.
            popen.returncode = UNKNOWN if popen.returncode is None else popen.returncode
        process.close()


def end_service(service: Any) -> None:
    """End the processes of a ``MultiProcessingReadingService``, however far it got, and give back its descriptors."""
    from torchdata.dataloader2.communication.messages import TerminateRequest

    grace_s = 0.0
    if service._worker_consumer_datapipe is not None:
        grace_s = GRACE_S
        service._worker_consumer_datapipe.request_terminate()
    if service._main_prefetch_datapipe is not None:
        service._main_prefetch_datapipe.shutdown()  # its thread no longer waits for a worker
    inboxes = [pipe.protocol.inbox for pipe in service._worker_datapipes]
    processes = [process for process, _, _ in service._worker_processes]
    requests = [queue for _, queue, _ in service._worker_processes]
    end_processes(processes, inboxes, grace_s=grace_s)
    for inbox in inboxes:
        inbox.close()
    if service._dispatch_process is not None:
        dispatcher, questions, answers = service._dispatch_process
        for queue in questions:
            queue.put(TerminateRequest())  # a worker that was killed has not passed it on
            queue.put(None)
        end_processes([dispatcher], grace_s=grace_s)
        processes.append(dispatcher)
        requests += questions
        for queue in answers:
            queue._reader.close()
            queue._writer.close()
    for queue in requests:
        queue.close()
    for process in processes:
        close_process(process)
    service._lifeline.close()
    service._worker_processes = []
    service._dispatch_process = None
