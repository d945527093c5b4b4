"""nginx: with and without ranges, content codings, passwords, TLS, redirects to another host, and restarted servers."""

from __future__ import annotations

import base64
import json
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, fault_proxy
from nginx_server import PASSWORD, USER, Nginx

from wds_datapipes import ShardList
from wds_datapipes.errors import ShardOpenError, ShardReadError
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.retry import RetryPolicy
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{number}", "bin": random.Random(number).randbytes(2_000 * number + 100), "cls": f"{number}"}
    for number in range(9)
]
WANT = [(sample["__key__"], sample["bin"]) for sample in SAMPLES]
HEADER = {"Authorization": f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"}
#: The locations that send the files unchanged, and whether they support ranges.
LOCATIONS = {"": True, "whole/": False, "gzip/": True, "gzip-for-all/": False, "elsewhere/": True}


@pytest.fixture
def server(nginx: Nginx) -> Iterator[Nginx]:
    """Serve a.tar correctly, and forget earlier requests; restart it afterwards."""
    build_shard(nginx.files / "a.tar", SAMPLES)
    nginx.asked()
    yield nginx
    nginx.start()


def pipeline(url: str, **options: Any) -> Any:
    pipe = ShardList(url).load_wds_shards(**options).group_samples().shuffle_samples(3)
    pipe.set_seed(5)
    return pipe


def read(url: str, **options: Any) -> list[tuple[str, bytes]]:
    samples = ShardList(url).load_wds_shards(**options).group_samples()
    return [(sample["__key__"], sample["bin"]) for sample in samples]


def asked(server: Nginx) -> list[tuple[int, str, str]]:
    """The status, location and range of each request."""
    found = [re.fullmatch(r"\d+ (\d+) GET (\S+)a\.tar \[(.*)\] \[.*\]", line) for line in server.asked()]
    return [(int(match[1]), match[2].removeprefix("/"), match[3]) for match in found if match is not None]


@pytest.mark.parametrize("location", LOCATIONS)
def test_the_rest_of_an_epoch_is_read_by_ranges_if_supported(server: Nginx, location: str) -> None:
    cut = 4
    url = f"http://127.0.0.1:{server.http}/{location}a.tar"
    assert read(url) == WANT
    whole = [sample["__key__"] for sample in pipeline(url)]
    items = iter(broken_off := pipeline(url))
    for _ in range(cut):
        next(items)
    state = json.loads(json.dumps(save_state(broken_off)))
    items.close()
    load_state(resumed := pipeline(url), state)
    server.asked()
    assert [sample["__key__"] for sample in resumed] == whole[cut:]
    found = [(status, part) for status, place, part in asked(server) if place == location and status != 302]
    if location == "elsewhere/":
        found = [(status, part) for status, place, part in asked(server) if not place]
    if LOCATIONS[location]:
        assert {status for status, _ in found} <= {206}
        assert "bytes=0-" not in [part for _, part in found]
    else:
        assert found == [(200, "bytes=0-511"), (200, "-")]


def test_the_password_gives_access(server: Nginx) -> None:
    assert read(f"http://{USER}:{PASSWORD}@127.0.0.1:{server.http}/closed/a.tar") == WANT
    url = f"http://127.0.0.1:{server.http}/closed/a.tar"
    assert read(url, storage_options={"headers": HEADER}) == WANT


def test_the_error_of_an_unknown_authority_says_what_to_do(server: Nginx, pauses: list[float]) -> None:
    url = f"https://127.0.0.1:{server.https}/a.tar"
    for on_error in ("raise", "skip"):
        with pytest.raises(
            ShardOpenError,
            match=r"a\.tar cannot be opened: the certificate of the server is not trusted .*"
            r'storage_options=\{"ca_file": "authority\.pem"\}',
        ) as found:
            read(url, on_error=on_error)
        assert found.value.concerns_all
    assert pauses == []


def test_a_file_makes_a_private_authority_trusted(server: Nginx, tmp_path: Path) -> None:
    url = f"https://127.0.0.1:{server.https}/a.tar"
    options = {"storage_options": {"ca_file": str(server.authority)}}
    assert read(url, **options) == WANT
    # An opener in a worker, or loaded from a state of DataLoader2, was pickled.
    again = pickle.loads(pickle.dumps(pipeline(url, **options)))
    assert len(list(again)) == len(WANT)
    cached = ShardList(url).cache_wds_shards(tmp_path / "copies").load_wds_shards(**options).group_samples()
    assert len(list(cached)) == len(WANT)
    # It is not valid for other names.
    with pytest.raises(ShardOpenError, match="the certificate of the server is not trusted"):
        read(f"https://localhost:{server.https}/a.tar", **options)


def test_a_file_without_certificates_is_an_error(server: Nginx, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("no certificate")
    for name in ("empty.pem", "absent.pem"):
        with pytest.raises(ShardOpenError, match=r"storage_options\['ca_file'\] must be a file with certificates"):
            read(f"https://127.0.0.1:{server.https}/a.tar", storage_options={"ca_file": str(tmp_path / name)})


def test_reading_waits_for_a_server_to_start(server: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 4:
            server.start()

    monkeypatch.setattr(RetryPolicy, "sleep", lambda _, pause_s: wait(pause_s))
    with open_url(f"http://127.0.0.1:{server.http}/slow/a.tar") as stream:
        data = stream.read(10_000)
        server.stop()
        data += b"".join(iter(lambda: stream.read(10_000), b""))
    assert data == (server.files / "a.tar").read_bytes()
    assert len(waited) == 4


def test_a_server_that_stays_down_is_an_error_with_the_offset(server: Nginx, pauses: list[float]) -> None:
    with open_url(f"http://127.0.0.1:{server.http}/slow/a.tar", retries=3) as stream:
        pieces = [stream.read(10_000)]
        server.stop()
        with pytest.raises(ShardReadError, match=r"/slow/a\.tar failed after (\d+) bytes: .*\(4 attempts\)") as found:
            pieces.extend(iter(lambda: stream.read(10_000), b""))
    assert f"after {sum(map(len, pieces))} bytes" in str(found.value)
    with pytest.raises(ShardOpenError, match=r"a\.tar cannot be opened: ConnectionRefusedError: .*\(3 attempts\)"):
        open_url(f"http://127.0.0.1:{server.http}/a.tar", retries=2)


def test_a_broken_content_coding_is_read_again(server: Nginx, pauses: list[float]) -> None:
    with fault_proxy(("127.0.0.1", server.http)) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/gzip-for-all/a.tar"
        proxy.faults[:] = [Fault(at=0, how="reset"), Fault(status=503)]
        assert read(url) == WANT
        proxy.faults[:] = [Fault(at=30_000, how="close")]
        proxy.asked.clear()
        assert read(url) == WANT
        assert len(proxy.asked) == 2
