"""Shards taken from a directory while other processes add and take shards."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils.data.graph_settings import apply_sharding
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import DirectoryShards, ShardReadingService
from wds_datapipes.errors import ShardOpenError, TruncatedShardError
from wds_datapipes.io import file_lock
from wds_datapipes.shards import directory_queue
from wds_datapipes.shards.directory_queue import NAME_START
from wds_datapipes.testing import build_shard

#: Not for torch's DataLoader or torchdata's service, which close some pipes only later.
leaves_nothing = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def inbox(folder: Path) -> Path:
    (folder / "inbox").mkdir()
    return folder / "inbox"


def put(*names: str) -> None:
    """Add files as programs must write them; each is newer than the previous one."""
    for name in names:
        number = len(list(Path("inbox").rglob("*.*")))
        Path("inbox/.new").write_text(name)
        os.utime("inbox/.new", (1000 + number, 1000 + number))
        os.rename("inbox/.new", f"inbox/{name}")


def there(folder: str = "inbox") -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())


def take(**options: Any) -> Iterator[str]:
    """An iteration that ends when no shard remains."""
    return iter(DirectoryShards("inbox", **{"timeout_s": 0, **options}))


def names(paths: Any) -> list[str]:
    return [name_of(path) for path in paths]


def name_of(claim: str) -> str:
    return os.path.basename(claim)[NAME_START:]


def no_claims() -> bool:
    return os.listdir("inbox/.claims") == []


@leaves_nothing
def test_only_shards_of_all_kinds_are_taken() -> None:
    kinds = ["a.tar", "b.tgz", "c.tar.gz", "d.tar.zst", "e.tar.xz", "f.tar.bz2", "g.tzst"]
    put(*kinds, "readme.txt", ".hidden.tar", "h.tar.part")
    os.mkdir("inbox/folder.tar")
    os.symlink("a.tar", "inbox/link.tar")
    assert names(take()) == kinds
    assert there("inbox/done") == kinds
    assert there() == [".hidden.tar", "h.tar.part", "readme.txt"]
    assert os.path.islink("inbox/link.tar")
    assert no_claims()


@leaves_nothing
def test_a_pattern_chooses_and_the_oldest_comes_first() -> None:
    put("b-1.tar", "a-1.tar", "c-1.tar", "a-x.tar", "A-1.tar")
    assert names(take(pattern="{a,b}-[0-9].tar")) == ["b-1.tar", "a-1.tar"]


class OldSystem:
    """The C library with an old kernel or on NFS."""

    def __init__(self, code: int, *_: object, **__: object) -> None:
        self.code = code

    def renameat2(self, *_: object) -> int:
        ctypes.set_errno(self.code)
        return -1


@leaves_nothing
@pytest.mark.parametrize("code", [None, errno.EINVAL])
@pytest.mark.parametrize("after", ["keep", "return"])
def test_no_file_is_overwritten(after: str, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if code is not None:
        monkeypatch.setattr(ctypes, "CDLL", partial(OldSystem, code))
    contents = []
    taken = iter(DirectoryShards("inbox", after=after, timeout_s=0))  # type: ignore[arg-type]  # a str here
    for text in ("one", "two", "three"):
        Path("inbox/a.tar").write_text(text)
        contents.append(Path(next(taken)).read_text())
        if after == "return":
            Path("inbox/a.tar").write_text("new")
            assert sorted(there()) == ["a.tar"]
            break
    del taken
    if after == "return":
        assert {name: Path(f"inbox/{name}").read_text() for name in there()} == {"a.tar": "new", "2-a.tar": "one"}
    else:
        assert contents == ["one", "two", "three"]
        assert {name: Path(f"inbox/done/{name}").read_text() for name in there("inbox/done")} == {
            "a.tar": "one",
            "2-a.tar": "two",
        }
        assert Path("inbox/a.tar").read_text() == "three"


@leaves_nothing
@pytest.mark.parametrize("after", ["keep", "delete", "return"])
def test_an_interrupted_iteration_returns_its_shard(after: str) -> None:
    put("a.tar", "b.tar")
    taken = take(after=after)
    first, second = next(taken), next(taken)
    assert not os.path.exists(first)
    del taken
    assert "b.tar" in there()
    assert not os.path.exists(second)
    assert no_claims()


@leaves_nothing
def test_an_error_downstream_returns_the_shard() -> None:
    put("a.tar")  # which is not an archive
    pipe = DirectoryShards("inbox", timeout_s=0).load_wds_shards()
    with pytest.raises(TruncatedShardError, match=r"\.claims/.*-a\.tar") as caught:
        list(pipe)
    traceback.clear_frames(caught.tb)
    assert there() == ["a.tar"]


def samples(path: str) -> list[str]:
    build_shard("new.tar", [{"__key__": f"{path}-{index}", "txt": "text"} for index in range(3)])
    os.rename("new.tar", f"inbox/{path}.tar")
    return [f"{path}-{index}" for index in range(3)]


@leaves_nothing
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_the_shards_of_each_epoch(workers: int) -> None:
    loader = DataLoader2(
        DirectoryShards("inbox", timeout_s=0, after="delete").load_wds_shards().group_samples().to_tuple("__key__"),
        reading_service=ShardReadingService(workers),
    )
    for epoch in range(2):
        expected = [key for number in range(20) for key in samples(f"{epoch}-{number:02d}")]
        assert sorted(key for (key,) in loader) == expected
        assert there() == []
    loader.shutdown()
    assert no_claims()


@leaves_nothing
def test_an_interrupted_epoch_of_workers_returns_shards() -> None:
    expected = [key for number in range(10) for key in samples(f"{number:02d}")]
    pipe = DirectoryShards("inbox", timeout_s=0).load_wds_shards().group_samples().to_tuple("__key__")
    loader = DataLoader2(pipe, reading_service=ShardReadingService(2, worker_prefetch_cnt=1, main_prefetch_cnt=1))
    iterator = iter(loader)
    found = {next(iterator)[0] for _ in range(4)}
    del iterator
    found.update(key for (key,) in loader)
    loader.shutdown()
    kept = set(there("inbox/done"))
    assert kept == {f"{number:02d}.tar" for number in range(10)}
    assert found <= set(expected)


def log(name: str) -> None:
    with open("log", "a") as file:
        file.write(f"{name}\n")


def read_all(after: str) -> None:
    shards = take(after=after)
    for path in islice(shards, 2) if after == "return" else shards:
        log(name_of(path))


def recover(after: str) -> None:
    """Put back the shards of a killed process."""
    directory_queue._return_orphaned(Path("inbox/.claims"))


def orphan(*names: str) -> None:
    """Leave shards behind as a process does that was killed after claiming them."""
    os.makedirs("inbox/.claims", exist_ok=True)
    for name in names:
        os.rename(f"inbox/{name}", f"inbox/.claims/{'0' * (NAME_START - 1)}-{name}")


def killed_at(step: int, function: Callable[[str], object], after: str) -> None:
    """Call a function, and get killed before one of its system calls."""
    passed = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal passed
        # A call through ctypes raises no audit event, but this one follows if it fails.
        if event == "c_call" and (argument is ctypes.get_errno or argument.__module__ in ("posix", "fcntl")):
            passed += 1
            if passed > step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    function(after)


@leaves_nothing
@pytest.mark.parametrize(
    ("function", "after", "code"),
    [(read_all, "keep", errno.EINVAL), (read_all, "return", None), (recover, "keep", None)],
)
def test_a_process_may_be_killed_at_any_system_call(
    function: Callable[[str], object],
    after: str,
    code: int | None,
    forked: Callable[[Callable[[], object]], int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code is not None:
        monkeypatch.setattr(ctypes, "CDLL", partial(OldSystem, code))
    shards = ["a.tar", "b.tar"]
    for step in range(1000):
        shutil.rmtree("inbox")
        os.mkdir("inbox")
        put(*shards)
        if function is recover:
            orphan("a.tar", "b.tar")
        Path("log").write_text("")
        ended = forked(partial(killed_at, step, function, after))
        before = Path("log").read_text().splitlines()
        done = there("inbox/done") if os.path.exists("inbox/done") else []
        recover(after)
        assert os.listdir("inbox/.claims") == []
        left = there()
        assert set(left) | set(before) == set(shards)
        # A shard is read when the next one is requested; the last may be read again.
        assert set(left) & set(before) <= (set(shards) if after == "return" else set(before[-1:]))
        assert set(left) & set(done) == set()
        if after == "keep":
            assert names(take()) == left
            assert there("inbox/done") == sorted([*left, *done])
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert step > 10


@leaves_nothing
def test_a_forked_process_does_not_return_the_shards_of_its_parent(
    forked: Callable[[Callable[[], object]], int | None],
) -> None:
    put("a.tar", "b.tar")
    taken = take()
    path = next(taken)
    assert forked(taken.close) == 0  # type: ignore[attr-defined]  # a generator
    assert os.path.exists(path)
    assert names(take()) == ["b.tar"]
    assert list(taken) == []
    assert there("inbox/done") == ["a.tar", "b.tar"]


@leaves_nothing
def test_files_removed_meanwhile_are_skipped() -> None:
    put("a.tar", "b.tar", "c.tar")
    taken = take()
    os.remove(next(taken))
    os.remove("inbox/b.tar")
    assert names(taken) == ["c.tar"]
    assert there("inbox/done") == ["c.tar"]


class Clock:
    """A clock that advances only during sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rests: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds
        if len(self.rests) == 3:
            put("late.tar")


@leaves_nothing
def test_it_sleeps_between_two_polls_and_ends_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(directory_queue, "time", clock)
    assert names(take(poll_s=1.0, timeout_s=4.5)) == ["late.tar"]
    assert clock.rests == [1.0] * 3 + [1.0, 1.0, 1.0, 1.0, 0.5]


@leaves_nothing
def test_a_sharding_filter_is_refused_because_it_would_lose_shards() -> None:
    with pytest.raises(RuntimeError, match="Sharding twice"):
        apply_sharding(DirectoryShards("inbox").sharding_filter(), 2, 0)


@leaves_nothing
def test_a_directory_without_room_for_claims_is_an_error() -> None:
    Path("inbox/.claims").touch()
    with pytest.raises(ShardOpenError, match="claimed in the directory 'inbox': File exists"):
        list(take())


def test_a_file_in_place_of_the_directory_of_shards_that_were_read_is_an_error() -> None:
    put("a.tar")
    Path("inbox/done").touch()
    taken = take()
    next(taken)
    with pytest.raises(ShardOpenError, match="claimed in the directory 'inbox': File exists"):
        next(taken)
    assert there("inbox") == ["a.tar", "done"]


#: The calls of the system on the way of a shard, and the errors with which they fail.
CALLS: list[tuple[Any, str, int]] = [
    (Path, "rename", errno.EIO),
    (Path, "mkdir", errno.ENOSPC),
    (Path, "unlink", errno.EROFS),
    (os, "open", errno.EMFILE),
    (os, "utime", errno.EPERM),
    (os, "listdir", errno.EIO),
    (os, "scandir", errno.EACCES),
    (file_lock, "lock_descriptor", errno.ENOLCK),
    (file_lock, "is_same_file", errno.ESTALE),
    (directory_queue, "_rename_to_new_name", errno.EIO),
]


@pytest.mark.parametrize("after", ["keep", "delete", "return"])
@pytest.mark.parametrize(("module", "name", "code"), CALLS)
def test_a_failing_call_is_an_error_that_names_the_directory(
    module: Any, name: str, code: int, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = False
    for number in range(8):
        put("a.tar", "b.tar")
        call, count, seen = getattr(module, name), itertools.count(), list[str]()

        def fail(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:  # noqa: B023  it is called within this pass of the loop
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(module, name, fail)
            try:
                for path in islice(take(after=after), 2):
                    seen.append(name_of(path))
            except ShardOpenError as error:
                assert f"'inbox': {os.strerror(code)}" in str(error)  # noqa: PT017
                has_failed = True
        rest = names(islice(take(after=after), 2 if after == "return" else None))
        assert {*seen, *rest} == {"a.tar", "b.tar"}
        shutil.rmtree("inbox")
        os.mkdir("inbox")
    # A shard that cannot be returned stays claimed, which is logged.
    unused = {"unlink": after != "delete", "utime": after != "return", "_rename_to_new_name": after != "keep"}
    assert has_failed or unused[name]
