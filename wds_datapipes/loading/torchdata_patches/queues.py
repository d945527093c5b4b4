"""Receiving from the queues of torchdata's workers, and ending the workers, without hanging when one dies."""

from __future__ import annotations

import os
import queue
import struct
import time
from collections.abc import Generator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.workers.shutdown import GRACE_S, close_process, describe_exit, end_processes

__all__ = ["Inbox", "end_service"]

#: The maximum duration of one wait for the pipe and the processes, in seconds. They end it earlier; the limit covers a
#: process whose exit is invisible because a grandchild holds its pipes open, and a reader that is asked to stop.
PULSE_S = 0.1


class Inbox:
    """The receiving end of a ``multiprocessing.Queue`` that other processes fill.

    It has the ``get`` of the queue, with one difference: if the queue would wait indefinitely for a process that has
    ended, the inbox raises. It reads without blocking, because a process can also end in the middle of a message.

    Args:
        source: the queue; nothing else in this process may read from it.
    """

    def __init__(self, source: Any) -> None:
        self._queue = source
        self._senders: list[tuple[str, BaseProcess]] = []
        self.connection: Connection = source._reader
        os.set_blocking(self.connection.fileno(), False)
        self._messages = _messages(self.connection.fileno())

    def watch(self, name: str, process: BaseProcess) -> None:
        """Raise an error in `get` if ``process``, named ``name`` in messages, has ended and left nothing to read."""
        self._senders.append((name, process))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next object.

        Raises:
            queue.Empty: there is none, or none arrived within ``timeout`` seconds.
            WorkerDiedError: there is none, and a watched process has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = next(self._messages)
            if message is None:
                # The order matters: everything that a process wrote before it ended is in the pipe once it has ended.
                dead = self._dead()
                message = next(self._messages)
                if message is None and dead is not None:
                    raise WorkerDiedError(describe_exit(*dead))
            if message is not None:
                self._queue._sem.release()
                return self._load(message)
            left = PULSE_S if deadline is None else deadline - time.monotonic()
            if not block or left <= 0:
                raise queue.Empty
            self.wait(min(left, PULSE_S))

    def wait(self, timeout: float) -> None:
        """Sleep until there is something to read, a process has ended, or ``timeout`` seconds have passed."""
        wait([self.connection, *(process.sentinel for _, process in self._senders)], timeout)

    def drain(self) -> None:
        """Discard the available messages."""
        while next(self._messages) is not None:
            self._queue._sem.release()

    def close(self) -> None:
        """Close the descriptors and forget the processes."""
        self._senders.clear()
        self._queue.close()
        self._queue._reader.close()
        self._queue._writer.close()

    def _load(self, message: bytearray) -> Any:
        try:
            return ForkingPickler.loads(message)
        except (OSError, EOFError) as error:
            # A tensor's memory is fetched from the process that sent it, which may have exited.
            dead = self._dead(patience_s=1.0)
            if dead is None:
                raise
            raise WorkerDiedError(describe_exit(*dead)) from error

    def _dead(self, patience_s: float = 0.0) -> tuple[str, BaseProcess] | None:
        """Return the first process that has ended."""
        if patience_s:
            wait([process.sentinel for _, process in self._senders], patience_s)
        return next(((name, process) for name, process in self._senders if not process.is_alive()), None)


def _messages(descriptor: int) -> Generator[bytearray | None, None, None]:
    """Yield each message received over a pipe, and ``None`` whenever the rest of one has not arrived yet.

    The framing is that of ``multiprocessing.connection``: a signed 32 bit length, or -1 and an unsigned 64 bit length.
    """
    while True:
        (size,) = struct.unpack("!i", (yield from _exactly(descriptor, 4)))
        if size == -1:
            (size,) = struct.unpack("!Q", (yield from _exactly(descriptor, 8)))
        yield (yield from _exactly(descriptor, size))


def _exactly(descriptor: int, size: int) -> Generator[None, None, bytearray]:
    buffer = bytearray(size)
    missing = memoryview(buffer)
    while missing:
        try:
            count = os.readv(descriptor, [missing])
        except BlockingIOError:
            count = 0
        if not count:
            yield None
        missing = missing[count:]
    return buffer


def end_service(service: Any) -> None:
    """End the processes of a ``MultiProcessingReadingService``, in any state, and close its descriptors."""
    from torchdata.dataloader2.communication.messages import TerminateRequest

    grace_s = 0.0
    if service._worker_consumer_datapipe is not None:
        grace_s = GRACE_S
        service._worker_consumer_datapipe.request_terminate()
    if service._main_prefetch_datapipe is not None:
        service._main_prefetch_datapipe.shutdown()  # so that its thread stops waiting for a worker
    inboxes = [pipe.protocol.inbox for pipe in service._worker_datapipes]
    processes = [process for process, _, _ in service._worker_processes]
    requests = [queue for _, queue, _ in service._worker_processes]
    end_processes(processes, inboxes, grace_s=grace_s)
    for inbox in inboxes:
        inbox.close()
    if service._dispatch_process is not None:
        dispatcher, questions, answers = service._dispatch_process
        for queue in questions:
            queue.put(TerminateRequest())  # a worker that was killed has not forwarded it
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
    service._parent_watch.close()
    service._worker_processes = []
    service._dispatch_process = None
