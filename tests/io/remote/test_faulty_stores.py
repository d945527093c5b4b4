"""Busy and refusing stores: what is retried, how many times and after which delay, and what ends a run."""

from __future__ import annotations

import random
import time
import traceback
from email.utils import formatdate
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from faults import Fault, FaultProxy, fault_proxy
from nginx_server import Nginx

from wds_datapipes import ErrorBudget, ShardList
from wds_datapipes.errors import ShardError, ShardOpenError, ShardReadError
from wds_datapipes.io.remote.retry import RetryPolicy
from wds_datapipes.testing import build_shard

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{n}", "jpg": random.Random(n).randbytes(3_000 * n + 100)} for n in range(9)
]
WANT = [(sample["__key__"], sample["jpg"]) for sample in SAMPLES]
pytestmark = pytest.mark.usefixtures("pauses")
SECRET = "hunter2hunter2"
#: More time than a busy machine needs for a response.
TIMEOUT_S = 2.0


@pytest.fixture
def site(nginx: Nginx, proxy: FaultProxy) -> FaultProxy:
    build_shard(nginx.files / "busy.tar", SAMPLES)
    return proxy


def keys(place: FaultProxy | str, **options: Any) -> list[tuple[str, bytes]]:
    url = place if isinstance(place, str) else f"http://me:{SECRET}@127.0.0.1:{place.port}/busy.tar?sig={SECRET}"
    samples = ShardList([url]).load_wds_shards(**options).group_samples()
    return [(sample["__key__"], sample["jpg"]) for sample in samples]


def test_requests_to_a_busy_server_are_retried(site: FaultProxy, pauses: list[float]) -> None:
    statuses = [408, 425, 429, 500, 502, 503, 504]
    site.faults[:] = [*(Fault(status=status) for status in statuses), Fault(at=20_000, how="close"), Fault(status=503)]
    assert keys(site) == WANT
    assert len(pauses) == 9
    assert all(0 <= pause <= 1 for pause in pauses[:3])


def test_a_server_may_say_how_long_to_wait(site: FaultProxy, pauses: list[float]) -> None:
    later = formatdate(time.time() + 50, usegmt=True)
    site.faults[:] = [Fault(status=503, headers={"Retry-After": text}) for text in ("7", later, "soon")]
    assert keys(site) == WANT
    assert pauses[0] == 7
    assert 40 < pauses[1] <= 50
    assert pauses[2] <= 1


@pytest.mark.parametrize("text", ["0", "-1", "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_a_server_that_requests_no_pause_is_not_asked_again_at_once(
    site: FaultProxy, pauses: list[float], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    site.faults[:] = [Fault(status=503, headers={"Retry-After": text})] * 4
    assert keys(site) == WANT
    assert pauses == [0.25, 0.5, 1.0, 2.0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_permanent_errors_are_not_retried(site: FaultProxy, pauses: list[float], status: int) -> None:
    site.faults[:] = [Fault(status=status)]
    with pytest.raises(ShardOpenError, match=rf"busy\.tar\?sig=\*\*\* cannot be opened: HTTP status {status}") as found:
        keys(site)
    assert SECRET not in "".join(traceback.format_exception(found.value))
    assert pauses == []
    assert len(site.asked) == 1


def test_retries_are_limited(site: FaultProxy, pauses: list[float]) -> None:
    site.faults[:] = [Fault(at=1000, how="stall"), *[Fault(status=503)] * 20]
    with pytest.raises(
        ShardReadError, match=r"Reading \S+busy\.tar\S+ failed after 1000 bytes: HTTP status 503, .* \(4 attempts\)"
    ) as found:
        keys(site, retries=3, timeout_s=TIMEOUT_S)
    assert len(pauses) == 3
    assert SECRET not in "".join(traceback.format_exception(found.value))
    for fault, options, message in (
        (Fault(status=500), {"retries": 2}, r"HTTP status 500, .* \(3 attempts\)"),
        (Fault(status=503, headers={"Retry-After": "3000"}), {}, "HTTP status 503"),
        (Fault(status=503), {"retries": 0}, "HTTP status 503"),
    ):
        site.faults[:] = [fault] * 20
        with pytest.raises(ShardOpenError, match=f"cannot be opened: {message}"):
            keys(site, **options)


@pytest.mark.parametrize(("begin", "status"), [([], 401), ([Fault(at=40_000, how="close")], 403)])
def test_refused_credentials_end_the_run_under_any_policy(site: FaultProxy, begin: list[Fault], status: int) -> None:
    for on_error in ("skip", ErrorBudget(max_errors=100, warn=False)):
        site.faults[:] = [*begin, Fault(status=status)]
        with pytest.raises(ShardError, match=f"HTTP status {status}") as found:
            keys(site, on_error=on_error)
        assert found.value.concerns_all


def test_a_store_that_refuses_a_key_ends_the_run_under_any_policy(s3_store: Any) -> None:
    options = {**s3_store.options(), "secret": "wrong", "skip_instance_cache": True}
    with pytest.raises(
        ShardOpenError, match=r"a\.tar cannot be opened: HTTP status 403, Forbidden \(\w+\). Check the cred"
    ):
        keys("s3://bucket/a.tar", storage_options=options, on_error="skip")


@pytest.mark.parametrize("how", ["reset", "stall"])
def test_reading_from_s3_resumes(s3_store: Any, tmp_path: Path, how: str) -> None:
    with fault_proxy(("127.0.0.1", s3_store.port)) as proxy:
        options = {**s3_store.options(proxy.port), "skip_instance_cache": True}
        store = fsspec.filesystem("s3", **options)
        store.pipe_file(f"bucket/{how}/a.tar", Path(build_shard(tmp_path / "a.tar", SAMPLES)).read_bytes())
        proxy.faults[:] = [Fault(at=20_000, how=how)] * 2
        assert keys(f"s3://bucket/{how}/a.tar", storage_options=options, timeout_s=TIMEOUT_S) == WANT


def test_pauses_grow_and_are_randomized(pauses: list[float]) -> None:
    for _ in range(200):
        retry = RetryPolicy(8, 1e9)
        while retry.wait(ConnectionResetError(), "x", retry.clock()):
            pass
    by_try = [pauses[at::8] for at in range(8)]
    most = [0.25 * 2**at for at in range(8)]
    assert all(min(some) >= 0 and max(some) <= limit for some, limit in zip(by_try, most, strict=False))
    assert all(max(some) > limit / 2 > min(some) for some, limit in zip(by_try, most, strict=False))
