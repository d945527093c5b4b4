"""``pipe:`` commands: their output and exit status; they leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from process_stacks import runs
from readers import bytes_of

from wds_datapipes.errors import ShardOpenError, ShardReadError
from wds_datapipes.io import shell_process
from wds_datapipes.io.openers import open_url

pytestmark = pytest.mark.usefixtures("nothing_left")


def gone(processes: list[psutil.Process]) -> bool:
    """Wait until all processes have ended; an orphan may remain as a zombie until init reaps it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(map(runs, processes)):
            return True
        time.sleep(0.005)
    return False


def test_the_output_of_a_command() -> None:
    assert bytes_of("pipe:echo a; echo b | tr b c") == b"a\nc\n"
    assert bytes_of("PIPE:printf x") == b"x"
    assert bytes_of("pipe:true") == bytes_of("pipe:cat") == b""  # it gets no standard input
    assert len(bytes_of("pipe:head -c 5000000 /dev/zero")) == 5000000


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        (
            "echo hi; exit 3",
            r"'echo \*\*\*; \*\*\* \*\*\*' exited with status 3 after 3 bytes. It wrote nothing to standard",
        ),
        ("false | echo hi", r"exited with status 1 after 3 bytes"),
        ("echo oh no >&2; exit 1", r"exited with status 1 after 0 bytes. Its standard error ends with: oh no\Z"),
        ("no-such-command", r"exited with status 127 after 0 bytes.*standard error ends with: .*no-such-command"),
        ("/dev/null", r"exited with status 126 after 0"),
        ("yes | head -n 1", r"exited with status 141 \(signal 13\)"),
        ("echo hi; kill -KILL $$", r"exited with status 137 \(signal 9\) after 3 bytes"),
        ("sh -c 'kill -TERM $$' | cat", r"exited with status 143 \(signal 15\)"),
        ("exit 255", r"exited with status 255 \(signal 127\)"),
        ("echo hi; exec >&-; sleep 0.2; exit 7", r"exited with status 7 after 3 bytes"),
        ("echo hi; exec >&- 2>&-; sleep 0.2; exit 7", r"exited with status 7 after 3 bytes"),
    ],
)
def test_a_command_that_fails_is_an_error_at_its_end(shell: str, message: str) -> None:
    with pytest.raises(ShardReadError, match=message):
        bytes_of(f"pipe:{shell}")


def test_the_standard_error_of_a_command_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert bytes_of("pipe:echo note >&2; echo data") == b"data\n"
    assert capfd.readouterr().err == "note\n"


def test_a_command_with_much_standard_error_does_not_hang(capfd: pytest.CaptureFixture[str]) -> None:
    talk = "head -c 1000000 /dev/zero | tr '\\0' x >&2"
    with pytest.raises(ShardReadError, match=r"after 4 bytes. Its standard error ends with: x{1996}end\Z"):
        bytes_of(f"pipe:{talk}; printf data; exec >&-; {talk}; echo end >&2; exit 1")
    assert len(capfd.readouterr().err) == 2000004


@pytest.mark.parametrize(
    "shell",
    ["yes", "yes | cat | cat", "echo; sleep 600 & sleep 600 & wait", "trap '' TERM; yes", "echo; exec >&-; sleep 600"],
)
def test_an_abandoned_command_is_ended_with_all_its_children(shell: str) -> None:
    others = psutil.Process().children(recursive=True)  # such as multiprocessing's resource tracker
    stream = open_url(f"pipe:{shell}")
    assert stream.read(1)
    processes = [process for process in psutil.Process().children(recursive=True) if process not in others]
    assert processes
    stream.close()
    stream.close()
    assert stream.closed
    assert gone(processes)


def test_a_process_left_behind_is_ended_too() -> None:
    with open_url("pipe:sleep 600 >&2 & echo $!") as stream:
        left = psutil.Process(int(stream.read(16)))
        assert stream.read() == b""
    assert gone([left])


def test_the_copy_in_a_forked_process_leaves_the_command_alone(
    forked: Callable[[Callable[[], object]], int | None], tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    with open_url(f"pipe:echo a; cat {go_on}; echo b") as stream:
        assert stream.read(2) == b"a\n"
        assert forked(stream.close) == 0
        go_on.write_text("and ")
        assert stream.read() == b"and b\n"


def test_a_command_ends_when_its_process_is_killed_despite_a_live_fork() -> None:
    ready, tell = os.pipe()
    if not (pid := os.fork()):
        try:
            stream = open_url("pipe:echo; sleep 1000 | cat")
            assert stream.read(1)
            if fork := os.fork():
                os.write(tell, f"{fork}\n".encode())
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(tell)
    with open(ready, "rb") as said:
        fork = psutil.Process(int(said.readline()))
    processes = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    processes.remove(fork)
    assert processes
    try:
        assert gone(processes)
        assert fork.is_running()
    finally:
        fork.kill()
    assert gone([fork])


@pytest.mark.parametrize("url", ["pipe:", "pipe: \n"])
def test_no_command(url: str) -> None:
    with pytest.raises(ShardOpenError, match=r"contains no command. Write it after the colon"):
        open_url(url)


@pytest.mark.parametrize("shell", ["echo " + "x" * 200_000, "echo a\0b"])
def test_a_command_that_cannot_be_started(shell: str) -> None:
    with pytest.raises(ShardOpenError, match="cannot be started"):
        open_url(f"pipe:{shell}")


def test_a_host_without_bash_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shell_process.shell.cache_clear()
    with pytest.raises(ShardOpenError, match="this host has no bash"):
        open_url("pipe:echo")
