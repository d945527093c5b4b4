"""The fixtures of the tests of stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from site_server import Site
from web_server import serving

from wds_datapipes.io.remote.http_connection import POOL
from wds_datapipes.io.remote.retry import RetryPolicy


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record pauses between attempts instead of making them."""
    found: list[float] = []
    monkeypatch.setattr(RetryPolicy, "sleep", lambda _, pause_s: found.append(pause_s))
    return found


@pytest.fixture
def site() -> Iterator[Site]:
    """Run a web server, whose connections are new."""
    POOL.clear()
    with serving(Site()) as server:
        yield server
        server.left.set()
        POOL.clear()
