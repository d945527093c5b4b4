"""When a message has no room for another item."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from wds_datapipes.loading.transport.bundle import ALIGNMENT, Bundle
from wds_datapipes.loading.transport.flow_control import TOGETHER_BYTES
from wds_datapipes.loading.transport.protocol import NUMBER
from wds_datapipes.loading.transport.serialization import Array, SerializedItem
from wds_datapipes.loading.transport.shared_memory import SegmentPool


def item_of(size: int, *, has_array: bool) -> SerializedItem:
    """Return an item that takes this many bytes of a message, with the two numbers for it and for its array."""
    arrays: list[Array] = [np.zeros(size // ALIGNMENT * ALIGNMENT - ALIGNMENT, np.uint8)] if has_array else []
    pickle = bytes(size - 2 * NUMBER - sum(array.nbytes + 2 * NUMBER for array in arrays))
    return [pickle], len(pickle), arrays


@pytest.mark.parametrize("has_array", [False, True])
@pytest.mark.parametrize(
    ("size", "count"), [(TOGETHER_BYTES // 4 - 1, 4), (TOGETHER_BYTES // 4, 4), (TOGETHER_BYTES // 4 + 1, 3)]
)
def test_a_bundle_is_full_exactly_when_it_refuses_another_item_of_the_same_size(
    size: int, count: int, has_array: bool
) -> None:
    with closing(SegmentPool()) as pool:
        bundle = Bundle(pool)
        for number in range(5):
            assert bundle.is_full == (number >= count)
            assert bundle.add(item_of(size, has_array=has_array)) == (number < count)
        assert bundle.count == count
