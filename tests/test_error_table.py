"""Every error of the package: its place in the tree, what raises it, and how it crosses to another process."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import pickle
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

from wds_datapipes import (
    DatasetSpec,
    ErrorBudget,
    ReadLimits,
    ShardList,
    ShardReadingService,
    TarWriter,
    convert_shards,
    errors,
)
from wds_datapipes.extras import require
from wds_datapipes.index import build_index, check_index, read_index
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.prepare.create import create_shards
from wds_datapipes.prepare.shell_command import SampleCommand
from wds_datapipes.prepare.sources.tarp_recipe import Recipe
from wds_datapipes.testing import build_shard


class Deadly(IterDataPipe[int]):
    """Its worker is killed, as on a host that has run out of memory."""

    def __iter__(self) -> Iterator[int]:
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)


class Stuck(IterDataPipe[int]):
    """Its worker waits for something that never comes."""

    def __iter__(self) -> Iterator[int]:
        yield 1
        threading.Event().wait()


@contextmanager
def rank(folder: Path, number: int) -> Iterator[Ranks]:
    """Be one of the two ranks of a run."""
    init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    try:
        ranks = Ranks(IterableWrapper([]), timeout_s=60)
        ranks.gather()
        yield ranks
    finally:
        destroy_process_group()


def leave_as_rank_1(folder: Path) -> None:
    with rank(folder, 1) as ranks:
        ranks.leave(LookupError("no such label"))


def left_alone(folder: Path) -> None:
    """Start an epoch after the other rank has left."""
    other = multiprocessing.get_context("fork").Process(target=leave_as_rank_1, args=(folder,))
    other.start()
    with rank(folder, 0) as ranks:
        other.join()
        ranks.meet(0)


def shard(folder: Path, *samples: dict[str, bytes | str]) -> str:
    return build_shard(folder / "x.tar", samples or [{"__key__": "a", "cls": "1"}, {"__key__": "b", "cls": "2"}])


def cut(folder: Path) -> str:
    path = shard(folder)
    os.truncate(path, 1100)
    return path


def sparse(folder: Path) -> str:
    path = Path(shard(folder))
    block = bytearray(path.read_bytes()[:512])
    block[156:157] = b"S"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(block + bytes(1024))
    return str(path)


def written(folder: Path, content: bytes) -> str:
    (folder / "x.tar").write_bytes(content)
    return str(folder / "x.tar")


def changed(folder: Path) -> None:
    """Use the index of a shard that was rewritten since."""
    url = shard(folder)
    index = build_index(url)
    Path(url).write_bytes(Path(url).read_bytes() + bytes(512))
    check_index(index, url)


def write(folder: Path, sample: dict[str, Any]) -> None:
    with TarWriter(folder / "x.tar") as writer:
        writer.write(sample)


def beside(url: str) -> str:
    return build_shard(url.replace("x.tar", "y.tar"), [{"__key__": "a", "txt": "1"}, {"__key__": "c", "txt": "2"}])


def members(url: str) -> list[Any]:
    return list(IterableWrapper([url]).load_wds_shards())


def samples(url: str, **options: Any) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = IterableWrapper([url]).load_wds_shards().group_samples(**options)
    return pipe


def read_failing(folder: Path) -> None:
    """Address 0 of this process's memory is a file that opens, and fails when it is read."""
    members("/proc/self/mem")


#: A situation that raises each error, and its text.
def resumed_elsewhere(folder: Path) -> list[Any]:
    """Load a state with a shard that contains other samples by now."""
    kept: list[dict[str, bytes | str]] = [{"__key__": str(number), "cls": "1"} for number in range(5)]
    pipe = samples(shard(folder, *kept)).shuffle_samples(3)
    next(iter(pipe))
    state = save_state(pipe)
    shard(folder, *kept[:1])
    load_state(pipe, state)
    return list(pipe)


TABLE: list[tuple[str, Callable[[Path], object], str]] = [
    ("SpecError", lambda folder: ShardList(f"{folder}/none-*.tar"), r"none-\*\.tar"),
    (
        "SpecError",
        lambda folder: DatasetSpec({"datasets": [{"shards": "a.tar", "wieght": 2}]}),
        r"datasets\[0\] has the unknown keys 'wieght'",
    ),
    ("UnknownSchemeError", lambda folder: members("nowhere://x.tar"), r"scheme 'nowhere'.*register_opener"),
    (
        "MissingDependencyError",
        lambda folder: require("no_such_module", extra="zst", purpose="read"),
        r"'no_such_module' is needed to read.*pip install \"wds-datapipes\[zst\]\"",
    ),
    (
        "UnsafeInputError",
        lambda folder: list(IterableWrapper([shard(folder)]).load_wds_shards(allow_local_files=False)),
        r"x\.tar' was refused: it is a local path\. With allow_local_files=False",
    ),
    ("ShardOpenError", lambda folder: members(f"{folder}/none.tar"), r"There is no file '.*none\.tar'"),
    ("ShardReadError", lambda folder: members("pipe:exit 3"), r"'exit 3' exited with status 3 after 0 bytes"),
    ("ShardReadError", read_failing, r"/proc/self/mem could not be read to its end: OSError"),
    ("TruncatedShardError", lambda folder: members(cut(folder)), r"x\.tar ends inside a header, at byte 1100"),
    (
        "CorruptShardError",
        lambda folder: members(written(folder, b"<html>" * 100)),
        r"x\.tar is not a tar archive.*<html>",
    ),
    ("UnsupportedMemberError", lambda folder: members(sparse(folder)), r"x\.tar holds the member 'a\.cls'.*sparse"),
    (
        "ReadLimitError",
        lambda folder: list(IterableWrapper([shard(folder)]).load_wds_shards(limits=ReadLimits(member_bytes=0))),
        r"x\.tar has the member 'a\.cls' \(header at byte 0\) of 1 bytes, and the limit is member_bytes=0\. ",
    ),
    ("ChangedShardError", resumed_elsewhere, r"has changed since the state was saved"),
    (
        "StateError",
        lambda folder: save_state(samples(shard(folder)).compose(iter)),
        r"StreamComposer has no position in the shards",
    ),
    (
        "DuplicateKeyError",
        lambda folder: list(samples(shard(folder, {"__key__": "a", "cls": "1", "CLS": "2"}))),
        r"x\.tar holds the field 'cls' of the sample 'a' twice, at bytes 0 and 1024",
    ),
    (
        "DuplicateKeyError",
        lambda folder: list(
            samples(
                shard(folder, {"__key__": "a", "x": "1"}, {"__key__": "b", "x": "1"}, {"__key__": "a", "y": "1"}),
                on_repeated_key="raise",
            )
        ),
        r"x\.tar holds the sample 'a' in parts: a file of it is at byte 2048",
    ),
    (
        "MissingFieldError",
        lambda folder: list(samples(shard(folder)).to_tuple("jpg;png")),
        r"field 'jpg;png' was requested, but the sample 'a' of .*x\.tar has \['cls'\]",
    ),
    (
        "MissingFieldError",
        lambda folder: list(samples(shard(folder)).associate({"b": {}})),
        r"found no entry for the sample 'a' of .*x\.tar",
    ),
    (
        "MisalignedShardsError",
        lambda folder: list(samples(shard(folder)).add_columns(beside)),
        r"y\.tar has the sample 'c', but .*x\.tar has the sample 'b'",
    ),
    (
        "DecodeError",
        lambda folder: list(samples(shard(folder, {"__key__": "a", "json": "{"})).wds_decode()),
        r"field 'json' of sample 'a' in shard '.*x\.tar' cannot be decoded",
    ),
    (
        "SampleSizeError",
        lambda folder: list(samples(shard(folder)).bucket_samples(lambda _: 9, max_tokens=8)),
        r"the sample 'a' of .*x\.tar has the length 9, which exceeds max_tokens=8",
    ),
    (
        "EncodeError",
        lambda folder: list(IterableWrapper([{"__key__": "a", "cls": None}]).wds_encode()),
        r"field 'cls' of sample 'a' holds None, which cannot be encoded.*It takes an int",
    ),
    (
        "SampleSourceError",
        lambda folder: create_shards(Recipe(written(folder, b"a.jpg no.jpg"), root=folder), folder / "a.tar"),
        r"file '.*/no\.jpg', for the field 'jpg' of the sample 'a' of '.*', cannot be read: No such file",
    ),
    (
        "EncodeError",
        lambda folder: write(folder, {"__key__": "a.b", "cls": 1}),
        r"key 'a\.b' cannot be written: its files would belong to the key 'a'",
    ),
    (
        "SampleSourceError",
        lambda _: SampleCommand("echo no cat >&2; exit 3")({"__key__": "a", "__url__": "x.tar", "txt": b""}),
        r"exit 3' exited with status 3 for the sample 'a' of x\.tar\. Its last output is: no cat",
    ),
    ("ShardWriteError", lambda folder: TarWriter(folder / "no/x.tar"), r"no folder '.*/no'\. Create it first"),
    (
        "ConversionError",
        lambda folder: convert_shards(cast(Any, len), [shard(folder)], f"{folder}/out/", retries=0, num_workers=0),
        r"1 of 1 shards .*\n.*x\.tar: TypeError: the function must return a sample, samples or None",
    ),
    (
        "UnsafeInputError",
        lambda folder: list(samples(shard(folder, {"__key__": "a", "pyd": pickle.dumps(1)})).wds_decode()),
        r"allow_pickle=True",
    ),
    (
        "EmptySourceError",
        lambda folder: list(IterableWrapper([]).with_epoch(3)),
        r"with_epoch needs 3 more items, but its source yielded none in",
    ),
    (
        "ErrorBudgetError",
        lambda folder: list(
            samples(shard(folder, {"__key__": "a", "json": "{"})).wds_decode(
                on_error=ErrorBudget(max_errors=0, warn=False)
            )
        ),
        r"wds_decode skipped 1 of 1 items \(1 x DecodeError\)",
    ),
    (
        "MissingSidecarError",
        lambda folder: read_index(f"{folder}/x.tar.wdsidx"),
        r"x\.tar\.wdsidx cannot be read: there is no such file",
    ),
    (
        "CorruptSidecarError",
        lambda folder: read_index(written(folder, b"v1.2 1\n")),
        r"x\.tar is not a shard index: it begins with b'v1\.2 1",
    ),
    ("StaleSidecarError", changed, r"x\.tar has changed since its index was built: it has 10752 bytes, not 10240"),
    (
        "UnsupportedSidecarError",
        lambda folder: build_index(build_shard(folder / "x.tgz", [])).check_random_access(),
        r"x\.tgz belongs to a shard compressed with gzip",
    ),
    (
        "CacheError",
        lambda folder: list(IterableWrapper([threading.Lock()], deepcopy=False).cache_samples()),
        r"cache_samples cannot cache an item of type lock, as it cannot be pickled: TypeError",
    ),
    (
        "WorkerDiedError",
        lambda folder: list(DataLoader2(Deadly(), reading_service=MultiProcessingReadingService(num_workers=1))),
        r"SIGKILL",
    ),
    (
        "WorkerTimeoutError",
        lambda folder: list(DataLoader2(Stuck(), reading_service=ShardReadingService(1, timeout_s=0.2))),
        r"Worker 0 \(pid \d+\) has sent nothing for timeout_s=0\.2 s",
    ),
    ("RankLostError", left_alone, r"rank 1 has ended its service after LookupError: no such label"),
]
#: Base classes that nothing raises.
GROUPS = {"WdsError", "ShardError", "SampleError", "SidecarError"}


def test_the_table_contains_every_error() -> None:
    assert {name for name, *_ in TABLE} | GROUPS == set(errors.__all__)


@pytest.mark.parametrize(("name", "situation", "text"), TABLE)
def test_each_error_is_raised_by_its_situation(
    name: str, situation: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(getattr(errors, name), match=text) as caught:
        situation(tmp_path)
    assert type(caught.value) is getattr(errors, name)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (type(caught.value), str(caught.value))


class Raising(IterDataPipe[int]):
    """Raises an error by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[int]:
        yield 1
        raise getattr(errors, self.name)("x.tar holds 'a', at byte 512: {x} %s")


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_crosses_from_a_worker_with_its_type_and_text(name: str) -> None:
    with pytest.raises(errors.WdsError, match=r"x\.tar holds 'a', at byte 512: \{x\} %s") as caught:
        list(DataLoader(Raising(name), batch_size=None, num_workers=1))
    traceback.clear_frames(caught.tb)  # a frame of torch holds the worker, which would take 5 seconds to end
    assert type(caught.value) is getattr(errors, name)


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_can_be_made_without_its_constructor(name: str) -> None:
    """Dask's exceptions cross by ``__new__``, which fails if the first builtin among the bases is not the largest."""
    kind = getattr(errors, name)
    assert type(kind.__new__(kind, "x")) is kind


def test_the_documented_tree_is_accurate() -> None:
    parents = ["WdsError"]
    drawn = {"WdsError": (Exception,)}
    for line in str(errors.__doc__).splitlines():
        if match := re.match(r"(\s*[│ ]*)[├└]── (\w+)(?: \((\w+)\))?", line):
            indent, name, other = match.groups()
            depth = (len(indent) - 4) // 4 + 1
            del parents[depth:]
            bases = (parents[-1], other) if other else (parents[-1],)
            drawn[name] = tuple(getattr(errors, base, None) or getattr(builtins, base) for base in bases)
            parents.append(name)
    assert drawn == {name: getattr(errors, name).__bases__ for name in errors.__all__}
