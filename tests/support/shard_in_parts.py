"""A shard on a server behind a proxy, which is read in many small parts."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from faults import FaultProxy

from wds_datapipes import ShardList
from wds_datapipes.io import prefetch
from wds_datapipes.io.remote import known_stores
from wds_datapipes.testing import build_shard

__all__ = [
    "OTHER_SHARD",
    "PART",
    "SAMPLES",
    "SHARD",
    "SIZE",
    "address",
    "log_of_calls",
    "members_of",
    "read",
    "small_parts",
    "threads",
    "until",
]

PART = 4 << 10
SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{number}", "bin": random.Random(number).randbytes(400 * number + 100)} for number in range(16)
]


def whole_shard(samples: list[dict[str, Any]]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return Path(build_shard(f"{folder}/a.tar", samples)).read_bytes()


SHARD = whole_shard(SAMPLES)
#: Another version of the shard, of the same size.
OTHER_SHARD = whole_shard([{**sample, "bin": bytes(len(sample["bin"]))} for sample in SAMPLES])
SIZE = len(SHARD)


@contextmanager
def small_parts(size: int = PART) -> Iterator[pytest.MonkeyPatch]:
    """Read every remote shard in parts of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "MIN_PART_BYTES", size)
        patch.setattr(prefetch, "MAX_PART_BYTES", size)
        patch.setattr(known_stores, "NEAR_S", -1.0)  # otherwise the server might be near
        known_stores.forget_stores()
        yield patch


def address(proxy: FaultProxy, scheme: str = "http", name: str = "a.tar") -> tuple[str, dict[str, Any]]:
    """Return the URL of a shard in the folder ``parts``, and the options to read it."""
    site = f"http://127.0.0.1:{proxy.port}"
    if scheme == "http":
        return f"{site}/parts/{name}", {}
    storage = {"key": "access", "secret": "hunter2", "endpoint_url": site}
    return f"s3://parts/{name}", {"storage_options": storage}


def members_of(urls: list[str], **options: Any) -> Any:
    return ShardList(urls).load_wds_shards(**options)


def read(proxy: FaultProxy, scheme: str = "http", **options: Any) -> list[bytes]:
    """Return the contents of the shard's samples."""
    url, access = address(proxy, scheme)
    return [member.data for member in members_of([url], **access, **options)]


def log_of_calls(patch: pytest.MonkeyPatch, cls: type, *names: str) -> list[str]:
    """Return a list to which the name of each of these methods is added when it is called."""
    log = list[str]()
    for name in names:

        def recorded(each: Any, *arguments: Any, name: str = name, method: Any = None) -> None:
            log.append(name)
            method(each, *arguments)

        patch.setattr(cls, name, partialmethod(recorded, method=getattr(cls, name)))
    return log


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wds-read-ahead"]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)
