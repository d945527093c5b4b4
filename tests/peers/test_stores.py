"""Google's store by its emulator, and Hugging Face's hub by a server that implements the paths of its API.

This needs the packages of the dependency group ``stores``; `nox -s "peers(stores)"` has them.
"""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

# Set before the libraries are imported, which read these once: the emulator lacks gRPC, and no file is stored twice.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from azure.core.credentials import AccessToken
from faults import Fault, fault_proxy
from nginx_server import Nginx
from web_server import web_server

from wds_datapipes import ShardList, TarWriter, WriteOptions
from wds_datapipes.errors import ChangedShardError, ShardOpenError
from wds_datapipes.index import build_indexes, read_index
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.remote_file import open_ranges
from wds_datapipes.io.remote.signing import sign_azure
from wds_datapipes.testing import build_shard

#: Warnings that libraries raise among themselves.
pytestmark = pytest.mark.filterwarnings("default")

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
SAMPLES: list[dict[str, Any]] = [{"__key__": f"{n}", "bin": bytes([n]) * (3 << 20)} for n in range(6)]
SECRET = "hf_secret123456789"


def found(urls: list[str], **options: Any) -> list[tuple[str, bytes]]:
    samples = ShardList(urls).load_wds_shards(**options).group_samples()
    return [(sample["__key__"], sample["bin"]) for sample in samples]


WANT = [(sample["__key__"], sample["bin"]) for sample in SAMPLES]


# Google's store -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def google() -> Iterator[dict[str, Any]]:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    port = server._api._httpd.server_port
    yield {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}"}
    server.stop()


def test_google_is_written_listed_and_read(google: dict[str, Any], tmp_path: Path) -> None:
    with TarWriter("gs://bucket/d/0.tar", options=WriteOptions(storage_options=google)) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    for pattern in ("gs://bucket/d/*.tar", "gs://bucket/d/"):
        assert list(ShardList(pattern, storage_options=google)) == ["gs://bucket/d/0.tar"]
    assert found(["gs://bucket/d/0.tar"], storage_options=google) == WANT
    copies = ShardList("gs://bucket/d/0.tar").cache_wds_shards(tmp_path).load_wds_shards(storage_options=google)
    assert len(list(copies)) == len(SAMPLES)


def test_google_is_read_in_parts_and_indexed(google: dict[str, Any]) -> None:
    url = "gs://bucket/i/0.tar"
    with TarWriter(url, options=WriteOptions(storage_options=google)) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert [result.samples for result in build_indexes([url], storage_options=google)] == [6]
    assert not build_indexes([url], storage_options=google)[0].is_new
    stream = open_ranges(url, storage_options=google)
    assert stream is not None
    with stream:
        stream.seek(read_index(f"{url}.wdsidx", storage_options=google)[4].offset)
        assert stream.read(5) == b"4.bin"
    parts = open_parts(url, storage_options=google)
    assert parts is not None
    assert parts.part(512, 515).read() == b"\0\0\0"
    parts.close()


@pytest.mark.parametrize("fault", [Fault(at=1000, how="close"), Fault(status=503), Fault(status=429)])
def test_google_is_read_despite_faults(google: dict[str, Any], fault: Fault) -> None:
    with TarWriter("gs://bucket/f/0.tar", options=WriteOptions(storage_options=google)) as writer:
        writer.write(SAMPLES[0])
    with fault_proxy(("127.0.0.1", int(google["endpoint_url"].rpartition(":")[2]))) as proxy:
        proxy.faults[:] = [fault]
        options = {**google, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        assert found(["gs://bucket/f/0.tar"], storage_options=options) == WANT[:1]
        assert len(proxy.asked) == 2


def test_google_replaces_no_file_unnoticed(google: dict[str, Any]) -> None:
    fsspec.filesystem("gs", **google).pipe_file("bucket/r.tar", b"a" * 2000)
    with fault_proxy(("127.0.0.1", int(google["endpoint_url"].rpartition(":")[2]))) as proxy:
        options = {**google, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        # The emulator sends no ETag; those of Google's store have no quotes.
        proxy.faults[:] = [*[Fault(headers={"ETag": "CJ1EAE="})] * 2, Fault(headers={"ETag": "CJ2EAE="})]
        parts = open_parts("gs://bucket/r.tar", storage_options=options)
        assert parts is not None
        assert parts.part(500, 600).read() == b"a" * 100
        with pytest.raises(ChangedShardError, match=r"gs://bucket/r\.tar was replaced while it was read"):
            parts.part(600, 700)


# Azure's store, whose signatures nginx does not check ---------------------------------------------------------------

KEY = base64.b64encode(b"hunter2hunter2").decode()


class Token:
    """Azure's credential with a token."""

    async def get_token(self, *scopes: str, **_: object) -> Any:
        assert scopes == ("https://storage.azure.com/.default",)
        return AccessToken("token0123456789", 1 << 40)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "signature", [f"AccountName=account;AccountKey={KEY}", "SharedAccessSignature=sv=2021&sig=abc"]
)
def test_azure_is_read_despite_faults(nginx: Nginx, signature: str) -> None:
    (nginx.files / "account" / "c").mkdir(parents=True, exist_ok=True)
    build_shard(nginx.files / "account" / "c" / "0.tar", SAMPLES)
    with fault_proxy(("127.0.0.1", nginx.http)) as proxy:
        options = {"connection_string": f"{signature};BlobEndpoint=http://127.0.0.1:{proxy.port}/account"}
        proxy.faults[:] = [Fault(status=503), Fault(at=9 << 20, how="close")]
        assert found(["az://c/0.tar"], storage_options=options) == WANT
        paths, parts = zip(*proxy.asked, strict=True)
        assert [path.partition("?")[0] for path in paths] == ["/account/c/0.tar"] * 3
        assert parts == (None, None, f"bytes={9 << 20}-")
        assert "sig=" in paths[0]


@pytest.mark.parametrize(
    ("options", "query", "token"),
    [
        ({"account_key": KEY}, "?se=", None),
        ({"sas_token": "?sv=2021-08-06&sig=abc"}, "?sv=2021-08-06&sig=abc", None),
        ({"credential": Token()}, "", "Bearer token0123456789"),
        ({"anon": True}, "", None),
    ],
)
def test_azure_is_asked_with_its_credentials(options: dict[str, Any], query: str, token: str | None) -> None:
    url, more = sign_azure(fsspec.filesystem("az", account_name="account", **options), "c/a b.tar", 3600)
    assert url.startswith(f"https://account.blob.core.windows.net/c/a%20b.tar{query}")
    assert more["headers"].get("Authorization") == token


# Hugging Face's hub -------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()
    blob = "1"
    revisions: ClassVar = set[str]()

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0", "size": 0, "path": name}
        return {"type": "file", "oid": self.blob, "size": path.stat().st_size, "path": name}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_json = body.startswith(b"{")
        names = json.loads(body)["paths"] if is_json else urllib.parse.parse_qs(body.decode())["paths"]
        paths = [self.folder / name for name in ([names] if isinstance(names, str) else names)]
        self.answer(json.dumps([self.entry(path) for path in paths if path.exists()]).encode())

    def do_GET(self) -> None:
        path = urllib.parse.urlparse(self.path).path
        if self.headers["Authorization"] != f"Bearer {SECRET}":
            self.answer(b'{"error": "refused"}', 401)
        elif tree := re.match("/api/datasets/me/data/tree/([^/]+)/?(.*)", path):
            self.revisions.add(tree[1])
            folder = self.folder / tree[2]
            entries = [self.entry(each) for each in sorted(folder.iterdir())] if folder.is_dir() else []
            self.answer(json.dumps(entries).encode(), 200 if entries else 404, X_Error_Code="EntryNotFound")
        elif place := re.match("/datasets/me/data/resolve/([^/]+)/(.*)", path):
            self.revisions.add(place[1])
            data = (self.folder / place[2]).read_bytes()
            first, last = re.findall(r"\d+", self.headers["Range"])
            body = data[int(first) : int(last) + 1]
            self.answer(body, 206, Content_Range=f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}")
        else:
            self.answer(json.dumps({"id": "me/data", "sha": "0" * 40}).encode())

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    Hub.folder = tmp_path_factory.mktemp("hub")
    (Hub.folder / "d").mkdir()
    build_shard(Hub.folder / "d/0.tar", SAMPLES)
    with web_server(Hub) as url:
        yield {"token": SECRET, "endpoint": url}


def test_the_hub_is_listed_and_read(hub: dict[str, Any]) -> None:
    for pattern in ("hf://datasets/me/data/d/*.tar", "hf://datasets/me/data/d/"):
        assert list(ShardList(pattern, storage_options=hub)) == ["hf://datasets/me/data/d/0.tar"]
    assert found(["hf://datasets/me/data/d/0.tar"], storage_options=hub) == WANT
    parts = open_parts("hf://datasets/me/data/d/0.tar", storage_options=hub)
    assert parts is not None
    assert parts.part(512, 515).read() == b"\0\0\0"
    parts.close()


def test_the_revision_is_listed_and_read(hub: dict[str, Any]) -> None:
    for url in ("hf://datasets/me/data/d/*.tar", "hf://datasets/me/data/d/", "hf://datasets/me/data/d/0.tar"):
        Hub.revisions.clear()
        options = {**hub, "revision": "1" * 40}
        urls = list(ShardList(url, storage_options=options))
        assert found(urls, storage_options=options) == WANT
        assert {*Hub.revisions} == {"1" * 40}


def test_the_example_trains_on_a_dataset_of_the_hub(hub: dict[str, Any], tmp_path: Path) -> None:
    (Hub.folder / "drawings").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from hub_dataset import write_shards

        write_shards(Hub.folder / "drawings")
    command = [sys.executable, str(EXAMPLES / "hub_dataset.py"), "hf://datasets/me/data/drawings/*.tar"]
    options = ["--revision", "main", "--epochs", "2", "--folder", str(tmp_path / "run")]
    environ = {**os.environ, "HF_ENDPOINT": hub["endpoint"], "HF_TOKEN": hub["token"]}
    done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"Epoch \d: loss ", done.stdout)) == 2
    assert len([*(tmp_path / "run/copies").glob("*.tar")]) == len([*(Hub.folder / "drawings").iterdir()])


def test_the_hub_replaces_no_file_unnoticed(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_url("hf://datasets/me/data/d/0.tar", storage_options=hub) as stream:
        assert len(stream.read(100)) == 100
        monkeypatch.setattr(Hub, "blob", "2")
        with pytest.raises(ChangedShardError, match=r"0\.tar was replaced while it was read: after 8388608 bytes"):
            list(iter(lambda: stream.read(1 << 20), b""))


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [("none.tar", SECRET, "there is no such file"), ("0.tar", "hf_wrong123456789", ".*401")],
)
def test_the_hub_refuses(hub: dict[str, Any], name: str, token: str, message: str) -> None:
    options = {**hub, "token": token, "skip_instance_cache": True}
    with pytest.raises(ShardOpenError, match=rf"hf://datasets/me/data/d/{name} cannot be opened: {message}") as caught:
        found([f"hf://datasets/me/data/d/{name}"], storage_options=options, on_error="raise")
    assert token not in str(caught.value)
