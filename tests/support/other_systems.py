"""Hides what Linux has and other systems lack, and then reads, writes and indexes shards with this package.

Run it with a folder, and the address of a web server that serves this folder. The variable `OTHER_SYSTEM` names the
system; if it is empty, nothing is hidden: `nox -s smoke` does so on other systems. Each worker process of a loader
imports this file, too, and so hides the same names.
"""

from __future__ import annotations

import errno
import json
import multiprocessing.connection
import multiprocessing.reduction
import multiprocessing.resource_tracker
import os
import re
import select
import signal
import socket
import sys
import tarfile
import types
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.utils.data
import torch.utils.data.datapipes

__all__: list[str] = []

#: The names that no other system has, and further ones that Windows lacks.
LINUX: dict[Any, str] = {
    os: "sched_getaffinity sched_setaffinity pidfd_open memfd_create posix_fadvise eventfd",
    socket: "TCP_QUICKACK MSG_CMSG_CLOEXEC SOCK_SEQPACKET",
    select: "epoll",
    signal: "SIGPWR SIGSTKFLT SIGPOLL pidfd_send_signal",
}
POSIX: dict[Any, str] = {
    os: "fork forkpty register_at_fork pread pwrite preadv pwritev readv writev getuid geteuid getgid getppid_ killpg "
    "setsid fchmod fchown chown mkfifo statvfs uname nice O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_ASYNC",
    socket: "AF_UNIX MSG_DONTWAIT CMSG_LEN CMSG_SPACE SCM_RIGHTS send_fds recv_fds",
    select: "poll POLLIN POLLOUT POLLERR POLLHUP POLLPRI",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGPIPE SIGBUS SIGQUIT SIGCONT SIGSTOP pthread_sigmask "
    "alarm setitimer sigwait SIG_BLOCK",
}
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty")


def hide(system: str) -> None:
    """Remove the names that a system lacks; let Windows' rule apply that no open file can be renamed or removed."""
    for module in (multiprocessing.connection, multiprocessing.reduction):  # their own names stay
        module.socket = types.SimpleNamespace(**vars(socket))  # type: ignore[attr-defined]
    multiprocessing.resource_tracker._HAVE_SIGMASK = False  # type: ignore[attr-defined]
    hidden = [*LINUX.items(), *(() if system == "darwin" else POSIX.items())]
    for module, names in hidden:
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    fcntl: Any = sys.modules.get("fcntl")
    if system == "darwin":
        sys.platform = system  # Python's own modules need the real one to work without the names of POSIX
        for name in [name for name in vars(fcntl) if name in ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_SETSIG")]:
            delattr(fcntl, name)
    else:
        vars(torch.utils.data._utils.signal_handling)["IS_WINDOWS"] = True
        for name in MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
        for name in ("rename", "replace", "remove", "unlink"):
            setattr(os, name, refuse_open_files(getattr(os, name)))


def refuse_open_files(change: Callable[..., None]) -> Callable[..., None]:
    def changed(path: Any, *arguments: Any, **options: Any) -> None:
        numbers = os.listdir("/proc/self/fd")
        opened = [
            os.readlink(f"/proc/self/fd/{number}") for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")
        ]
        if os.path.realpath(os.fspath(path)) in opened:
            raise PermissionError(errno.EACCES, "The file is used by another process", os.fspath(path))
        change(path, *arguments, **options)

    return changed


if os.environ.get("OTHER_SYSTEM"):
    hide(os.environ["OTHER_SYSTEM"])

from torch.utils.data import DataLoader  # noqa: E402

from wds_datapipes import (  # noqa: E402
    DirectoryShards,
    IndexedSamples,
    JobOptions,
    ShardList,
    ShardReadingService,
    ShardWriter,
    StatefulShards,
    convert_shards,
    create_shards,
    verify_shards,
)
from wds_datapipes.index import build_indexes  # noqa: E402
from wds_datapipes.index.format.options import AccessOptions  # noqa: E402
from wds_datapipes.tools.prepare.sources.image_folder import find_images  # noqa: E402

FOUND: dict[str, Any] = {}


def samples_of(urls: list[str]) -> Any:
    return ShardList(urls).sharding_filter().load_wds_shards().group_samples()


def loaded(urls: list[str], count: int | None = None) -> list[str]:
    """The keys that two spawned workers of PyTorch's loader read, in tensors, and others from then on."""
    head, state = read_batches(urls, None, count)
    rest = [] if count is None else read_batches(urls, json.loads(json.dumps(state)), None)[0]
    return sorted(head + rest)


def read_batches(urls: list[str], state: Any, count: int | None) -> tuple[list[str], Any]:
    """The keys of some batches of two spawned workers, and the state after them."""
    pipe = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(8)
    data = StatefulShards(pipe.wds_decode().to_tuple("__key__", "npy").batch(5).collate(), seed=0)
    if state is not None:
        data.load_state_dict(state)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    batches = islice(data.tracked(loader), count)
    return [key for keys, arrays in batches for key in keys if isinstance(arrays, torch.Tensor)], data.state_dict()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def keys(pipe: Any) -> list[str]:
    return [sample["__key__"] for sample in pipe]


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "npy": sample["npy"] * 2}


def numbered() -> Any:
    return ({"__key__": f"{number:03d}", "npy": np.full(3, number), "txt": str(number)} for number in range(60))


def main(folder: str, site: str) -> None:
    os.chdir(folder)
    with ShardWriter("a-%03d.tar", maxcount=20, resume=True) as writer:
        for sample in numbered():
            writer.write(sample)
    with ShardWriter("a-%03d.tar", maxcount=20, resume=True) as writer:
        FOUND["resumed"] = len(writer.shards)
        for sample in numbered():
            writer.write(sample)
    names = [f"a-{number:03d}.tar" for number in range(3)]
    FOUND["members"] = 0
    for name in names:
        with tarfile.open(name) as archive:
            FOUND["members"] += len(archive.getnames())
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        Path("pets", name).parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (8, 8)).save(Path("pets", name))
    create_shards(find_images("pets"), "b-%03d.tar", maxcount=2, job=JobOptions(progress=False))
    convert_shards(double, names, "c/", decode=[], job=JobOptions(progress=False))
    FOUND["verified"] = [
        result.samples for result in verify_shards([*names, "b-000.tar", "c/a-000.tar"], progress=False)
    ]
    FOUND["indexed"] = sum(result.samples for result in build_indexes(names, progress=False))
    remote = [f"{site}/{name}" for name in names]
    build_indexes(remote, index_dir="remote", progress=False)
    for where, urls, options in (
        ("here", names, AccessOptions()),
        ("there", remote, AccessOptions(index_dir=f"{site}/remote", indexes="require")),
    ):
        FOUND[f"streamed {where}"] = len(keys(samples_of(urls)))
        FOUND[f"loaded {where}"] = loaded(urls, 4 if where == "here" else None)
        FOUND[f"by index {where}"] = sorted(keys(IndexedSamples(urls, order="global", access=options)))
    service = ShardReadingService(num_workers=2)
    FOUND["workers"] = error_of(lambda: list(wds_datapipes_loader(names, service)))
    FOUND["no workers"] = error_of(lambda: list(wds_datapipes_loader(names, ShardReadingService())))
    FOUND["processes"] = error_of(lambda: verify_shards(names, num_workers=2, progress=False))
    FOUND["command"] = error_of(lambda: keys(samples_of(["pipe:cat a-000.tar"])))
    FOUND["cache"] = error_of(
        lambda: keys(ShardList(remote).cache_wds_shards("copies").load_wds_shards().group_samples())
    )
    os.mkdir("queue")
    Path("a-000.tar").replace("queue/a-000.tar")
    FOUND["queue"] = error_of(lambda: list(DirectoryShards("queue", timeout_s=0.1, poll_s=0.05)))
    FOUND["left"] = sorted(path.name for path in Path().rglob("*") if path.suffix in (".part", ".lock"))
    print(json.dumps(FOUND))


def wds_datapipes_loader(names: list[str], service: Any) -> Any:
    from torchdata.dataloader2 import DataLoader2

    return DataLoader2(samples_of(names), reading_service=service)


KEYS = [f"{number:03d}" for number in range(60)]


def check(found: Mapping[str, Any], system: str) -> None:
    """Check what `main` has found against the table of platforms in the documentation."""
    is_posix = system != "win32"
    assert (found["resumed"], found["members"], found["indexed"]) == (3, 120, 60), found
    assert found["verified"] == [20, 20, 20, 2, 20], found
    for where in ("here", "there"):
        assert found[f"streamed {where}"] == 60, found
        assert found[f"loaded {where}"] == KEYS, found
        assert found[f"by index {where}"] == KEYS, found
    assert found["no workers"] == "no error", found
    workers = r"NotImplementedError: ShardReadingService requires .*num_workers=0"
    assert re.match("no error" if system == "linux" else workers, found["workers"]), found
    for name, error in {
        "command": "ShardOpenError: .*process groups of POSIX",
        "processes": "ValueError: num_workers must be 0",
        "cache": "CacheError: .* has no locks of open files",
        "queue": "ShardOpenError: .* has no locks of open files",
    }.items():
        assert re.match("no error" if is_posix else error, found[name]), found
    assert found["left"] == (["folder.lock"] if is_posix else []), found


if __name__ == "__main__":
    main(*sys.argv[1:])
