"""A worker that answers calls: another one may take its place after any reply, as if it had gone on.

These tests need no Ray. Those with a cluster are in tests/loading/other_hosts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_kinds import comparable
from pipeline_table import EXACT, REPLAYED, STREAMS, Build, as_it_is, shards_of, split
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes import ShardList
from wds_datapipes.errors import ShardOpenError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.snapshots import LoopPosition
from wds_datapipes.loading.transport.flow_control import AHEAD_BYTES, TOGETHER_BYTES
from wds_datapipes.loading.transport.message_reader import ReceivedMessage
from wds_datapipes.loading.transport.protocol import HEADER, Header, Kind
from wds_datapipes.loading.transport.replies import Reply, ReplyReader
from wds_datapipes.loading.workers.remote_worker import RemoteWorker
from wds_datapipes.loading.workers.worker import WorkerJob
from wds_datapipes.pipes.state.pipeline_state import replay_reason
from wds_datapipes.types import ALONE

shards = shards_of()
READER = ReplyReader()
SEED = 8


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads, which a worker sets to one for its process."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def worker_of(
    build: Callable[[], Any], *, together: int = 3, alone: int = 0, init_fn: Any = None, code: Any = bytes
) -> RemoteWorker:
    pipe = build()
    reason, instance = replay_reason(pipe), ALONE.on_worker(0, 1)
    job = WorkerJob(None, instance, 12, together, None, None, None, True, reason, "worker process 0")
    return RemoteWorker(job, code(pickle.dumps((pipe, init_fn, None))), None, alone)


def request(left_at: WorkerState | None = None) -> tuple[Any, ...]:
    """Return what a worker needs to begin an epoch; no loader counts epochs here."""
    return SeedGenerator(SEED).spawn(0), None, None, left_at


def messages_of(reply: Reply) -> Iterator[ReceivedMessage]:
    for data, attached in pickle.loads(pickle.dumps(reply, protocol=5)).messages:
        yield ReceivedMessage.of(Header._make(HEADER.unpack_from(data)), data, attached)


def receive(reply: Reply, position: LoopPosition, items: list[Any]) -> bool:
    """Receive the items of a reply, with the positions after them; return whether the epoch is over."""
    is_over = False
    for message in messages_of(reply):
        kind, _, number = message.header[:3]
        if kind == Kind.ERROR:
            READER.body(message).reraise()
        if kind == Kind.STATE:
            position.add(READER.data(message), number)
        elif kind in (Kind.ITEMS, Kind.PLAIN_ITEMS):
            if message.records:
                position.add(message.records, number)
            items += map(comparable, READER.items(message))
        is_over = is_over or kind == Kind.END
    return is_over


def epoch_of(build: Build, deaths: set[int], left_at: WorkerState | None = None) -> tuple[list[Any], list[WorkerState]]:
    """Return the items of an epoch, and the state after each, while workers die after some replies."""
    worker, position = worker_of(build), LoopPosition()
    items, states, replies = list[Any](), list[WorkerState](), 0
    is_over, following = False, request(left_at)
    while not is_over:
        is_over = receive(worker.next_message(1, replies, 0, following), position, items)
        following = None  # type: ignore[assignment]  # only the first call of a worker begins the epoch
        while position.delivered < len(items):
            position.delivered += 1
            states.append(position.state())
        replies += 1
        if replies in deaths and not is_over:
            worker, following = worker_of(build), request(position.replace_process())
    return items, states


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*EXACT, *STREAMS, *REPLAYED])
def test_another_worker_takes_the_place_of_one_that_dies_after_any_reply(name: str) -> None:
    build = {**EXACT, **REPLAYED, **STREAMS}[name]
    whole, _ = epoch_of(build, set())
    assert len(whole) > 1
    for turn, deaths in enumerate(({1}, {2, 3, 4}, set(range(1, 99)))):
        items, states = epoch_of(build, deaths)
        assert items == whole, deaths
        cut = turn * len(whole) // 3  # a state after the deaths is equivalent
        assert epoch_of(build, set(), states[cut])[0] == whole[cut + 1 :], deaths


def test_a_new_worker_sends_its_first_items_one_by_one() -> None:
    worker = worker_of(EXACT["keys"], together=256, alone=5)
    counts = list[int]()
    following: Any = request()
    while len(counts) < 6:
        items = list[Any]()
        receive(worker.next_message(1, 0, 0, following), LoopPosition(), items)
        counts.append(len(items))
        following = None
    assert counts[:5] == [1] * 5
    assert counts[5] > 1


def arrays_of(*sizes: int) -> Callable[[], Any]:
    return lambda: IterableWrapper([np.full(size, number, np.uint8) for number, size in enumerate(sizes)])


@pytest.mark.parametrize(
    ("sizes", "ahead"),
    [([AHEAD_BYTES // 3 + 1] * 6, 3), ([AHEAD_BYTES + 1] * 4, 2), ([TOGETHER_BYTES + 1] * 8, 8)],
    ids=["large", "one that is more than all may be", "moderate"],
)
def test_a_worker_that_is_ahead_answers_without_items(sizes: list[int], ahead: int) -> None:
    worker = worker_of(arrays_of(*sizes))
    replies = [worker.next_message(1, 0, 0, request() if number == 0 else None) for number in range(len(sizes))]
    assert [bool(reply.messages) for reply in replies] == [number < ahead for number in range(len(sizes))]
    if ahead < len(sizes):
        first = next(messages_of(replies[0])).header.size
        assert worker.next_message(1, 1, first).messages  # the loop has taken one


def test_arrays_of_all_kinds_arrive_writable_and_by_themselves() -> None:
    """A batch is attached array by array, unless its pickle is long, and smaller items share a segment."""
    kept = [
        np.arange(TOGETHER_BYTES, dtype=np.int64),
        np.arange(4 * TOGETHER_BYTES, dtype=np.uint8)[::2],  # not contiguous
        np.arange(TOGETHER_BYTES, dtype=np.float32).reshape(64, -1).T,
        (torch.arange(TOGETHER_BYTES), torch.zeros(3), b"x" * 40_000),
        torch.arange(20_000),
        [np.arange(9000 + number) for number in range(900)],  # too many for a table outside of the segment
    ]
    worker, items, following = worker_of(lambda: IterableWrapper(kept)), list[Any](), request()
    while len(items) < len(kept):
        for message in messages_of(worker.next_message(1, len(items), 2**40, following)):
            if message.header.kind == Kind.ITEMS:
                items += READER.items(message)
        following = None  # type: ignore[assignment]
    assert [comparable(item) for item in items] == [comparable(item) for item in kept]
    for array in (*items[:3], *items[5]):
        array += 1
    items[3][0].add_(1)


def test_a_missing_shard_names_the_host_and_what_to_do() -> None:
    Path("missing").mkdir(exist_ok=True)
    worker = worker_of(lambda: ShardList(["missing/0.tar"]).sharding_filter().load_wds_shards().group_samples())
    with pytest.raises(ShardOpenError, match=r"on host .*This host has no 'missing/0.tar'.*reachable"):
        receive(worker.next_message(1, 0, 0, request()), LoopPosition(), [])


def test_a_missing_module_names_what_to_do() -> None:
    worker = RemoteWorker(
        WorkerJob(None, ALONE.on_worker(0, 1), 12, 3, None, None, None, True, "", "worker process 0"),
        b"cmissing_module\nfunction\n.",
        None,
        0,
    )
    for _ in range(2):  # each call says so
        with pytest.raises(ModuleNotFoundError, match=r"This host lacks the module 'missing_module': .* runtime_env"):
            receive(worker.next_message(1, 0, 0, request()), LoopPosition(), [])


STARTS = list[Any]()


def fail_to_start(pipe: Any, info: Any) -> Any:
    STARTS.append(info)
    raise ValueError(f"this is start {len(STARTS)}")


def test_a_function_that_fails_at_the_start_is_not_called_again() -> None:
    STARTS.clear()
    worker = worker_of(EXACT["keys"], init_fn=fail_to_start)
    for _ in range(2):
        with pytest.raises(ValueError, match="this is start 1"):
            receive(worker.next_message(1, 0, 0, request()), LoopPosition(), [])


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{"build": lambda: split().map(interrupt)}, {"init_fn": interrupt}])
def test_a_function_that_is_interrupted_ends_the_process(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A local worker ends so, too; Ray ends the actor, which another may replace."""
    worker = worker_of(**{"build": EXACT["keys"], **options})
    with pytest.raises(SystemExit):
        worker.next_message(1, 0, 0, request())
    assert "in interrupt" in capsys.readouterr().err


def test_a_worker_that_has_started_frees_the_pickle_of_its_code() -> None:
    """A table in the pipeline would take its memory twice."""
    freed = list[bytes]()

    class Code(bytes):
        def __del__(self) -> None:
            freed.append(self[:1])

    worker = worker_of(EXACT["keys"], code=Code)
    assert not freed
    assert worker.next_message(1, 0, 0, request()).messages
    assert freed


def test_skipped_items_are_known_although_replies_of_an_earlier_epoch_were_dropped() -> None:
    """The last counts were in such a reply."""
    worker = worker_of(lambda: split().map(as_it_is).map_samples(refuse_all, on_error="skip"))
    assert receive(worker.next_message(1, 0, 0, request()), LoopPosition(), [])
    counts = [
        READER.body(message).total
        for message in messages_of(worker.next_message(2, 0, 0, request()))
        if message.header.kind == Kind.COUNTERS
    ]
    assert counts == [36]


def refuse_all(sample: Any) -> Any:
    raise ValueError(sample["__key__"])
