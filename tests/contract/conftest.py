"""What the tests of this folder share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what webdataset leaves to the garbage collection, while nobody minds: a later test would be blamed."""
    yield
    gc.collect()
