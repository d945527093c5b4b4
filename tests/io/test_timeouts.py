"""Time limits of stores: what follows from those that are not given, and where each of them holds."""

from __future__ import annotations

import pickle
import socket
import time
from dataclasses import fields
from typing import Any

import pytest
from error_facts import naming
from readers import bytes_of
from site_server import Site

from wds_datapipes import ShardList, Timeouts
from wds_datapipes.errors import ShardOpenError
from wds_datapipes.io.file_systems import file_system_of


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (Timeouts(), {"connect_s": 10, "response_s": 30, "stalled_s": 30, "block_s": 300, "request_s": 300}),
        (Timeouts.of(None), {"silent_s": 60, "retry_s": 300, "idle_s": 15, "signature_s": 3600, "signing_s": 300}),
        (Timeouts.of(5), {"connect_s": 5, "response_s": 5, "stalled_s": 5, "block_s": 50, "silent_s": 60}),
        (Timeouts.of(400), {"connect_s": 10, "block_s": 4000, "request_s": 400, "silent_s": 800}),
        (Timeouts(connect_s=40, silent_s=3), {"connect_s": 40, "response_s": 30, "silent_s": 3}),
        (Timeouts(stalled_s=4, block_s=7, request_s=9), {"stalled_s": 4, "block_s": 7, "request_s": 9}),
    ],
)
def test_limits_that_are_not_given_follow_from_the_time_for_a_response(
    given: Timeouts, resolved: dict[str, float]
) -> None:
    assert resolved.items() <= vars(given.resolve()).items()
    assert Timeouts.of(pickle.loads(pickle.dumps(given))) == given


def test_each_limit_is_a_positive_number() -> None:
    for field in fields(Timeouts):
        for value in (0, -1, float("inf")):
            with pytest.raises(ValueError, match=f"{field.name} must be a positive number of seconds, not {value!r}"):
                Timeouts(**{field.name: value})
    with pytest.raises(ValueError, match=naming("timeout_s", "not 0")):
        ShardList("a.tar").load_wds_shards(timeout_s=0)


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_connecting_has_a_limit_of_its_own(scheme: str) -> None:
    """A server that says nothing holds up the handshake of TLS, but not a request, whose response may be slow."""
    limits = Timeouts(connect_s=0.2, response_s=0.6, silent_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        with pytest.raises(ShardOpenError, match=f"(within|longer than) {0.2 if scheme == 'https' else 0.6} s$"):
            bytes_of(url, storage_options={"timeout_s": limits})


def test_a_store_without_a_sign_of_life_is_given_up() -> None:
    with pytest.raises(ShardOpenError, match=r"refused( \([12] attempts\))?$"):
        bytes_of("http://127.0.0.1:1/a.tar", timeout_s=Timeouts(silent_s=0.001), retries=50)


def test_the_pauses_between_retries_have_a_limit(site: Site) -> None:
    site.answers = {"/busy": (503, "")}
    begin = time.monotonic()
    with pytest.raises(ShardOpenError, match="503"):
        bytes_of(site.url("/busy"), timeout_s=Timeouts(retry_s=0.01), retries=1000)
    assert time.monotonic() - begin < 60


def test_an_idle_connection_is_kept_for_as_long_as_is_said(site: Site) -> None:
    site.body = b"x" * 2000
    for idle_s, accepted in ((1e-9, 2), (600.0, 3)):
        for _ in range(2):
            assert bytes_of(site.url(), timeout_s=Timeouts(idle_s=idle_s)) == site.body
        assert len(site.accepted) == accepted


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("s3", {"config_kwargs": {"signature_version": "s3v4", "connect_timeout": 3}}),
        ("az", {"connection_timeout": 3}),
        ("sftp", {"timeout": 3, "banner_timeout": 30, "auth_timeout": 30, "channel_timeout": 30}),
        ("ftp", {"timeout": 3}),
        ("memory", {}),
    ],
)
def test_libraries_get_the_connect_time_out(scheme: str, expected: dict[str, Any]) -> None:
    assert file_system_of(scheme).set_timeouts({}, Timeouts(connect_s=3)) == expected
