"""One end of a channel receives what the other sends: each item once, in order, whole, and safe to keep."""

from __future__ import annotations

import errno
import math
import os
import pickle
import random
import re
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from wds_datapipes.loading.transport import sender as sender_module
from wds_datapipes.loading.transport.flow_control import TOGETHER_BYTES
from wds_datapipes.loading.transport.message_reader import ReceivedMessage
from wds_datapipes.loading.transport.protocol import COMMAND_BYTES, INLINE, Kind, new_channel
from wds_datapipes.loading.transport.receiver import MAX_LENT, Receiver
from wds_datapipes.loading.transport.sender import ReceiverGone, Sender
from wds_datapipes.loading.transport.serialization import APART, Serializer

#: Anything that takes longer than this counts as a hang, in seconds.
LIMIT_S = 300

#: The machine may be busy.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ITEMS = (Kind.ITEMS, Kind.PLAIN_ITEMS)


class Channel:
    """A sender and a receiver with a socket between them, in one process."""

    def __init__(self, window: int = 5, together: int = 256) -> None:
        near, far = new_channel()
        self.receiver = Receiver(near, window=window)
        self.sender = Sender(far, window=window, together=together)
        self.sender.closed = self.closing()  # the clock of its flushing thread

    def closing(self) -> threading.Event:
        return self.sender.closed

    def arrivals(self) -> list[ReceivedMessage]:
        """Return the messages that have arrived."""
        found = []
        while (message := self.receiver.receive()) is not None:
            found.append(message)
        return found

    def items(self) -> list[Any]:
        """Return the items that have arrived."""
        return [item for message in self.arrivals() for item in taken(self.receiver, message)]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@contextmanager
def open_channel(window: int = 5, together: int = 256) -> Iterator[Channel]:
    ends = Channel(window, together)
    try:
        yield ends
    finally:
        ends.close()


def taken(receiver: Receiver, message: ReceivedMessage) -> list[Any]:
    """Take the items of a message, as `ProcessConnection` does."""
    assert message.header.kind in ITEMS
    return list(receiver.items(message))


class Ticks(threading.Event):
    """Replaces the event of a closed sender, for which its flushing thread waits, with ticks of the test."""

    def __init__(self) -> None:
        super().__init__()
        self._ticks = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self._ticks.acquire()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self._ticks.release()

    def tick(self, count: int) -> None:
        """Make the flushing thread check the waiting items ``count`` times."""
        self._ticks.release(count)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """Keep small items buffered until there are enough of them or the test ticks."""
    monkeypatch.setattr(sender_module, "TOGETHER_S", math.inf)
    ticks = Ticks()
    monkeypatch.setattr(Channel, "closing", lambda _: ticks)
    return ticks


# a sender like that of a worker, whose items state their position


def made(epoch: int, number: int, size: int) -> dict[str, Any]:
    """Return an item of about ``size`` bytes that can be checked."""
    fill = (epoch * 31 + number) % 251
    kinds: list[Callable[[], Any]] = [
        lambda: bytes([fill]) * size,
        lambda: np.full(size, fill, np.uint8),
        lambda: torch.full((size,), fill, dtype=torch.uint8),
        lambda: (np.full(size // 2, fill, np.uint8), chr(fill) * (size // 2)),
    ]
    return {"epoch": epoch, "number": number, "data": kinds[number % 4]()}


def check(item: dict[str, Any], epoch: int, number: int, size: int) -> None:
    assert (item["epoch"], item["number"]) == (epoch, number)
    sent = made(epoch, number, size)["data"]
    assert type(item["data"]) is type(sent)
    assert raw(item["data"]) == raw(sent)


def raw(value: Any) -> Any:
    """Return the bytes of everything in a value."""
    if isinstance(value, tuple):
        return [raw(part) for part in value]
    return value if isinstance(value, str) else np.asarray(value).tobytes()


def send(channel: socket.socket, window: int, together: int) -> None:
    """Send the items whose sizes are requested, as a worker does."""
    sender = Sender(channel, window=window, together=together)
    sizes: Iterator[tuple[int, int]] | None = None
    with suppress(ReceiverGone):
        while True:
            if sender.requests:
                epoch, payload = sender.requests.popleft()
                sender.begin(epoch)
                sizes = iter(enumerate(payload))
            elif sizes is None or sender.is_full:
                sender.wait()
            elif (following := next(sizes, None)) is None:
                sizes = None
                sender.send(Kind.END)
            elif sender.put(made(sender.epoch, *following)):
                sender.receive_requests()
    sender.close()


@contextmanager
def in_a_process(run: Callable[..., object], *args: Any, window: int = 5) -> Iterator[tuple[Receiver, int]]:
    """Run the sending end in a forked process; yield the receiving end and the process ID."""
    near, far = new_channel()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            near.close()
            torch.set_num_threads(1)  # as in a worker, because forks do not inherit the threads of this process
            run(far, *args)
            code = 0
        finally:
            os._exit(code)
    far.close()
    receiver = Receiver(near, window=window)
    try:
        yield receiver, pid
    finally:
        receiver.close()
        with suppress(ChildProcessError):  # the test has waited for it
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                psutil.Process(pid).kill()
                os.waitpid(pid, 0)


def following(receiver: Receiver) -> ReceivedMessage:
    """Return the next message, with credit given before each wait."""
    poll = select.poll()
    poll.register(receiver, select.POLLIN)
    while (message := receiver.receive()) is None:
        receiver.credit()
        assert poll.poll(1e3 * LIMIT_S), "nothing came"
    return message


def current(receiver: Receiver) -> ReceivedMessage:
    """Return the next message of the most recent epoch."""
    while (message := following(receiver)).header.epoch != receiver.epoch:
        receiver.drop(message)
    return message


def request(receiver: Receiver, payload: object) -> None:
    for message in receiver.pack_request(payload):
        assert receiver.send_command(message)


def begin(receiver: Receiver, epoch: int, payload: object) -> None:
    receiver.begin(epoch)
    request(receiver, payload)


# order, and each once

Size = st.one_of(
    st.integers(0, 300),
    st.integers(0, 3 * TOGETHER_BYTES),
    st.sampled_from([edge + more for edge in (APART, INLINE, TOGETHER_BYTES) for more in (-100, -1, 0, 1)]),
)


class Traffic(RuleBasedStateMachine):
    """Both ends in one thread, interleaved in any way possible for two processes."""

    @initialize(window=st.integers(1, 20), together=st.sampled_from([1, 3, 256]))
    def start(self, window: int, together: int) -> None:
        self.window, self.together = window, together
        self.ends = Channel(window, together)
        self.epoch = self.begun = 0
        self.sizes: list[int] = []
        self.arrived: deque[ReceivedMessage] = deque()
        self.number = 0
        self.ended = self.told_end = False
        self.kept: list[tuple[Any, int, int, int]] = []

    def arrive(self) -> None:
        self.arrived += self.ends.arrivals()
        waiting = sum(each.header.kind in ITEMS and each.header.epoch == self.begun for each in self.arrived)
        # Buffered small items are sent before a large one, which then needs another message.
        assert waiting <= self.window + (self.together > 1)
        if self.together == 1:
            assert all(each.header.number == 1 for each in self.arrived if each.header.kind in ITEMS)

    @rule(sizes=st.lists(Size, min_size=1, max_size=20))
    def put(self, sizes: list[int]) -> None:
        for size in sizes:
            if self.ends.sender.is_full or self.told_end:
                return
            self.ends.sender.put(made(self.begun, len(self.sizes), size))
            self.sizes.append(size)
            self.arrive()

    @rule()
    def say_the_end(self) -> None:
        if not self.told_end and not self.ends.sender.is_full:
            self.told_end = True
            self.ends.sender.send(Kind.END)
            self.arrive()

    @rule(count=st.integers(1, 10))
    def take(self, count: int) -> None:
        for _ in range(min(count, len(self.arrived))):
            message = self.arrived.popleft()
            if message.header.epoch != self.epoch:
                assert message.header.epoch < self.epoch
                self.ends.receiver.drop(message)
            elif message.header.kind == Kind.END:
                assert self.number == len(self.sizes)
            else:
                for item in taken(self.ends.receiver, message):
                    check(item, self.epoch, self.number, self.sizes[self.number])
                    self.kept.append((item, self.epoch, self.number, self.sizes[self.number]))
                    self.number += 1

    @rule(first=st.floats(0, 1), share=st.floats(0, 1))
    def drop(self, first: float, share: float) -> None:
        # Fractions, because the number of arrived items depends on timing, and random draws must not.
        begin = round(first * len(self.kept))
        del self.kept[begin : begin + round(share * (len(self.kept) - begin))]

    @rule()
    def credit(self) -> None:
        self.ends.receiver.credit()

    @rule()
    def listen(self) -> None:
        self.ends.sender.receive_requests()
        while self.ends.sender.requests:
            self.ends.sender.begin(self.ends.sender.requests.popleft()[0])
            self.begun += 1
            self.sizes, self.told_end = [], False

    @precondition(lambda self: self.begun == self.epoch)
    @rule()
    def begin_another_epoch(self) -> None:
        self.epoch += 1
        self.number = 0
        begin(self.ends.receiver, self.epoch, None)
        self.check_what_is_kept()

    @rule()
    def check_what_is_kept(self) -> None:
        for each in self.kept:
            check(*each)

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return
        try:
            self.check_what_is_kept()
            self.listen()
            self.ends.sender.send(Kind.END)
            self.arrive()
            self.take(len(self.arrived))
            if self.begun == self.epoch:
                assert self.number == len(self.sizes)
            self.kept.clear()
            self.ends.receiver.credit()
            self.ends.sender.receive_requests()
            self.ends.arrivals()  # abandoned items
            pool, lender = self.ends.sender.pool, self.ends.receiver.lender
            free = {segment.number for segment in pool.free}
            unsent = {segment.number for segment in pool.free if segment.descriptor is not None}  # of abandoned items
            assert free == set(pool.segments) >= set(lender.memory) >= free - unsent
        finally:
            self.ends.close()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(BUSY, max_examples=50, stateful_step_count=30)


# flow control


@pytest.mark.parametrize("size", [10, 3 * APART])
@pytest.mark.parametrize("together", [1, 256])
@pytest.mark.parametrize("window", [1, 5])
def test_a_sender_that_gets_no_credit_stops(window: int, together: int, size: int) -> None:
    with in_a_process(send, window, together, window=window) as (receiver, _):
        begin(receiver, 1, [size] * 3000)
        found = [following(receiver) for _ in range(window)]
        begin(receiver, 2, [])  # it must read requests in between, and ends this epoch immediately
        while found[-1].header.kind in ITEMS:
            found.append(following(receiver))
        assert window <= len(found) - 1 <= window + (together > 1)
        assert (found[-1].header.kind, found[-1].header.epoch) == (Kind.END, 2)
        if together == 1:
            assert sum(each.header.number for each in found[:-1]) == window


def test_small_items_share_messages_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "TOGETHER_S", math.inf)
    monkeypatch.setattr(sender_module, "TICK_S", LIMIT_S)
    with in_a_process(send, 5, 256) as (receiver, _):
        begin(receiver, 1, [10] * 2000)
        found = [following(receiver) for _ in range(5)]  # as many as arrive without credit
        counts = [len(taken(receiver, message)) for message in found]
        assert counts == [1, *[256] * 4]
        while (message := current(receiver)).header.kind != Kind.END:
            counts.append(len(taken(receiver, message)))
        assert sum(counts) == 2000
        begin(receiver, 2, [TOGETHER_BYTES] * 8)
        while (message := current(receiver)).header.kind != Kind.END:
            assert len(taken(receiver, message)) == 1


# the flushing thread


def test_buffered_items_are_sent_while_the_pipeline_is_stuck(ticks: Ticks) -> None:
    with open_channel() as ends:
        ends.sender.put("first")
        assert not ends.sender.put("second")
        assert not ends.sender.put("third")
        ticks.tick(2)
        assert [taken(ends.receiver, following(ends.receiver)) for _ in range(2)] == [["first"], ["second", "third"]]
        assert not ends.sender.put("fourth")  # the thread also watches the next ones
        ticks.tick(2)
        assert taken(ends.receiver, following(ends.receiver)) == ["fourth"]


def test_items_waiting_for_credit_are_sent_once_there_is_some(ticks: Ticks) -> None:
    with open_channel(window=2) as ends:
        ends.sender.put("first")
        ends.sender.put("second")
        ends.sender.put("third")
        ends.sender.put(np.zeros(TOGETHER_BYTES))  # the small ones go first
        assert ends.sender.is_full
        ends.sender.put("fourth")
        ticks.tick(1)
        while ends.sender.has_waiting.is_set():  # until the thread has noticed that it must wait
            time.sleep(1e-3)
        found = ends.arrivals()
        assert len(found) == 3
        for message in found:
            taken(ends.receiver, message)
        ends.receiver.credit()
        ends.sender.wait()
        assert ends.items() == ["fourth"]


def test_a_failed_flush_loses_nothing(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter(range(3))
    with open_channel() as ends:
        take = ends.sender.pool.take

        def take_or_fail(size: int) -> Any:
            if next(failures, None) is not None:
                raise OSError(errno.ENOMEM, "no memory")
            return take(size)

        monkeypatch.setattr(ends.sender.pool, "take", take_or_fail)
        ends.sender.put("first")
        for number in range(3):  # too much for the socket
            ends.sender.put(bytes([number]) * INLINE)
        ticks.tick(1 + 3 + 1)
        assert taken(ends.receiver, following(ends.receiver)) == ["first"]
        assert taken(ends.receiver, following(ends.receiver)) == [bytes([number]) * INLINE for number in range(3)]
        assert next(failures, None) is None


# what a message may contain


@pytest.mark.parametrize("size", [0, 1, INLINE - 1, INLINE, INLINE + 1, 5_000_000])
def test_messages_without_items_of_any_size(size: int) -> None:
    payload = Serializer().pack(random.Random(size).randbytes(size))[0]
    with open_channel() as ends:
        for _ in range(3):
            ends.sender.send(Kind.ERROR, b"".join(payload))
            (message,) = ends.arrivals()
            assert message.header.kind == Kind.ERROR
            assert ends.receiver.body(message) == random.Random(size).randbytes(size)
            ends.receiver.credit()
            ends.sender.receive_requests()
        assert len(ends.sender.pool.segments) == (size > INLINE - 100)


def test_a_command_has_as_many_messages_as_it_needs() -> None:
    with open_channel() as ends:
        for size in range(COMMAND_BYTES - 100, COMMAND_BYTES + 100, 7):
            payload = random.Random(size).randbytes(size)
            request(ends.receiver, payload)
            ends.sender.receive_requests()
            assert ends.sender.requests.popleft()[1] == payload
        messages = ends.receiver.pack_request(payload := random.Random(1).randbytes(3 * COMMAND_BYTES))
        assert max(map(len, messages)) == COMMAND_BYTES
        for message in messages:
            assert not ends.sender.requests
            assert ends.receiver.send_command(message)
            ends.sender.receive_requests()
        assert ends.sender.requests.popleft()[1] == payload
        with pytest.raises((pickle.PicklingError, AttributeError)):
            ends.receiver.pack_request(lambda: 0)


# changes to an item after it was put


@pytest.mark.usefixtures("ticks")
def test_a_small_sample_can_be_changed_after_it_was_put() -> None:
    with open_channel() as ends:
        ends.sender.put({"n": 0})
        sample: dict[str, Any] = {"n": 1, "txt": "a"}
        for number in (1, 2):
            sample["n"] = number
            ends.sender.put(sample)
        sample["n"], sample["txt"] = 3, [0]  # joins the others, in their order
        ends.sender.put(sample)
        sample["txt"][0] = 9
        ends.sender.send(Kind.END)
        found = [item for each in ends.arrivals()[:-1] for item in taken(ends.receiver, each)]
        assert found == [{"n": 0}, {"n": 1, "txt": "a"}, {"n": 2, "txt": "a"}, {"n": 3, "txt": [0]}]


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize(
    "size", [10, APART - 1, APART, TOGETHER_BYTES - 200, TOGETHER_BYTES, TOGETHER_BYTES + 1, 10**6]
)
def test_an_item_can_be_changed_after_it_was_put(size: int) -> None:
    with open_channel(window=20) as ends:
        ends.sender.put("first")  # the next one may be buffered
        array, tensor, data = (
            np.full(size, 1, np.uint8),
            torch.full((size,), 2, dtype=torch.uint8),
            bytearray(bytes([3]) * size),
        )
        parts: list[Any] = [array, tensor, data]
        for part in parts:
            ends.sender.put(part)
        ends.sender.put(parts)
        array[:], data[:] = 9, bytes([9]) * size
        tensor.fill_(9)
        parts.clear()
        ends.sender.send(Kind.END)
        found = [each for each in ends.arrivals() if each.header.kind in ITEMS]
        got = [item for message in found for item in taken(ends.receiver, message)]
        assert len(got) == 5
        for one, again, value in zip(got[1:4], got[4], (1, 2, 3), strict=True):
            assert raw(one) == raw(again) == bytes([value]) * size


# kept items


def memory_maps() -> int:
    return len(re.findall(r"wds-datapipes", Path("/proc/self/maps").read_text()))


def test_a_reader_that_keeps_hundreds_of_items_gets_separate_copies() -> None:
    before, window = memory_maps(), 4
    with in_a_process(send, window, 256, window=window) as (receiver, _):
        for epoch in (1, 2):  # the second reader keeps as many as the first, which are still held
            begin(receiver, epoch, [2 * APART] * 400)
            kept = []
            while (message := current(receiver)).header.kind != Kind.END:
                kept += taken(receiver, message)
                assert memory_maps() - before <= MAX_LENT + window + 5
            for number in range(0, 400, 7):
                data = kept[number]["data"]
                array = data.numpy() if isinstance(data, torch.Tensor) else data
                if isinstance(array, np.ndarray):
                    array[:] = 250
            for number, item in enumerate(kept):
                if number % 7:
                    check(item, epoch, number, 2 * APART)
        del kept, item, data, array
        assert memory_maps() - before <= MAX_LENT + window + 5
        begin(receiver, 3, [2 * APART] * 50)
        while (message := current(receiver)).header.kind != Kind.END:
            taken(receiver, message)
        begin(receiver, 4, [])
        assert current(receiver).header.kind == Kind.END
        assert memory_maps() - before <= 2 * window + 10  # the others were dropped


# the end


@pytest.mark.usefixtures("nothing_left")
def test_a_sender_killed_at_any_moment_leaves_whole_messages_and_then_the_end() -> None:
    rng = random.Random(0)
    for _ in range(10):
        sizes = [rng.choice([10, 100, INLINE, APART, 3 * APART, 500_000]) for _ in range(400)]
        kept: list[Any] = []
        with in_a_process(send, 20, 256, window=20) as (receiver, pid):
            begin(receiver, 1, sizes)
            with pytest.raises(EOFError):
                read_and_kill(receiver, pid, rng.randrange(60), sizes, kept)
            with pytest.raises(EOFError):
                receiver.receive()
            os.waitpid(pid, 0)
        for number, item in enumerate(kept):  # after both ends have closed
            check(item, 1, number, sizes[number])


def read_and_kill(receiver: Receiver, pid: int, victim: int, sizes: list[int], kept: list[Any]) -> None:
    """Read to the end, and kill the sender after some item."""
    while (message := following(receiver)).header.kind != Kind.END:
        for item in taken(receiver, message):
            check(item, 1, len(kept), sizes[len(kept)])
            kept.append(item)
            if len(kept) == victim:
                psutil.Process(pid).kill()


def test_items_of_a_killed_process_arrive_even_if_it_never_read() -> None:
    all_sent, sent = os.pipe()

    def run(channel: socket.socket) -> None:
        sender = Sender(channel, window=20, together=1)
        for number in range(5):
            sender.put(made(0, number, 2 * APART))
        os.write(sent, b"!")
        time.sleep(LIMIT_S)

    with in_a_process(run) as (receiver, pid):
        request(receiver, [])  # it never reads these
        check(taken(receiver, following(receiver))[0], 0, 0, 2 * APART)
        receiver.credit()
        os.read(all_sent, 1)
        psutil.Process(pid).kill()
        os.waitpid(pid, 0)
        for number in range(1, 5):
            check(taken(receiver, following(receiver))[0], 0, number, 2 * APART)
        with pytest.raises(EOFError):
            receiver.receive()
    os.close(all_sent)
    os.close(sent)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("act", ["put", "say", "wait", "listen", "put an array"])
def test_a_sender_learns_that_its_reader_is_gone(act: str) -> None:
    with open_channel() as ends:
        ends.sender.put("first")
        ends.sender.put("second")
        ends.receiver.close()
        acts: dict[str, Callable[[], object]] = {
            "put": lambda: [ends.sender.put(bytes(INLINE)) for _ in range(40)],
            "say": lambda: ends.sender.send(Kind.END),
            "wait": lambda: ends.sender.wait(),
            "listen": lambda: ends.sender.receive_requests(),
            "put an array": lambda: ends.sender.put(np.zeros(TOGETHER_BYTES)),
        }
        with pytest.raises(ReceiverGone):
            acts[act]()


def test_closing_wakes_both_ends() -> None:
    with in_a_process(send, 5, 256) as (receiver, pid):
        begin(receiver, 1, [2 * APART] * 100)
        check(taken(receiver, following(receiver))[0], 1, 0, 2 * APART)
        receiver.cut()
        with pytest.raises(EOFError):
            read_and_kill(receiver, pid, -1, [2 * APART] * 100, [None])
        assert os.waitpid(pid, 0)[1] == 0
        receiver.cut()  # again, without a peer
        request(receiver, [])
        receiver.credit()


def test_too_many_open_files_are_named_and_not_mistaken_for_the_end() -> None:
    with open_channel() as ends:
        ends.sender.put(np.zeros(APART))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            with pytest.raises(OSError, match=r"too many open files .*ulimit"):
                ends.arrivals()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("nothing_left")
def test_both_ends_release_their_descriptors_while_items_are_kept() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_channel(window=30) as ends:
        for number in range(20):
            ends.sender.put(made(0, number, 2 * APART))
        ends.sender.flush()
        kept = ends.items()
        assert len(os.listdir("/proc/self/fd")) == before + 2
    for number, item in enumerate(kept):
        check(item, 0, number, 2 * APART)


def test_a_system_without_such_sockets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(NotImplementedError, match="Unix sockets that preserve message boundaries"):
        new_channel()
