"""Other systems than Linux: everything but worker processes of the service works without the names that Linux has."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nginx_server import Nginx
from other_systems import check

from wds_datapipes.system import POLLIN, POLLOUT, SelectPoll


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
    check(run_without_names(system, folder, f"http://127.0.0.1:{nginx.http}/{folder.name}"), system)


def test_the_smoke_test_passes_on_this_system() -> None:
    """Workflows run it on others."""
    subprocess.run([sys.executable, Path(__file__).parent / "checks/smoke.py"], check=True)


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
