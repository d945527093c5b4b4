"""Stores with faulty answers: the samples are those of an undisturbed run, or an error names the shard and offset."""

from __future__ import annotations

import functools
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from faults import Fault, FaultProxy, fault_proxy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_datapipes import ErrorBudget, ShardList
from wds_datapipes.errors import ChangedShardError, ShardError, ShardOpenError, ShardReadError, TruncatedShardError
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.retry import RetryPolicy
from wds_datapipes.testing import build_shard

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{n}", "cls": f"{n}", "jpg": bytes([n]) * (3_000 * n + 100)} for n in range(9)
]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record pauses instead of making them."""
    found: list[float] = []
    monkeypatch.setattr(RetryPolicy, "sleep", lambda _, pause_s: found.append(pause_s))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    build_shard(folder / "a.tar", SAMPLES)
    build_shard(folder / "a.tar.gz", SAMPLES)
    return folder


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with ranges and ETags."""

    protocol_version = "HTTP/1.1"
    directory: str

    def do_GET(self) -> None:
        body = Path(self.directory, self.path.partition("?")[0].lstrip("/")).read_bytes()
        size, etag = len(body), f'"{hash(body):x}"'
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            start, _, end = asked.removeprefix("bytes=").partition("-")
            begin, stop = int(start), min(int(end or size), size - 1)
            if begin >= size:
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{stop}/{size}")
            body = body[begin : stop + 1]
        else:
            self.send_response(200)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web(root: Path) -> Iterator[FaultProxy]:
    handler = functools.partial(Files, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with fault_proxy(("127.0.0.1", server.server_address[1])) as proxy:
            yield proxy
        server.shutdown()
        thread.join()


def keys(url: str, **options: Any) -> list[tuple[str, bytes]]:
    samples = ShardList([url]).load_wds_shards(**options).group_samples()
    return [(sample["__key__"], sample["jpg"]) for sample in samples]


WANT = [(sample["__key__"], sample["jpg"]) for sample in SAMPLES]
#: More than a busy machine needs for an answer.
TIMEOUT_S = 2.0


@pytest.fixture
def site(web: FaultProxy) -> Iterator[FaultProxy]:
    web.faults.clear()
    web.asked.clear()
    web.stalled.clear()
    yield web
    web.stalled.set()


def url_of(site: FaultProxy, name: str = "a.tar") -> str:
    return f"http://127.0.0.1:{site.port}/{name}"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["a.tar", "a.tar.gz"]),
    faults=st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["reset", "close"])), max_size=6),
)
def test_a_broken_connection_changes_no_sample(
    root: Path, site: FaultProxy, name: str, faults: list[tuple[float, str]]
) -> None:
    size = (root / name).stat().st_size
    site.asked.clear()
    site.faults[:] = [Fault(at=round(part * size), how=how) for part, how in faults]
    assert keys(url_of(site, name)) == WANT
    begins = [int((asked or "bytes=0-").removeprefix("bytes=").removesuffix("-")) for _, asked in site.asked]
    assert begins == sorted(begins)  # nothing is requested again that has arrived


def test_reading_resumes_at_the_next_byte(root: Path, site: FaultProxy) -> None:
    with open_url(url_of(site)) as stream:
        begin = stream.read(8192)
    site.asked.clear()
    site.faults[:] = [Fault(at=len(begin) + 50_000, how="close"), Fault(at=0, how="close"), None]
    with open_url(url_of(site)) as stream:
        assert b"".join(iter(lambda: stream.read(1000), b"")) == (root / "a.tar").read_bytes()
    assert site.asked[0][1] is None
    first, second = (int((asked or "bytes=0-").removeprefix("bytes=").removesuffix("-")) for _, asked in site.asked[1:])
    # Bytes that have arrived over a broken connection, but were not read yet, are requested again.
    assert 0 <= first == second <= len(begin) + 50_000


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_requests_to_a_busy_server_are_retried(site: FaultProxy, pauses: list[float], status: int) -> None:
    site.faults[:] = [Fault(status=status), Fault(at=20_000, how="close"), Fault(status=status)]
    assert keys(url_of(site)) == WANT
    assert len(pauses) == 3
    assert all(0 <= pause <= 1 for pause in pauses)


def test_a_server_may_say_how_long_to_wait(site: FaultProxy, pauses: list[float]) -> None:
    later = formatdate(time.time() + 50, usegmt=True)
    site.faults[:] = [
        Fault(status=503, headers={"Retry-After": "7"}),
        Fault(status=429, headers={"Retry-After": later}),
        Fault(status=503, headers={"Retry-After": "soon"}),
    ]
    assert keys(url_of(site)) == WANT
    assert pauses[0] == 7
    assert 40 < pauses[1] <= 50
    assert pauses[2] <= 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_permanent_errors_are_logged_at_once(site: FaultProxy, pauses: list[float], status: int) -> None:
    site.faults[:] = [Fault(status=status)]
    with pytest.raises(ShardOpenError, match=rf"a\.tar cannot be opened: HTTP status {status}"):
        keys(url_of(site))
    assert pauses == []
    assert len(site.asked) == 1


def test_retries_are_limited(site: FaultProxy, pauses: list[float]) -> None:
    site.faults[:] = [Fault(at=1000, how="stall"), *[Fault(status=503)] * 20]
    with pytest.raises(
        ShardReadError, match=r"Reading \S+a\.tar failed after 1000 bytes: HTTP status 503, .* \(4 attempts\)"
    ):
        keys(url_of(site), retries=3, timeout_s=TIMEOUT_S)
    assert len(pauses) == 3
    site.faults[:] = [Fault(status=500)] * 20
    with pytest.raises(ShardOpenError, match=r"cannot be opened: HTTP status 500, .* \(3 attempts\)"):
        keys(url_of(site), retries=2)
    site.faults[:] = [Fault(status=503, headers={"Retry-After": "3000"})]
    with pytest.raises(ShardOpenError, match="HTTP status 503"):
        keys(url_of(site))
    site.faults[:] = [Fault(status=503)]
    with pytest.raises(ShardOpenError, match="HTTP status 503"):
        keys(url_of(site), retries=0)


def test_a_stalled_request_is_abandoned_and_retried(site: FaultProxy) -> None:
    site.faults[:] = [Fault(at=30_000, how="stall")]
    assert keys(url_of(site), timeout_s=TIMEOUT_S) == WANT
    assert [asked for _, asked in site.asked] == [None, "bytes=30000-"]


@pytest.mark.parametrize(
    "headers", [{"ETag": '"other"'}, {"Content-Range": "bytes 40000-40001/40002"}, {"Last-Modified": formatdate(0)}]
)
def test_a_replaced_shard_is_an_error_and_never_spliced(site: FaultProxy, headers: dict[str, str | None]) -> None:
    for on_error in ("raise", "skip"):
        body = b"ab" if "Content-Range" in headers else None
        site.faults[:] = [Fault(at=40_000, how="close"), Fault(headers=headers, body=body)]
        with pytest.raises(ChangedShardError, match=r"a\.tar was replaced while it was read: after 40000 bytes"):
            keys(url_of(site), on_error=on_error)


def test_a_server_without_ranges_sends_everything_again(site: FaultProxy, root: Path) -> None:
    whole = (root / "a.tar").read_bytes()
    site.faults[:] = [
        Fault(at=40_000, how="close", headers={"ETag": '"one"'}),
        *[Fault(no_range=True, headers={"ETag": '"one"'})] * 3,
    ]
    with open_url(url_of(site)) as stream:
        data = b"".join(iter(lambda: stream.read(8192), b""))
    assert data == whole


def test_a_shard_without_a_version_is_read_again_after_a_broken_connection(site: FaultProxy) -> None:
    site.faults[:] = [Fault(at=40_000, how="close", headers={"ETag": None}), Fault(headers={"ETag": None})]
    assert keys(url_of(site)) == WANT
    assert [asked for _, asked in site.asked] == [None, None]


def test_a_body_shorter_than_its_declared_length_is_not_the_end(site: FaultProxy, root: Path) -> None:
    whole = (root / "a.tar").read_bytes()
    site.faults[:] = [Fault(body=whole[:30_000], how="close", at=30_000, headers={"Content-Length": str(len(whole))})]
    assert keys(url_of(site)) == WANT


def test_a_declared_length_that_is_too_small_is_a_truncated_shard(site: FaultProxy, root: Path) -> None:
    whole = (root / "a.tar").read_bytes()
    site.faults[:] = [Fault(body=whole[:30_000])]
    with pytest.raises(TruncatedShardError, match=r"a\.tar"):
        keys(url_of(site))


def test_a_policy_counts_a_shard_that_failed_permanently(site: FaultProxy) -> None:
    site.faults[:] = [Fault(at=40_000, how="close"), *[Fault(status=410)] * 2]
    found = keys(url_of(site), on_error="skip")
    assert 0 < len(found) < len(WANT)
    assert found == WANT[: len(found)]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("begin", [[], [Fault(at=40_000, how="close")]])
def test_refused_credentials_end_the_run_under_any_policy(site: FaultProxy, status: int, begin: list[Fault]) -> None:
    for on_error in ("skip", ErrorBudget(max_errors=100, warn=False)):
        site.faults[:] = [*begin, Fault(status=status)]
        with pytest.raises(ShardError, match=f"HTTP status {status}"):
            keys(url_of(site), on_error=on_error)


def test_a_store_that_refuses_a_key_ends_the_run_under_any_policy(s3_store: Any) -> None:
    options = {**s3_store.options(), "secret": "wrong", "skip_instance_cache": True}
    with pytest.raises(ShardOpenError, match=r"s3://bucket/a\.tar cannot be opened: permission denied"):
        keys("s3://bucket/a.tar", storage_options=options, on_error="skip")


@pytest.mark.parametrize("how", ["reset", "close", "stall"])
def test_reading_from_s3_resumes(s3_store: Any, root: Path, how: str) -> None:
    with fault_proxy(("127.0.0.1", s3_store.port)) as proxy:
        options = {
            **s3_store.options(proxy.port),
            "config_kwargs": {"read_timeout": TIMEOUT_S, "retries": {"max_attempts": 0}},
            "skip_instance_cache": True,
        }
        store = fsspec.filesystem("s3", **options)
        store.pipe_file(f"bucket/{how}/a.tar", (root / "a.tar").read_bytes())
        proxy.faults[:] = [Fault(at=20_000, how=how)] * 2
        assert keys(f"s3://bucket/{how}/a.tar", storage_options=options) == WANT


def test_pauses_grow_and_are_randomized(pauses: list[float]) -> None:
    for _ in range(200):
        retry = RetryPolicy(8, 1e9)
        while retry.wait(ConnectionResetError(), "x", retry.clock()):
            pass
    by_try = [pauses[at::8] for at in range(8)]
    most = [0.25 * 2**at for at in range(8)]
    assert all(min(some) >= 0 and max(some) <= limit for some, limit in zip(by_try, most, strict=False))
    assert all(max(some) > limit / 2 > min(some) for some, limit in zip(by_try, most, strict=False))


def test_a_worker_closes_everything_it_has_opened(site: FaultProxy, root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        site.faults[:] = [Fault(at=40_000, how="reset"), Fault(at=100, how="close"), Fault(status=404)]
        with pytest.raises(ShardError):
            keys(url_of(site))
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 2)


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to that")
