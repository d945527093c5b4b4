import faulthandler
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.torchdata_patches.queues import Inbox
from wds_datapipes.loading.workers.shutdown import end_processes

FORK = multiprocessing.get_context("fork")

Start = Callable[..., tuple[Inbox, Any]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process with a queue, and return the queue's inbox and the process."""
    started = []

    def start(target: Callable[..., None], *args: object) -> tuple[Inbox, Any]:
        source = FORK.Queue()
        process = FORK.Process(target=target, args=(source, *args))
        process.start()
        inbox = Inbox(source)
        inbox.watch("Worker 3", process)
        started.append((inbox, process))
        return inbox, process

    yield start
    for inbox, process in started:
        process.kill()
        process.join()
        inbox.close()


def send(source: Any, *items: object) -> None:
    for item in items:
        source.put(item)


def send_and_sleep(source: Any, *items: object) -> None:
    send(source, *items)
    time.sleep(60)


def kill_after_sending(source: Any, *items: object) -> None:
    send(source, *items)
    source.close()
    source.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_a_message(source: Any, written: int) -> None:
    message = bytes(ForkingPickler.dumps(bytes(100_000)))
    framed = len(message).to_bytes(4, "big") + message
    os.write(source._writer.fileno(), framed[:written])
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with(source: Any, code: int) -> None:
    os._exit(code)


def kill_with(source: Any, number: int) -> None:
    faulthandler.disable()  # pytest's handler would print the stacks of this process
    os.kill(os.getpid(), number)
    time.sleep(60)


def ignore_sigterm(source: Any, *items: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send(source, "ready", *items)
    time.sleep(60)


def test_everything_arrives_in_order(start: Start) -> None:
    items = [0, "text", None, {"a": [1, 2]}, bytes(300_000), *range(500)]
    inbox, _ = start(send, *items)
    assert [inbox.get() for _ in items] == items


def test_messages_sent_before_the_end_arrive_before_the_error(start: Start) -> None:
    inbox, process = start(kill_after_sending, 1, 2)
    process.join()
    assert [inbox.get(), inbox.get()] == [1, 2]
    with pytest.raises(WorkerDiedError, match=rf"^Worker 3 \(pid {process.pid}\) was killed by signal 9 \(SIGKILL\)"):
        inbox.get()


@pytest.mark.parametrize("written", [0, 1, 4, 5, 5000])
def test_a_process_that_ends_in_the_middle_of_a_message(start: Start, written: int) -> None:
    inbox, _ = start(kill_in_a_message, written)
    with pytest.raises(WorkerDiedError, match="was killed by signal 9"):
        inbox.get()


@pytest.mark.parametrize(
    ("target", "number", "message"),
    [
        (exit_with, 0, r"ended with exit code 0 .* must not call exit\(\)"),
        (exit_with, 7, "ended with exit code 7 .* traceback"),
        (kill_with, signal.SIGKILL, r"was killed by signal 9 \(SIGKILL\) .* memory runs out"),
        (kill_with, signal.SIGBUS, r"was killed by signal 7 \(SIGBUS\) .* --shm-size"),
        (kill_with, signal.SIGSEGV, r"was killed by signal 11 \(SIGSEGV\) .* PYTHONFAULTHANDLER=1"),
        (kill_with, signal.SIGTERM, r"was killed by signal 15 \(SIGTERM\) .* outside this program"),
        (kill_with, signal.SIGRTMIN + 5, r"was killed by signal 39 \(unknown\) .* outside this program"),
    ],
)
def test_the_message_says_how_the_process_ended(
    start: Start, target: Callable[..., None], number: int, message: str
) -> None:
    inbox, _ = start(target, number)
    with pytest.raises(WorkerDiedError, match=message):
        inbox.get()


def test_get_without_blocking(start: Start) -> None:
    inbox, _ = start(send_and_sleep)
    with pytest.raises(queue.Empty):
        inbox.get(block=False)
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.01)


def test_a_partial_message_is_not_a_message() -> None:
    source: Any = FORK.Queue()
    inbox = Inbox(source)
    message = bytes(ForkingPickler.dumps("whole"))
    framed = len(message).to_bytes(4, "big") + message
    source._sem.acquire()
    for byte in framed:
        with pytest.raises(queue.Empty):
            inbox.get(block=False)
        os.write(source._writer.fileno(), bytes([byte]))
    assert inbox.get(block=False) == "whole"
    inbox.close()


def test_a_message_of_more_than_two_gibibytes_has_a_longer_frame() -> None:
    source: Any = FORK.Queue()
    inbox = Inbox(source)
    message = bytes(ForkingPickler.dumps("long"))
    source._sem.acquire()
    os.write(source._writer.fileno(), b"\xff\xff\xff\xff" + len(message).to_bytes(8, "big") + message)
    assert inbox.get() == "long"
    inbox.close()


def test_get_waits_for_a_slow_process(start: Start) -> None:
    def send_late(source: Any) -> None:
        time.sleep(0.3)
        source.put("late")

    inbox, _ = start(send_late)
    assert inbox.get() == "late"


def test_a_tensor_of_an_ended_process(start: Start) -> None:
    inbox, process = start(kill_after_sending, torch.arange(10))
    process.join()
    with pytest.raises(WorkerDiedError, match="was killed by signal 9"):
        inbox.get()


def test_an_unannounced_end_is_noticed(start: Start) -> None:
    """A grandchild holds the pipes of the process open, so that neither of them wakes the reader."""

    def leave_a_child(source: Any) -> None:
        if os.fork():
            os._exit(5)
        time.sleep(2)
        os._exit(0)

    inbox, _ = start(leave_a_child)
    with pytest.raises(WorkerDiedError, match="ended with exit code 5"):
        inbox.get()


def test_end_processes_returns_when_they_have_ended(start: Start) -> None:
    inbox, process = start(send, bytes(10_000_000))
    end_processes([process], [inbox], grace_s=60)
    assert process.exitcode == 0, "a process cannot end before what it sent was read"


def test_end_processes_kills_a_process_that_ignores_sigterm(start: Start) -> None:
    sleeping, sleeper = start(send_and_sleep, "ready")
    stubborn, survivor = start(ignore_sigterm)
    assert sleeping.get() == stubborn.get() == "ready"
    end_processes([sleeper, survivor], [sleeping, stubborn], grace_s=0.05)
    assert (sleeper.exitcode, survivor.exitcode) == (-signal.SIGTERM, -signal.SIGKILL)


def test_end_processes_accepts_ended_processes(start: Start) -> None:
    _, process = start(exit_with, 3)
    process.join()
    end_processes([process])
    assert process.exitcode == 3


def test_close_releases_the_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Inbox(FORK.Queue()).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_in_another_thread_wakes_for_a_message(start: Start) -> None:
    source = FORK.Queue()
    inbox = Inbox(source)
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.append(inbox.get()))
    reader.start()
    source.put("hello")
    reader.join()
    source.close()
    source.join_thread()
    assert got == ["hello"]
