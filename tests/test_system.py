"""Other systems than Linux: everything but worker processes of the service works without the names that Linux has."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nginx_server import Nginx

from wds_datapipes.system import POLLIN, POLLOUT, SelectPoll

KEYS = [f"{number:03d}" for number in range(60)]


def run_without_names(system: str, folder: Path, site: str) -> dict[str, Any]:
    program = Path(__file__).parent / "support" / "other_systems.py"
    done = subprocess.run(
        [sys.executable, program, str(folder), site],
        env={**os.environ, "OTHER_SYSTEM": system},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_shards_are_read_written_and_indexed_on_other_systems(nginx: Nginx, system: str) -> None:
    folder = nginx.files / f"system-{system}"
    folder.mkdir()
    found = run_without_names(system, folder, f"http://127.0.0.1:{nginx.http}/{folder.name}")
    is_posix = system != "win32"
    assert (found["resumed"], found["members"], found["indexed"]) == (3, 120, 60)
    assert found["verified"] == [20, 20, 20, 2, 20]
    for where in ("here", "there"):
        assert found[f"streamed {where}"] == 60
        assert found[f"loaded {where}"] == found[f"by index {where}"] == KEYS
    assert found["no workers"] == "no error"
    workers = r"NotImplementedError: ShardReadingService requires .*num_workers=0"
    assert re.match(workers, found["workers"])
    for name, error in {
        "command": "ShardOpenError: .*process groups of POSIX",
        "processes": "ValueError: num_workers must be 0",
        "cache": "CacheError: .* has no locks of open files",
        "queue": "ShardOpenError: .* has no locks of open files",
    }.items():
        assert re.match("no error" if is_posix else error, found[name]), found[name]
    assert found["left"] == (["folder.lock"] if is_posix else [])


def test_sockets_are_waited_for_without_poll() -> None:
    poll = SelectPoll()
    assert poll.poll(0) == []
    here, there = socket.socketpair()
    with here, there:
        poll.register(here, POLLIN)
        assert poll.poll(0) == []
        there.send(b"a")
        assert poll.poll() == [(here.fileno(), POLLIN)]
        poll.register(here, POLLIN | POLLOUT)
        assert poll.poll(10) == [(here.fileno(), POLLIN | POLLOUT)]
        poll.unregister(here)
        assert poll.poll(0) == []
