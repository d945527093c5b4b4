"""The main process's connection to a worker process, through a socket."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from multiprocessing.process import BaseProcess

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.transport.message_reader import ReceivedMessage
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.status_page import Work
from wds_datapipes.loading.workers.connection import PULSE_S, WorkerConnection
from wds_datapipes.loading.workers.exit_message import describe_exit
from wds_datapipes.loading.workers.shutdown import is_running
from wds_datapipes.system import POLLIN, POLLOUT, new_poll


class ProcessConnection(WorkerConnection):
    """Receives items from one process, and raises its errors.

    Args:
        name: the name of the process, for messages.
        receiver: the receiving end of its items.
        timeout_s: the maximum time to wait without a message from it, in seconds; ``None`` means no limit.

    Attributes:
        dispatcher: the connection to the dispatching process, whose items the process reads, if there is one.
    """

    _reader: Receiver

    def __init__(self, name: str, receiver: Receiver, timeout_s: float | None = None) -> None:
        super().__init__(name, receiver, timeout_s)
        self._unhandled: deque[ReceivedMessage] = deque()
        self._pid = 0
        self._watched: list[tuple[ProcessConnection, BaseProcess]] = []
        self.dispatcher: ProcessConnection | None = None

    def watch(self, connection: ProcessConnection, process: BaseProcess) -> None:
        """From now on, raise an error if a process ends. The first process to watch is the sender; others may follow.

        Args:
            connection: the connection to the process, which stores the name of its last shard.
            process: the process.
        """
        self._pid = self._pid or process.pid or 0
        self._watched.append((connection, process))

    def begin(self, epoch: int, payload: object, base: WorkerState | str | None = None) -> None:
        """Begin an epoch in the process.

        If the process has not received commands for a long time, this waits until there is room, and receives messages
        meanwhile, because a process that is blocked in a send does not receive either.
        """
        self.expect(epoch, base)
        with self._lock:
            messages = deque(self._reader.pack_request(payload))

        def send() -> bool:
            while messages and self._reader.send_command(messages[0]):
                messages.popleft()
            if messages:
                self._receive()
            return not messages

        self._await(send, POLLOUT)

    @property
    def shard(self) -> str:
        """The last shard that the process opened, or ""."""
        return self._reader.page.text if self._reader.page is not None else ""

    def close(self) -> None:
        """Close the descriptor."""
        self._reader.close()
        self._watched = []

    def cut(self) -> None:
        """Shut down the connection, which ends the process and wakes any thread that waits for it."""
        self._closed = True
        self._reader.cut()

    def _begin(self, epoch: int) -> None:
        self._reader.begin(epoch)

    def _status(self) -> tuple[int, Work, Counter[str]]:
        self._read_status()
        page = self._reader.page
        return self._pid, *((Work(), Counter[str]()) if page is None else page.read())

    def _receive_any(self) -> ReceivedMessage | None:
        if self._unhandled:
            return self._unhandled.popleft()
        try:
            message = self._reader.receive()
            if message is None and self._has_event and (ended := self._find_ended()) is not None:
                # By now, everything that it sent before it ended has arrived.
                message = self._reader.receive()
                if message is None:
                    raise WorkerDiedError(_exit_message(*ended))
        except EOFError:
            for _, process in self._watched[:1]:
                process.join(PULSE_S)
            ended = self._find_ended()
            if ended is None:
                raise WorkerDiedError(f"{self.name} has closed its end of the connection.{self._context()}") from None
            raise WorkerDiedError(_exit_message(*ended)) from None
        except (OSError, ValueError):
            if self._closed:  # closed by another thread at this moment
                raise RuntimeError(self._closed_message()) from None
            raise
        return message

    def _wait_s(self, limit_s: float, events: int) -> bool:
        own = self._reader.fileno()
        poll = new_poll()  # a new one, because two threads may wait here: one of them in an epoch that is over
        with suppress(ValueError):  # closed by another thread at this moment
            poll.register(own, POLLIN | events)
            for _, process in self._watched:
                poll.register(process.sentinel, POLLIN)
        return bool(poll.poll(1e3 * limit_s) != [(own, POLLIN)])

    def _find_ended(self) -> tuple[ProcessConnection, BaseProcess] | None:
        """Return the first process that has ended."""
        return next((each for each in self._watched if not is_running(each[1])), None)

    def _read_status(self) -> None:
        """Receive the status page of the process, if nothing was received yet."""
        # If another thread is receiving on the connection, the page is already known.
        if self._reader.page is None and self._lock.acquire(blocking=False):
            try:
                with suppress(OSError, EOFError):
                    message = self._reader.receive()
                    if message is not None:
                        self._unhandled.append(message)
            finally:
                self._lock.release()

    def _timeout_message(self) -> str:
        return (
            f"{self.name} (pid {self._pid}) has sent nothing for timeout_s={self._timeout_s:g} s.{self._context()} It "
            "may be waiting for a disk or a store that does not respond; `py-spy dump --pid` shows where."
        )

    def _context(self) -> str:
        if self.shard:
            return f" The last shard that it opened is {self.shard}."
        if self.dispatcher is None:
            return " It has opened no shard yet."
        self.dispatcher._read_status()
        return f" It reads the items of the dispatching process.{self.dispatcher._context()}"


def _exit_message(connection: ProcessConnection, process: BaseProcess) -> str:
    """Describe how a process ended and which shard it had open."""
    connection._read_status()
    return describe_exit(connection.name, process) + connection._context()
