"""Workers end with their main process, whatever they are doing and whatever other processes it has forked."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from process_stacks import runs

PROGRAM = Path(__file__).with_name("program_with_a_fork.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("service", "method"), [("MultiProcessingReadingService", "forkserver"), ("ShardReadingService", "fork")]
)
def test_workers_in_c_code_end_with_the_main_process_despite_a_live_fork(service: str, method: str) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), service, method], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        worker = psutil.Process(int(program.stdout.readline().split()[1]))
        program.stdin.write("x")
        program.stdin.flush()
        fork = psutil.Process(int(program.stdout.readline().split()[1]))
        try:
            assert runs(worker)
            program.kill()
            program.wait()
            deadline = time.monotonic() + 100
            while runs(worker):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert runs(fork)
        finally:
            for process in (fork, worker):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
