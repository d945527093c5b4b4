"""Time-outs of stores: each library gets them through its own options, unless the user has set them."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientTimeout

from wds_datapipes.io.remote.filesystem import TIMEOUT_S, RemotePath, with_timeouts


def seconds_of(filesystem: Any) -> tuple[float, float]:
    filesystem.connect()
    config = filesystem.s3.meta.config
    return config.connect_timeout, config.read_timeout


def test_the_client_of_s3_has_the_time_outs(s3_store: Any) -> None:
    options = {**s3_store.options(), "skip_instance_cache": True}
    own = {**options, "config_kwargs": {"read_timeout": 3, "max_pool_connections": 5}}
    for given, timeout_s, expected in [(options, 7.5, (7.5, 7.5)), (own, 7.5, (7.5, 3)), (options, None, (5, 15))]:
        assert seconds_of(RemotePath("s3://bucket/a.tar", given, timeout_s).filesystem) == expected
    assert own["config_kwargs"] == {"read_timeout": 3, "max_pool_connections": 5}


@pytest.mark.parametrize(("timeout_s", "expected"), [(None, TIMEOUT_S), (7.5, 7.5)])
def test_a_library_that_would_wait_forever_always_has_time_outs(timeout_s: float | None, expected: float) -> None:
    google = with_timeouts("gs", {"token": "anon"}, timeout_s)
    limits = google.pop("requests_timeout")
    assert isinstance(limits, ClientTimeout)
    assert (limits.sock_connect, limits.sock_read) == (expected, expected)
    assert google == {"token": "anon"}
    for scheme in ("sftp", "ssh"):
        asked = with_timeouts(scheme, {"banner_timeout": 1}, timeout_s)
        assert asked == {
            "timeout": expected,
            "auth_timeout": expected,
            "channel_timeout": expected,
            "banner_timeout": 1,
        }


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("az", {"connection_timeout": 7, "read_timeout": 7}),
        ("abfs", {"connection_timeout": 7, "read_timeout": 7}),
        ("ftp", {"timeout": 7}),
        ("https", {}),  # for each request
        ("memory", {}),
    ],
)
def test_a_library_with_time_outs_keeps_them_unless_others_are_requested(scheme: str, expected: dict[str, Any]) -> None:
    assert with_timeouts(scheme, {}, 7) == expected
    assert with_timeouts(scheme, {}, None) == {}
    own = dict.fromkeys(expected, 3)
    assert with_timeouts(scheme, own, 7) == own


def test_options_of_users_for_googles_store_are_kept() -> None:
    for own in ({"requests_timeout": 5}, {"session_kwargs": {"timeout": 5}}):
        assert with_timeouts("gs", own, 7) == own
