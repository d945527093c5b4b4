"""Lists and tuples of samples arrive as they were sent, and at the cost of single samples."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_values import assert_same

from wds_datapipes.loading.transport.protocol import new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import Sender


class Pair(NamedTuple):
    image: Any
    label: Any


class Fields(dict[Any, Any]):
    """A dictionary of a user's class."""


class Rows(list[Any]):
    """A list of a user's class."""


KINDS: list[Any] = [dict, Fields, collections.OrderedDict]

#: Sizes on both sides of those from which arrays, pickles and whole items travel in another way.
SIZES = st.sampled_from([0, 1, 100, 20_000, 70_000, 600_000])
VALUES = st.one_of(
    st.integers(),
    st.none(),
    st.text(max_size=5),
    SIZES.map(lambda size: b"j" * size),
    SIZES.map(lambda size: bytearray(b"j") * size),
    SIZES.map(lambda size: np.arange(size, dtype=np.uint8)),
    SIZES.map(lambda size: np.arange(size // 4 * 2, dtype=np.int16).reshape(2, -1).T),
    SIZES.map(lambda size: torch.arange(size).to(torch.uint8)),
)


def nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, tuples and dictionaries, in which some parts stand more than once."""
    repeated = st.lists(parts, min_size=1, max_size=3).flatmap(
        lambda some: st.lists(st.sampled_from(range(len(some))), max_size=6).map(lambda order: [some[n] for n in order])
    )
    return st.one_of(
        repeated,
        repeated.map(tuple),
        repeated.map(Rows),
        repeated.map(lambda some: Pair(some, tuple(some))),
        st.builds(lambda kind, some: kind(enumerate(some)), st.sampled_from(KINDS), repeated),
    )


ITEMS = st.lists(st.recursive(VALUES, nested, max_leaves=12), max_size=4)


def aliases(value: Any) -> list[int]:
    """Return, for each object in a value, the number of its first appearance."""
    numbers = dict[int, int]()
    found = list[int]()

    def visit(part: Any) -> None:
        known = id(part) in numbers
        found.append(numbers.setdefault(id(part), len(numbers)))
        if known:
            return
        if isinstance(part, dict):
            part = list(part.values())
        if isinstance(part, list | tuple):
            for each in part:
                if isinstance(each, list | dict | bytearray | np.ndarray | torch.Tensor) or (
                    isinstance(each, bytes | tuple) and len(each) > 1  # Python itself has only one empty one
                ):
                    visit(each)

    visit(value)
    return found


def carried(items: list[Any]) -> Iterator[Any]:
    """Yield what arrives at the other end of a channel."""
    near, far = new_channel()
    with closing(near), closing(far):
        sender, receiver = Sender(far, window=100, together=3), Receiver(near, window=100)
        for item in items:
            sender.put(item)
        sender.flush()
        while (message := receiver.receive()) is not None:
            yield from receiver.items(message)


@given(ITEMS)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_arrives_equals_what_was_sent_and_repeats_the_same_objects(items: list[Any]) -> None:
    for got, sent in zip(carried(items), items, strict=True):
        assert_same(got, sent)
        assert aliases(got) == aliases(sent)


#: Sends lists of 64 images of 100 KB, drops each when the next one has arrived, and prints the page faults of an image.
PROGRAM = """
import os, resource
from wds_datapipes.loading.transport.protocol import new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import Sender

near, far = new_channel()
sender, receiver = Sender(far, window=4, together=256), Receiver(near, window=4)
images = [os.urandom(100_000) for _ in range(64)]

def carry(times):
    for number in range(times):
        sender.put([{"__key__": f"{number}/{n}", "jpg": image} for n, image in enumerate(images)])
        for kept in receiver.items(receiver.receive()):
            assert len(kept) == 64
        receiver.credit()
        sender.receive_requests()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = carry(6)
after = carry(20)
print((after - before) / 20 / 64)
"""


def test_the_memory_of_a_list_is_used_again() -> None:
    """The C library would give it back to the system, and getting it again takes longer than copying the samples."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    assert float(done.stdout) < 3  # an image has 25 pages
