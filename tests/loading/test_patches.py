"""The patches of torchdata: their effects, and the releases that they leave alone."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, MapDataPipe
from torchdata.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper, PinMemory, Prefetcher

from wds_datapipes import ShardReadingService, StatefulShards
from wds_datapipes.datapipes import torchdata_stages
from wds_datapipes.loading.service.drop_in import MultiProcessingService
from wds_datapipes.loading.torchdata_patches import patches
from wds_datapipes.pipes.state.description import descriptions

#: torchdata has it since 0.8.0.
HAS_STATEFUL_LOADER = importlib.util.find_spec("torchdata.stateful_dataloader") is not None
#: Patches of what this torchdata lacks; it has nodes since 0.10.0.
LACKING = [*([] if HAS_STATEFUL_LOADER else ["unknown_position"]), "stale_state"]


def epochs_of(pipe: IterDataPipe[int], service: Any) -> list[list[int]]:
    with DataLoader2(pipe, reading_service=service) as loader:
        return [list(loader) for _ in range(3)]


def is_kept(number: int) -> bool:
    return number < 4 or number % 2 == 0


def test_workers_may_be_uneven_and_each_epoch_has_its_own_order() -> None:
    uneven = IterableWrapper(range(20)).sharding_filter().filter(is_kept)
    assert sorted(epochs_of(uneven, MultiProcessingReadingService(2))[0]) == list(filter(is_kept, range(20)))
    unsplit = IterableWrapper(range(100)).shuffle()
    assert len({*map(tuple, epochs_of(unsplit, InProcessReadingService()))}) == 3
    assert len({*map(tuple, epochs_of(shuffled(100), MultiProcessingReadingService(2)))}) == 3


def test_torchdatas_service_runs_on_the_workers_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    service = MultiProcessingReadingService(3, "spawn", 4, main_prefetch_cnt=5, worker_init_fn=print)
    assert type(service) is MultiProcessingService
    assert isinstance(service, ShardReadingService)
    assert (service.num_workers, service.multiprocessing_context) == (3, "spawn")
    assert (service.worker_prefetch_cnt, service.main_prefetch_cnt, service.worker_init_fn) == (4, 5, print)
    assert not service.group.is_split  # each rank reads everything, as with torchdata
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "forkserver")  # the program chose it
    assert MultiProcessingReadingService(1).multiprocessing_context == "forkserver"
    assert type(ShardReadingService(1)) is ShardReadingService


def shuffled(count: int) -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(count)).shuffle().sharding_filter()
    return pipe


def test_the_first_epoch_of_a_seed_is_that_of_torchdata() -> None:
    """The order was recorded with unpatched torchdata 0.7.1 and 0.9.0."""
    with DataLoader2(shuffled(12), reading_service=MultiProcessingReadingService(2, "fork")) as loader:
        loader.seed(11)
        assert list(loader) == [10, 0, 11, 7, 5, 9, 2, 6, 1, 3, 4, 8]


def test_every_patch_is_listed_with_its_fault() -> None:
    listed = patches.list_patches()
    assert [patch.name for patch in listed] == [
        "multiprocessing_service",
        "repeated_order",
        "split_orders",
        "prefetch_threads",
        "endless_passes",
        "later_passes",
        "unknown_position",
        "concurrent_traversals",
        "stale_state",
    ]
    known = [patch for patch in listed if patch.name not in LACKING]
    assert all(patch.applied and not patch.reason for patch in known)
    assert all(patch.fault.endswith(".") for patch in listed)
    assert (
        str(listed[1]) == "repeated_order: ``DataLoader2`` without a seed has the same order in every epoch. [patched]"
    )


def test_each_patch_is_applied_once() -> None:
    def patched() -> list[Any]:
        patches.list_patches()
        return [MultiProcessingReadingService.__new__, Prefetcher.thread_worker, PinMemory.thread_worker]

    assert patched() == patched()


# Each program runs in a fork of an interpreter that has imported torch, which takes seconds, and nothing of ours.

ABSENT = "torchdata is not installed, or has no DataLoader2"
REASONS = {
    "environment": ("import os; os.environ['WDS_DATAPIPES_PATCHES'] = '0'", "WDS_DATAPIPES_PATCHES=0 is set", False),
    "no DataLoader2": ("import sys; sys.modules['torchdata.dataloader2'] = None", ABSENT, False),
    "another version": (
        "import torchdata; torchdata.__version__ = '0.6.0+cu118'",
        "torchdata 0.6.0 is not one of 0.7.1, 0.8.0, 0.9.0",
        True,
    ),
    "another system": (
        "import sys, fsspec.core, torchdata; sys.platform = 'darwin'",
        "require Linux, but this is",
        False,
    ),
}


#: Runs each of the programs among its arguments in a fork, with the exit code and the output of each as a result.
FORKS = """
import json, os, subprocess, sys, tempfile, traceback
from torch.utils.data import IterDataPipe
assert "torchdata" not in sys.modules
results = []
for program in sys.argv[1:]:
    with tempfile.TemporaryFile() as output:
        if not os.fork():
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                exec(program, {"__name__": "__main__"})
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.wait()
        output.seek(0)
        results.append([os.waitstatus_to_exitcode(status), output.read().decode()])
print(json.dumps(results))
"""
#: Prints the patches and the logged lines of a case.
PATCHES = """
import json, logging
logged = []
logging.getLogger("wds_datapipes").addHandler(handler := logging.Handler())
handler.emit = lambda record: logged.append(record.getMessage())
from wds_datapipes.loading.torchdata_patches import patches
print(json.dumps([[patch[2:] for patch in patches.list_patches()], logged]))
"""
#: Prints the patches that are not applied, and the number of patches.
APPLIED = """
import wds_datapipes
from wds_datapipes.loading.torchdata_patches import patches
print([patch.name for patch in patches.list_patches() if not patch.applied], len(patches.list_patches()))
"""
#: What a program may import first.
FIRST = [
    "import torchdata",
    "import torchdata.datapipes.iter",
    *(["import wds_datapipes, torchdata.stateful_dataloader"] if HAS_STATEFUL_LOADER else []),  # since 0.8
    "import wds_datapipes.loading.service.launch",
    "import wds_datapipes.loading.workers.in_process",
    "import wds_datapipes.loading.workers.worker",
    "import wds_datapipes.loading.service.loader",
    "from wds_datapipes import ShardReadingService",
]
NO_WARNING = "import wds_datapipes, torchdata.dataloader2, torchdata.datapipes"
#: With a finder of the old kind, such as that of six 1.15, which has ``find_module`` only.
OLD_FINDER = """
import sys, warnings; warnings.simplefilter("ignore")
sys.meta_path.insert(0, type("Finder", (), {"find_module": lambda *_: None})())
import wds_datapipes, torchdata.dataloader2
print("ShardReadingService" in wds_datapipes.__all__)
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """The exit code and the output of each program."""
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    programs = {case: f"{quiet}{setup}{PATCHES}" for case, (setup, *_) in REASONS.items()}
    programs |= {first: f"{quiet}{first}{APPLIED}" for first in FIRST}
    programs |= {text: f"import warnings; warnings.simplefilter('error')\n{text}" for text in (NO_WARNING, OLD_FINDER)}
    command = [sys.executable, "-W", "ignore", "-c", FORKS, *programs.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(programs, map(tuple, json.loads(done.stdout.splitlines()[-1])), strict=True))


@pytest.mark.parametrize("case", REASONS)
def test_torchdata_is_left_alone(case: str, ended: dict[str, tuple[int, str]]) -> None:
    _, reason, is_logged = REASONS[case]
    states, logged = json.loads(ended[case][1])
    assert len(states) == 9
    assert all(not applied and reason in why for applied, why in states[:5])
    assert [applied for applied, _ in states[5:]] == [
        case != "environment",
        HAS_STATEFUL_LOADER and case != "environment",
        case != "environment",
        False,  # this torchdata has no nodes
    ]
    assert len(logged) == is_logged
    assert all(reason in line for line in logged)


class Forwarder(IterDataPipe[int]):
    """A stage as torch documents them, which records the attributes that it lacks."""

    def __init__(self, source: IterDataPipe[int]) -> None:
        self.source = source
        self.lacking: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        yield from self.source

    def __getattr__(self, name: str) -> Any:
        self.lacking.add(name)
        return super().__getattr__(name)


def test_torch_looks_up_no_missing_attribute_in_a_loader_of_this_package() -> None:
    pipe = Forwarder(IterableWrapper(range(9)))
    before = descriptions(pipe)
    assert list(StatefulShards(pipe)) == [*range(9)]
    assert "_is_child_datapipe" not in pipe.lacking
    assert descriptions(pipe) == before  # with which states are compared
    other = Forwarder(IterableWrapper(range(9)))
    assert list(other) == [*range(9)]
    assert "_is_child_datapipe" in other.lacking  # torch's class is unchanged


def test_the_outputs_of_a_fork_still_end_together() -> None:
    one, other = IterableWrapper(range(9)).fork(2)
    first, second = iter(one), iter(other)
    assert [next(first), next(second)] == [0, 0]
    with pytest.warns(UserWarning, match="not exhausted"):
        assert next(iter(one)) == 0
    with pytest.raises(RuntimeError, match="a new iterator has been created from one of the ChildDataPipes"):
        next(second)


#: Prints the modules of torchdata after each step of a program that does not use it, and of one that then does.
LAZY = """
import sys
import wds_datapipes
from torch.utils.data import DataLoader
from wds_datapipes import ShardList, StatefulShards, list_patches
from wds_datapipes.testing import build_shard

def imported():
    return "torchdata" in sys.modules

if __name__ == "__main__":
    build_shard("a.tar", [{"__key__": str(n), "cls": str(n)} for n in range(4)])
    pipe = ShardList("a.tar").shuffle().sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
    print(len(list(DataLoader(StatefulShards(pipe), batch_size=None, num_workers=1))), imported())
    print(hasattr(pipe, "apply_sharding"), hasattr(pipe, "no_such_stage"), imported())
    print(len(list(pipe.cycle(2))), imported(), [patch.name for patch in list_patches() if not patch.applied])
"""


def test_torchdata_is_imported_at_its_first_use(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAZY)
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["4 False", "False False False", f"8 True {LACKING}"]


@pytest.mark.parametrize("first", FIRST)
def test_torchdata_is_patched_whatever_is_imported_first(first: str, ended: dict[str, tuple[int, str]]) -> None:
    assert ended[first] == (0, f"{LACKING} 9\n")


def test_the_names_of_torchdatas_stages_are_known() -> None:
    registered = {
        name
        for kind in (IterDataPipe, MapDataPipe)
        for name, make in kind.functions.items()
        if make.__module__.startswith("torchdata")
    }
    assert len(registered) > 50
    assert registered <= torchdata_stages.STAGES


def test_importing_shows_no_warning(ended: dict[str, tuple[int, str]]) -> None:
    assert ended[NO_WARNING] == (0, "")


def test_finders_of_the_old_kind_are_passed(ended: dict[str, tuple[int, str]]) -> None:
    assert ended[OLD_FINDER] == (0, "True\n")
