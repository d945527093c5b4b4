"""Fixtures shared by the tests of several folders, and the setup of the examples in docstrings."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import psutil
import pytest
import torch.utils.data
from faults import FaultProxy, fault_proxy
from nginx_server import Nginx
from parts_of_tests import files_of_part
from process_stacks import children_since, record_stacks, stacks_of
from sftp_server import SftpServer, find_rclone
from site_server import Site
from sweeps import WHOLE
from web_server import serving

# Imported before any test module imports torchdata, whose deprecation warning would be an error.
import wds_datapipes
from wds_datapipes.io.remote.http_connection import close_idle
from wds_datapipes.io.remote.retry import RetryPolicy

# The deadline of an example would fail on a busy machine. The examples are the same in each run, so that a green run
# stays green; `nox -s nightly` draws new ones.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=not WHOLE)
hypothesis.settings.load_profile("tests")

# An error that a worker of torch's DataLoader sends is in a reference cycle with its iterator. Once that is garbage, it
# waits so long for each worker, in whichever test runs then, and ends it; by default, 5 s.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0

# With each seed, torch keeps those of devices until they are first used, with the text of three stacks. For kinds of
# devices that this machine lacks, that only takes time, up to a third of that of a worker.
devices: Any
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.device_count():
        devices.manual_seed_all = lambda seed: None


#: Modules that need DALI, or a torchdata that lacks DataLoader2. The sessions `peers` of nox run their examples.
collect_ignore = [
    *([] if find_spec("nvidia") else ["wds_datapipes/integrations/dali.py"]),
    *([] if find_spec("torchdata.nodes") else ["wds_datapipes/integrations/nodes.py"]),
]
# The torchdata that Python 3.13 gets has no StatefulDataLoader, which these files import.
if find_spec("torchdata.stateful_dataloader") is None:
    needs = re.compile(r"^from (torchdata\.stateful_dataloader|drawn_loaders) ", re.MULTILINE)
    files = Path(__file__).parent.glob("tests/**/test_*.py")
    collect_ignore += [str(path) for path in files if needs.search(path.read_text("utf-8"))]


def pytest_configure() -> None:
    """Let the processes that tests start end at Ctrl-C, which background jobs of a shell ignore, and start faster."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    record_stacks()
    paths = [str(Path(__file__).parent / "tests/programs"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> Generator[None, Any, Any]:
    """Let a time-out show what the processes of the test do, and end them, as the test may wait for them."""
    found = yield
    fail, since_s = signal.getsignal(signal.SIGALRM), time.clock_gettime(time.CLOCK_BOOTTIME)

    def explain(*arguments: Any) -> None:
        __tracebackhide__ = True
        processes = children_since(since_s)
        print(stacks_of(processes), file=sys.stderr)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        fail(*arguments)  # type: ignore[operator, misc]

    signal.signal(signal.SIGALRM, explain)
    return found


#: The test files that take the most processor time, from a minute down to ten seconds. They run first, so that no
#: process runs one at the end while the others are idle.
SLOW = (
    "test_examples.py",
    "test_state_law.py",
    "test_dispatch.py",
    "test_faults.py",
    "test_system.py",
    "test_indexed_batches.py",
    "test_golden.py",
    "test_held_samples.py",
    "test_processes.py",
    "test_topology.py",
    "test_sessions.py",
    "test_planned_rows.py",
    "test_readme_block.py",
    "test_writing_to_s3.py",
    "test_faulty_web_server.py",
    "test_resharding.py",
    "test_lightning.py",
    "test_uneven_ranks.py",
    "test_ranks.py",
    "test_tar_writer.py",
    "test_listings.py",
    "test_own_pipeline.py",
    "test_epochs.py",
    "test_convert.py",
    "test_same_as_webdataset.py",
    "test_random_pipelines.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let workflows divide the tests between machines."""
    parser.addoption("--part", metavar="K/N", help="run only the tests of each Nth file from the Kth on, such as 1/4")


#: webdataset leaves files and pipes to the garbage collection.
BESIDE_WEBDATASET = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the slowest files first, and ignore what webdataset leaves open."""
    order = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.name, len(SLOW)))
    if part := config.getoption("--part"):
        files = files_of_part((item.path for item in items), part)
        items[:] = [item for item in items if item.path in files]
    for item in items:
        if runs_webdataset(item.path):
            for mark in BESIDE_WEBDATASET:
                item.add_marker(mark)


def runs_webdataset(path: Path) -> bool:
    """Whether the tests of a file run webdataset beside this package."""
    return path.parent.name == "contract" or "webdataset" in path.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while tests are collected, which takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt everything imported by the tests from garbage collection, which saves half a second per collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def doctest_environment(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Run each docstring example in an empty folder, with the public names imported; do nothing for other tests."""
    if isinstance(request.node, pytest.DoctestItem):
        doctest_namespace.update({name: getattr(wds_datapipes, name) for name in wds_datapipes.__all__})
        folder: Path = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)


@pytest.fixture(autouse=True)
def webdataset_environment(request: pytest.FixtureRequest) -> None:
    """Run each test beside webdataset in an empty folder, and collect its garbage; do nothing for other tests."""
    if runs_webdataset(request.path):
        request.getfixturevalue("folder")
        request.getfixturevalue("closed_garbage")


@pytest.fixture(autouse=True)
def unknown_stores() -> None:
    """Forget what earlier tests have learned about stores, because a server may get the port of an earlier one."""
    if (module := sys.modules.get("wds_datapipes.io.remote.known_stores")) is not None:
        module.forget_stores()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no process and no open descriptor, even before garbage is collected."""
    gc.collect()
    gc.freeze()  # the collection before each test skips existing objects, which saves half a second
    gc.disable()  # a descriptor that only a collection would close counts as a leak
    close_idle()
    before = opened()
    others = set(psutil.Process().children())  # such as multiprocessing's own, once a test has spawned a worker
    yield
    for _ in range(6000):  # a thread may take a moment to close its descriptors
        close_idle()  # connections that are kept for the next request
        if opened() <= before:
            break
        time.sleep(0.01)
    left = {os.readlink(f"/proc/self/fd/{number}") for number in opened() - before}
    children = set(psutil.Process().children()) - others
    gc.enable()
    assert left == set()
    assert children == set()


@pytest.fixture
def closed_garbage() -> Iterator[None]:
    """Collect the garbage that webdataset leaves, so that it cannot affect later tests."""
    yield
    gc.collect()


class Ended(NamedTuple):
    """The exit status of the command line and its output, as bytes if it ran as a process."""

    code: int
    out: Any
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of its output."""
        lines: list[str] = self.out.splitlines()
        return lines


@pytest.fixture
def forked() -> Callable[[Callable[[], object]], int | None]:
    """Run a function in a forked process, and return its exit code."""

    def run(function: Callable[[], object]) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=function)
        process.start()
        process.join()
        code = process.exitcode
        process.close()
        return code

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty folder, with a command line that prints plain lines of 80 columns.

    The modules that commands import from the folder are forgotten, since other tests have others of the same name.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    yield tmp_path
    written = {path.stem for path in tmp_path.glob("*.py")}  # an executor may have imported a copy
    for name, module in list(sys.modules.items()):
        if name in written or (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Return a function that runs the command line in this process; any exception but an exit is raised."""
    from wds_datapipes.tools.cli import program

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))

    def run(*arguments: str) -> Ended:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = program.run(arguments)
        out.flush()
        return Ended(code, out.buffer.getvalue().decode(errors="replace"), err.getvalue())

    return run


@pytest.fixture
def process(folder: Path) -> Callable[..., Ended]:
    """Return a function that runs the command line as a process."""

    def run(*arguments: str, stdin: bytes = b"") -> Ended:
        command = [sys.executable, "-m", "wds_datapipes", *arguments]
        done = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr.decode())

    return run


@pytest.fixture
def shards(folder: Path) -> list[str]:
    """Write a-0.tar, a-1.tar and a-2.tar with four samples each: 00 to 03, 10 to 13 and 20 to 23."""
    from wds_datapipes.testing import build_shard

    return [
        build_shard(
            f"a-{shard}.tar",
            [
                {"__key__": f"{shard}{number}", "jpg": bytes([shard]) * (100 * number + shard), "cls": str(number)}
                for number in range(4)
            ],
        )
        for shard in range(3)
    ]


@pytest.fixture
def openers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give the test its own table of registered openers."""
    registered: dict[str, Any] = {}
    monkeypatch.setattr("wds_datapipes.io.urls._registered", registered)
    return registered


class Store(NamedTuple):
    """An S3 server with one bucket, named ``bucket``."""

    #: The port of the server.
    port: int
    secret: str

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Return the storage options, with another port for a proxy in front of the server."""
        return {"key": "access", "secret": self.secret, "endpoint_url": f"http://127.0.0.1:{port or self.port}"}


@pytest.fixture(scope="session")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Run an S3 server; tests use separate folders in its bucket."""
    root = tmp_path_factory.mktemp("s3")
    (root / "bucket").mkdir()
    secret = "hunter2hunter2"
    address = ["--addr", "127.0.0.1:0", "--auth-key", f"access,{secret}", "--config", "", "-v"]
    with subprocess.Popen(
        [find_rclone(), "serve", "s3", str(root), *address], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        port = next(match[1] for line in server.stderr if (match := re.search(r"server on \[.*?:(\d+)/?\]", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield Store(int(port), secret)
        server.terminate()


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """Run nginx; tests use separate folders among its files."""
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.fixture
def proxy(nginx: Nginx) -> Iterator[FaultProxy]:
    """Run a proxy in front of nginx, which injects faults into its answers."""
    with fault_proxy(("127.0.0.1", nginx.http)) as made:
        yield made


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    """Run an SFTP server; tests use separate files."""
    server = SftpServer(tmp_path_factory.mktemp("sftp"))
    yield server
    server.stop()


def opened() -> set[str]:
    """Return the numbers of this process's open descriptors, except the one that lists them."""
    numbers = os.listdir("/proc/self/fd")
    return {number for number in numbers if Path(f"/proc/self/fd/{number}").exists()}


@pytest.fixture
def memory() -> Iterator[Any]:
    """Empty the file system of fsspec in memory, before and after."""
    import fsspec  # type: ignore[import-untyped]  # it carries no types

    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a process group."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context that limits the files of this process to a size: further writes fail as on a full disk."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def tracing() -> Iterator[Any]:
    """Return tracemalloc, and end what the test has traced, even if it fails."""
    yield tracemalloc
    tracemalloc.stop()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record pauses between attempts instead of making them."""
    found: list[float] = []
    monkeypatch.setattr(RetryPolicy, "sleep", lambda _, pause_s: found.append(pause_s))
    return found


@pytest.fixture
def site() -> Iterator[Site]:
    """Run a web server, whose connections are new."""
    close_idle()
    with serving(Site()) as server:
        yield server
        server.left.set()
        close_idle()
