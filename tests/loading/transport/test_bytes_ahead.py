"""How far a `Sender` runs ahead: memory limits large messages, and their number limits small ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from wds_datapipes.loading.transport.flow_control import AHEAD_BYTES
from wds_datapipes.loading.transport.protocol import new_channel
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import Sender

WINDOW = 12


@pytest.fixture
def ends() -> Iterator[tuple[Receiver, Sender]]:
    near, far = new_channel()
    with closing(near), closing(far):
        sender = Sender(far, window=WINDOW, together=1)
        receiver = Receiver(near, window=WINDOW)
        assert receiver.receive() is None  # except for its page
        yield receiver, sender


def fill(sender: Sender, item: object) -> int:
    """Put as many items as the sender accepts; return their number."""
    count = 0
    while not sender.is_full:
        assert sender.put(item)
        count += 1
    return count


def take(receiver: Receiver) -> Any:
    message = receiver.receive()
    assert message is not None
    (item,) = receiver.items(message)
    return item


@pytest.mark.parametrize(
    ("item", "ahead"),
    [
        (b"small", WINDOW),
        (np.zeros(AHEAD_BYTES // (2 * WINDOW), np.uint8), WINDOW),
        (np.zeros(AHEAD_BYTES // 3 + 1, np.uint8), 3),
        (np.zeros(AHEAD_BYTES + 1, np.uint8), 2),
        (bytes(AHEAD_BYTES // 3 + 1), 3),
    ],
    ids=["small", "moderate", "large", "one that is more than all may be", "large bytes"],
)
def test_the_number_of_messages_ahead_is_limited(ends: tuple[Receiver, Sender], item: Any, ahead: int) -> None:
    receiver, sender = ends
    assert fill(sender, item) == ahead
    for _ in range(ahead):
        take(receiver)
    receiver.credit()
    sender.receive_requests()
    assert fill(sender, item) == ahead  # as many again: used messages no longer count


def test_a_large_message_makes_room_when_it_is_taken(ends: tuple[Receiver, Sender]) -> None:
    """While the loop works on an item, which may take long, the next item must be made."""
    receiver, sender = ends
    array = np.zeros(AHEAD_BYTES // 2, np.uint8)
    fill(sender, array)
    kept = [take(receiver)]
    sender.receive_requests()
    assert fill(sender, array) == 1
    kept.append(take(receiver))
    sender.receive_requests()
    assert fill(sender, array) == 1
    assert all(np.array_equal(each, array) for each in kept)


def test_a_new_epoch_begins_with_nothing_ahead(ends: tuple[Receiver, Sender]) -> None:
    receiver, sender = ends
    array = np.zeros(AHEAD_BYTES // 3 + 1, np.uint8)
    assert fill(sender, array) == 3
    receiver.begin(1)
    sender.begin(1)
    assert fill(sender, array) == 3
