"""The end of processes, and the release of their resources."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from wds_datapipes.loading.workers.shutdown import close_process, is_running

pytestmark = pytest.mark.usefixtures("nothing_left")


def started() -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,), daemon=True)
    process.start()
    return process  # type: ignore[return-value]  # it differs in how it is started only


def test_an_ended_process_is_closed_and_may_be_closed_again() -> None:
    process = started()
    process.join()
    for _ in range(2):
        close_process(process)
    with pytest.raises(ValueError, match="closed"):
        _ = process.exitcode


def test_a_process_whose_exit_code_was_already_collected_is_closed() -> None:
    process = started()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    with pytest.raises(ValueError, match="still running"):
        process.close()  # so that the test notices if a future Python does this by itself
    close_process(process)
    assert process not in multiprocessing.process._children  # type: ignore[attr-defined]  # nothing else tells


def test_a_process_is_closed_if_the_program_ignores_sigchld() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = started()
        process.join(10)
        while is_running(process):
            time.sleep(0.001)
        close_process(process)
    finally:
        signal.signal(signal.SIGCHLD, before)


#: Ctrl-C comes right after each fork, while Python runs its hooks.
INTERRUPTED_START = """if 1:
    import os, signal, warnings
    warnings.simplefilter("ignore")
    from wds_datapipes import ShardReadingService
    from torchdata.dataloader2 import DataLoader2
    from torchdata.datapipes.iter import IterableWrapper

    pid = os.getpid()
    loader = DataLoader2(IterableWrapper(range(9)).sharding_filter(), reading_service=ShardReadingService(2))
    os.register_at_fork(after_in_parent=lambda: os.kill(pid, signal.SIGINT))
    try:
        list(loader)
    except KeyboardInterrupt:
        print("interrupted", open(f"/proc/{pid}/task/{pid}/children").read())
"""


def test_ctrl_c_during_the_start_of_a_worker_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_START], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("interrupted \n", "")
