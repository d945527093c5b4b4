"""Commands as processes: standard streams, terminals, closed pipes and Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from prepared_programs import prepared_programs

from wds_datapipes.index import build_indexes
from wds_datapipes.parallel import progress
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.cli.program import main, run

FULL = "Error: Standard output cannot be written: No space left on device\n"
CLOSED = "Error: Standard output cannot be written: it is closed\n"
COMMAND = [sys.executable, "-m", "wds_datapipes"]


@pytest.fixture(scope="module")
def wds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command line as a program that starts without delay, with a buffer before its output."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with prepared_programs(tmp_path_factory.mktemp("programs"), environ) as folder:
        yield str(folder / "wds-datapipes")


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("WDS ls b*.tar > /dev/full", 1, "", FULL),
        ("WDS --help > /dev/full", 1, "", "Error: .*\n"),
        ("WDS --help | true; exit ${PIPESTATUS[0]}", 141, "", ""),
        ("WDS ls a.tar | head -n 1; exit ${PIPESTATUS[0]}", 141, "00000  1  txt 1\n", ""),
        ("WDS cat large.tar | head -c 512 | tr -d '\\0' | cut -c -5; exit ${PIPESTATUS[0]}", 141, "0.bin\n", ""),
        ("COLUMNS=40 WDS ls --help | grep -o -e --key-rule", 0, "--key-rule\n", ""),
        ("mkfifo fifo.tar; cat b*.tar > fifo.tar & WDS ls fifo.tar", 0, "bär  1  txt 1\n", ""),
        ("mkfifo fifo.tar; : > fifo.tar & WDS ls fifo.tar", 1, "", "Error: fifo.tar .*\n"),
        ("WDS ls - < /dev/null", 1, "", "Error: - .*\n"),
        ("WDS cat - 'pipe:cat c.tar' < b*.tar | tar tf -", 0, "bär.txt\nc.txt\n", ""),
    ],
)
def test_standard_streams(folder: Path, wds: str, command: str, code: int, out: str, err: str) -> None:
    build_shard("bär.tar", [{"__key__": "bär", "txt": b"x"}])
    build_shard("c.tar", [{"__key__": "c", "txt": b"x"}])
    build_shard("a.tar", [{"__key__": f"{n:05d}", "txt": b"x"} for n in range(8000 if "head -n" in command else 1)])
    build_shard("large.tar", [{"__key__": f"{n}", "bin": bytes(100_000)} for n in range(30)])
    done = subprocess.run(["bash", "-c", command.replace("WDS", wds)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert re.fullmatch(out, done.stdout), done
    assert re.fullmatch(err, done.stderr), done


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("WDS ls b*.tar >&-", 1, "", CLOSED),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii WDS ls b*.tar", 0, "b\\xe4r  1  txt 1\n", ""),
    ],
)
def test_a_closed_output_and_another_encoding(folder: Path, command: str, code: int, out: str, err: str) -> None:
    """These look at how Python itself starts."""
    build_shard("bär.tar", [{"__key__": "bär", "txt": b"x"}])
    line = command.replace("WDS", " ".join(COMMAND))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.mark.parametrize(
    "command",
    [
        *("--version", "cache --help", "ls a-0.tar", "ls a-0.tar --json", "show a-0.tar", "cat a-0.tar -o o.tar"),
        *(
            "verify a-0.tar a-1.tar --num-workers 2",
            "index a-0.tar",
            "stats a-0.tar",
            "stats b.tar --json",
            "cache ls --cache-dir .",
        ),
        *("split a-0.tar -o s-%d.tar --maxcount 2", "shuffle a-0.tar -o o.tar", "sort a-0.tar -o o.tar"),
        *(
            "map a-0.tar -c true -o o/ --num-workers 2",
            "create recipe recipe -o r.tar",
            "bench a-0.tar",
            "plan a-0.tar --global-batch-size 1 --ranks-per-host 1",
        ),
    ],
)
def test_an_output_that_nothing_reads_ends_each_command_quietly(shards: list[str], wds: str, command: str) -> None:
    Path("recipe").write_text("a.txt text:a\n")
    Path("b.tar").write_bytes(Path("a-0.tar").read_bytes()[:4000])  # a command ends after it has reported the fault
    build_indexes(shards[:1], num_workers=0, progress=False)
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([wds, *command.split()], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# Terminals ---------------------------------------------------------------------------------------------------------


def in_terminal(*arguments: str, columns: int = 150) -> tuple[int, str]:
    """Run the command line in a terminal, and return its exit code and what the terminal shows, without colours."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 70
        try:
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115  this process ends
            os.environ.update(TERM="xterm", COLUMNS=f"{columns}")
            progress.BAR_PERIOD_S = 0  # every step is shown
            code = run(arguments)
        finally:
            sys.stdout.flush()
            os._exit(code)
    said = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            said += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())


@pytest.mark.parametrize(("columns", "more"), [(150, r" +\d+ samples +[\d,]+ samples/s +[\d.]+ ([kM]B|B)/s"), (40, "")])
@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("create recipe recipe -o %d.tar --maxcount 1 --num-workers 0", "Writing"),
        ("verify a-0.tar a-1.tar --num-workers 0", "Verifying"),
        ("cat a-0.tar a-1.tar -o o.tar", "Copying"),
        ("shuffle a-0.tar a-1.tar -o o.tar", "Indexing"),
    ],
)
def test_the_bar_of_a_long_job_fits_into_the_terminal(
    shards: list[str], command: str, label: str, columns: int, more: str
) -> None:
    Path("recipe").write_text("a.txt text:a\nb.txt text:b\nc.txt text:c\n")
    code, shown = in_terminal(*command.split(), columns=columns)
    assert code == 0, shown
    assert re.search(rf"{label} \S+ +[1-9]/\d +shards{more} +[-\d]:", shown), shown
    assert "…" not in shown


def test_a_narrow_terminal_shows_a_table_cell_by_cell(shards: list[str]) -> None:
    assert "\r\nsamples\r\n  count     4\r\n  total     " in in_terminal("stats", shards[0], columns=40)[1]


def test_a_terminal_shows_no_archive(shards: list[str]) -> None:
    message = "An archive cannot be written to a terminal. Name a file with --output, or write to a pipe"
    assert in_terminal("cat", "a-0.tar") == (2, f"Error: {message}\r\n")


# Ctrl-C -------------------------------------------------------------------------------------------------------------


def wait_for(*lines: str) -> str:
    """Return a shell command that reports the process, and waits until it is ended."""
    return f"{'; '.join(['echo >> begun', *lines])}; sleep 600.{os.getpid()}"


@pytest.mark.parametrize(
    ("command", "processes", "left"),
    [
        (["cat", "a-1.tar", f"pipe:cat a-0.tar; {wait_for()}", "-o", "o.tar"], 1, []),
        (["verify", "--num-workers", "2", *[f"pipe:{wait_for()}"] * 3], 2, []),
        (["map", "a-0.tar", "a-1.tar", "-c", "BEGUN", "-o", "o/", "--num-workers", "2"], 2, ["o/shards.journal"]),
        (["create", "recipe", "recipe", "-o", "%d.tar", "--maxcount", "1", "--num-workers", "2"], 2, ["0.tar"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_ctrl_c_ends_all_processes_and_leaves_only_finished_shards(
    shards: list[str], command: list[str], processes: int, left: list[str]
) -> None:
    begun = Path("begun").absolute()
    Path("scratch").mkdir()
    until = "until [ -e 0.tar ]; do sleep 0.02; done"
    Path("recipe").write_text(f"a.txt text:1\nb.txt pipe:{until}; {wait_for()}\nc.txt pipe:{wait_for()}\n")
    before = sorted(path for path in Path().rglob("*") if path.is_file())
    words = [word.replace("BEGUN", f"echo >> {begun}; sleep 600.{os.getpid()}") for word in command]
    running = subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(Path("scratch").absolute())},
    )
    try:
        while not begun.exists() or begun.stat().st_size < processes:
            assert running.poll() is None, running.communicate()
            time.sleep(0.02)
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=600)
    finally:
        running.kill()
    assert (running.returncode, said) == (130, b"Interrupted\n")
    assert len(family) >= processes
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert begun.stat().st_size == processes, "more was begun"
    after = {str(path) for path in Path().rglob("*") if path.is_file() and path not in before}
    assert sorted(after - {"begun"}) == left


def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal\nos.write(2, b'importing\\n')\nwhile True:\n    signal.pause()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([*COMMAND, "--version"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


def run_until_interrupt(command: list[str], step: int | None) -> None:
    """Run a command that prints to a file; Ctrl-C comes some steps after its first output is in the file."""
    os.dup2(os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115  as in a new process
    sys.argv = ["wds-datapipes", *command]
    passed = 0

    def interrupt(*_: object) -> None:
        nonlocal passed
        passed += os.fstat(1).st_size > 0
        if passed > step:  # type: ignore[operator]  # it is not None here
            sys.setprofile(None)
            raise KeyboardInterrupt

    if step is not None:
        sys.setprofile(interrupt)
    main()


def test_a_command_interrupted_after_a_print_has_printed_it_once(
    folder: Path, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    for name in "ab":
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "txt": b"x" * n} for n in range(3)])
    command = ["ls", "a.tar", "b.tar"]
    assert forked(partial(run_until_interrupt, command, None)) == 0
    whole = Path("out.txt").read_text()
    for step in range(4):
        assert forked(partial(run_until_interrupt, command, step)) in (130, 0)
        assert whole.startswith(Path("out.txt").read_text())


# Resources ----------------------------------------------------------------------------------------------------------


def print_peak_memory(*commands: str) -> None:
    """Run commands, and print the peak memory of the process after each, in bytes."""
    out = open("peaks", "w")  # noqa: SIM115  this process ends
    for command in commands:
        assert run(command.split()) == 0
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        print(int(status["VmHWM"].split()[0]) * 1024, file=out, flush=True)


def test_memory_does_not_grow_with_the_size_of_samples(
    folder: Path, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    """A process shuffles next to nothing, and then 40 MB; its peak memory is reported after each."""
    for shard in range(4):
        build_shard(f"l-{shard}.tar", [{"__key__": f"{shard}-{n:03d}", "bin": bytes(40_000)} for n in range(250)])
    build_shard("s.tar", [{"__key__": "x", "bin": b"x"}])
    assert forked(partial(print_peak_memory, "shuffle s.tar -o s.out", "shuffle l-*.tar -o l.out")) == 0
    least, most = map(int, Path("peaks").read_text().split())
    assert Path("l.out").stat().st_size > 40_000_000
    assert most - least < 28_000_000  # of 40 MB; what the allocator keeps differs
