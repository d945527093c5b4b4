"""What would be lost with a library in place of our own file locks, fingerprints, retries and redaction?

    python benchmarks/bench_own_code.py

- **locks**: processes that take a lock in turn, as all workers of a host do when they open a copy of a shard, with
  `lock_file` and with `filelock`: the time for a lock without others, and the longest wait.
- **fingerprints**: how many of some objects have the same digest in two processes with different seeds of hashes, if a
  comment was added above: a state is loaded where they are.
- **retries**: of a server that cuts each connection after a number of bytes, how many bytes of a file arrive.
- **redaction**: of credentials in texts, how many are hidden.
- **answers**: the CPU time of a range of 100 kB from a near server, over a connection that is kept.

The page about its own code quotes the results: docs/explanation/why-no-library-here.md.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import joblib
import urllib3
import yarl
from filelock import FileLock
from harness.contest import in_turn
from harness.questions import Question, answer, options
from harness.store import store

from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.remote_file import RemoteFile
from wds_datapipes.io.remote.resuming_stream import fill
from wds_datapipes.redaction import redact, redact_command

#: What is done under the lock and without it, in seconds, how often each process takes it, and how many do.
WORK_S, LOCKED, PROCESSES = 0.0002, 200, 8


def own_lock(path: str) -> AbstractContextManager[Any]:
    return lock_file(Path(path), keep_file=True)


LOCKS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {"ours": own_lock, "filelock": FileLock}


def take_turns(name: str, path: str, count: int, start: Any, waits: Any) -> None:
    start.wait()
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        with LOCKS[name](path):
            found.append(time.perf_counter() - begin)
            time.sleep(WORK_S)
        time.sleep(WORK_S)
    waits.put(found)


def time_locks(name: str, processes: int, count: int) -> tuple[list[float], float]:
    """Return the time that each lock takes some processes, and the time of all, in seconds."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        start, waits = context.Barrier(processes + 1), context.Queue()
        arguments = name, f"{folder}/lock", count, start, waits
        started = [context.Process(target=take_turns, args=arguments) for _ in range(processes)]
        for process in started:
            process.start()
        start.wait()
        begin = time.perf_counter()
        each = [wait for _ in started for wait in waits.get()]
        total = time.perf_counter() - begin
        for process in started:
            process.join()
    return each, total


def measure_locks(rounds: int, count: int) -> dict[str, Any]:
    measures = {(name, n): partial(time_locks, name, n, count) for name in LOCKS for n in (1, PROCESSES)}
    found, _ = in_turn("locks", measures, rounds)
    return {
        name: {
            "alone_us": round(1e6 * median(median(each) for each, _ in found[name, 1])),
            "longest_ms": round(1e3 * median(max(each) for each, _ in found[name, PROCESSES])),
            "all_ms": round(1e3 * median(total for _, total in found[name, PROCESSES])),
        }
        for name in LOCKS
    }


#: Makes objects that pipelines hold, below a comment, and prints their digests.
OBJECTS = """
import functools, hashlib, json, sys
import cloudpickle, joblib
from wds_datapipes.fingerprint import fingerprint

def scaled(number, by=2, offset={{"a", "b", "c"}}):
    return number * by + len(offset)

class Rule:
    def __init__(self, words):
        self.words = words
    def keep(self, text):
        return text in self.words or text in {{"x", "y", "z"}}

{comment}
objects = [
    scaled,
    functools.partial(scaled, by=3),
    lambda text: text in {{"one", "two", "three"}},
    Rule(["one", "two"]).keep,
    Rule(frozenset({{"one", "two", "three"}})),
    Rule({{"one", "two", "three"}}).keep,
    lambda rule: [rule.keep(text) for text in ("one", "two")],
    frozenset({{"one", "two", "three"}}),
]
kinds = {{
    "ours": fingerprint,
    "cloudpickle": lambda each: hashlib.sha256(cloudpickle.dumps(each)).hexdigest(),
    "joblib": joblib.hash,
}}
def digest(kind, each):
    try:
        return kind(each)
    except Exception as error:
        return None
print(json.dumps({{name: [digest(kind, each) for each in objects] for name, kind in kinds.items()}}))
"""


def measure_fingerprints() -> dict[str, Any]:
    printed = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "objects.py")
        for seed, comment in (("1", ""), ("2", "# A comment.")):
            script.write_text(OBJECTS.format(comment=comment))
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            printed.append(json.loads(subprocess.check_output([sys.executable, script], env=environment)))
    first, second = printed
    equal = {
        name: sum(one is not None and one == other for one, other in zip(digests, second[name], strict=True))
        for name, digests in first.items()
    }
    return {"objects": len(first["ours"]), "equal": equal, "versions": [cloudpickle.__version__, joblib.__version__]}


FILE = bytes(range(256)) * (4 << 10)
#: The server cuts each connection after this many bytes.
CUT_AT = 100_000


class CuttingServer(BaseHTTPRequestHandler):
    """Sends ranges of a file with a strong ETag, and cuts each connection."""

    def do_GET(self) -> None:
        """Send a range, or the file."""
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1 if last else len(FILE)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", '"one"')
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(FILE)}")
        self.end_headers()
        self.wfile.write(FILE[start : min(end, start + CUT_AT)])
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def read_by_urllib3(url: str) -> bytes:
    retries = urllib3.Retry(20, backoff_factor=0.01)
    received = b""
    try:
        response = urllib3.PoolManager(retries=retries).request("GET", url, preload_content=False)
        while data := response.read(1 << 16):
            received += data
    except urllib3.exceptions.HTTPError:
        pass
    return received


def read_by_ours(url: str) -> bytes:
    with open_url(url, retries=20, pause=lambda _: time.sleep(0.01)) as stream:
        return b"".join(iter(partial(stream.read, 1 << 16), b""))


def measure_retries() -> dict[str, Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), CuttingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.tar"
        received = {"ours": read_by_ours(url), "urllib3": read_by_urllib3(url)}
        server.shutdown()
    assert received["ours"] == FILE
    return {"bytes": len(FILE), "received": {name: len(data) for name, data in received.items()}}


logging.getLogger("wds_datapipes").setLevel(logging.ERROR)
SECRET = "Zq8kL2vWm4Xr"
#: Texts with a credential, and whether each is a command.
TEXTS = {
    f"https://ada:{SECRET}@host/a.tar": False,
    f"https://host/a.tar?X-Amz-Signature={SECRET}": False,
    f"https://host/a.tar?sig={SECRET}&se=2027": False,
    f"https://host/a.tar#{SECRET}": False,
    f"s3://ada:{SECRET}@bucket/a.tar": False,
    f"pipe:curl -H 'Authorization: Bearer {SECRET}' https://host/a.tar": True,
    f"pipe:TOKEN={SECRET} aws s3 cp s3://bucket/a.tar -": True,
    f"pipe:curl -u ada:{SECRET} https://host/a.tar | zcat": True,
}


def hide_by_ours(text: str) -> str:
    return redact_command(text) if TEXTS[text] else redact(text)


def hide_by_yarl(text: str) -> str:
    return str(yarl.URL(text).with_password(None).with_user(None)) if not TEXTS[text] else text


def measure_redaction() -> dict[str, Any]:
    hides = {"ours": hide_by_ours, "yarl": hide_by_yarl}
    hidden = {name: sum(SECRET not in hide(text) for text in TEXTS) for name, hide in hides.items()}
    return {"credentials": len(TEXTS), "hidden": hidden}


RANGE_BYTES = 100_000


def ranges_by_urllib3(url: str) -> Callable[[int], int]:
    pool, view = urllib3.PoolManager(), memoryview(bytearray(RANGE_BYTES))

    def read(start: int) -> int:
        headers = {"Range": f"bytes={start}-{start + RANGE_BYTES - 1}", "Accept-Encoding": "identity"}
        response = pool.request("GET", url, headers=headers, preload_content=False)
        count = response.readinto(view)
        response.release_conn()
        return count

    return read


def ranges_by_ours(url: str) -> Callable[[int], int]:
    file, view = RemoteFile.open(url), memoryview(bytearray(RANGE_BYTES))
    assert file is not None

    def read(start: int) -> int:
        with file.part(start, start + RANGE_BYTES) as stream:
            return fill(stream, view)

    return read


def cpu_of_ranges(kind: Callable[[str], Callable[[int], int]], url: str, count: int) -> float:
    """Return the CPU time of a range in seconds."""
    read = kind(url)
    read(0)
    begin = time.process_time()
    for number in range(count):
        assert read(number * 7919 % (len(FILE) - RANGE_BYTES)) == RANGE_BYTES
    return (time.process_time() - begin) / count


def measure_answers(rounds: int, count: int) -> dict[str, Any]:
    kinds = {"ours": ranges_by_ours, "urllib3": ranges_by_urllib3}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.tar").write_bytes(FILE)
        with store(Path(folder), 0.0, 1e12) as address:
            measures = {name: partial(cpu_of_ranges, kind, f"{address}/a.tar", count) for name, kind in kinds.items()}
            found, _ = in_turn("answers", measures, rounds)
    return {name: round(1e6 * median(each)) for name, each in found.items()}


def own_code(arguments: Namespace) -> dict[str, Any]:
    """Compare with each library."""
    return {
        "locks": measure_locks(arguments.rounds, 10 if arguments.quick else LOCKED),
        "fingerprints": measure_fingerprints(),
        "retries": measure_retries(),
        "redaction": measure_redaction(),
        "answers": measure_answers(arguments.rounds, 50 if arguments.quick else 2000),
    }


if __name__ == "__main__":
    answer(options(__doc__), Question("own_code", own_code, 5))
