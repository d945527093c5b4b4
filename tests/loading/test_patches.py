"""The patches of torchdata: what they change, and which releases they leave alone."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.loading.service.service import MultiProcessingService
from wds_datapipes.loading.torchdata_patches import patches

#: Prints what an epoch with uneven workers yields, or its error, and the number of orders of three epochs.
SCRIPT = """
import json, sys
from wds_datapipes import list_patches
from torchdata.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper

def read(pipe, service):
    with DataLoader2(pipe, reading_service=service) as loader:
        return [list(loader) for _ in range(3)]

def is_kept(number):
    return number < 4 or number % 2 == 0

try:
    uneven = read(IterableWrapper(range(20)).sharding_filter().filter(is_kept), MultiProcessingReadingService(2))[0]
except Exception as error:
    uneven = str(error)
orders = read(IterableWrapper(range(100)).shuffle(), InProcessReadingService())
seeded = read(IterableWrapper(range(100)).shuffle().sharding_filter(), MultiProcessingReadingService(2))
print(json.dumps([uneven, len({*map(tuple, orders)}), len({*map(tuple, seeded)})]))
"""
#: torchdata has it since 0.8.0.
HAS_STATEFUL_LOADER = importlib.util.find_spec("torchdata.stateful_dataloader") is not None


def run(code: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("patched", ["0", "1"])
def test_uneven_workers_and_orders(patched: str) -> None:
    uneven, orders, orders_of_workers = run(SCRIPT, WDS_DATAPIPES_PATCHES=patched)
    if patched == "1":
        assert sorted(uneven) == [0, 1, 2, 3, *range(4, 20, 2)]
        assert (orders, orders_of_workers) == (3, 3)
    else:
        assert "request" in uneven
        assert orders_of_workers == (1 if HAS_STATEFUL_LOADER else 3)  # since 0.8.0


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


def test_torchdatas_service_runs_a_dispatching_stage_on_its_own_processes() -> None:
    pipe = IterableWrapper(range(20)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)) as loader:
        assert type(loader.reading_service) is MultiProcessingReadingService
        assert [list(loader), list(loader)] == [list(range(20))] * 2


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
    ]
    known = listed if HAS_STATEFUL_LOADER else listed[:-1]  # the last one patches that loader
    assert all(patch.applied and not patch.reason for patch in known)
    assert all(patch.fault.endswith(".") for patch in listed)
    assert (
        str(listed[1]) == "repeated_order: ``DataLoader2`` without a seed has the same order in every epoch. [patched]"
    )


# The reason is determined in an interpreter without other imports.

ABSENT = "torchdata is not installed, or has no DataLoader2"
REASONS = {
    "environment": ("import os; os.environ['WDS_DATAPIPES_PATCHES'] = '0'", "WDS_DATAPIPES_PATCHES=0 is set", False),
    "no DataLoader2": ("import sys; sys.modules['torchdata.dataloader2'] = None", ABSENT, False),
    "another version": (
        "import torchdata; torchdata.__version__ = '0.6.0+cu118'",
        "torchdata 0.6.0 is not one of 0.7.1, 0.8.0, 0.9.0",
        True,
    ),
    "another system": ("import fsspec.core, torchdata; sys.platform = 'darwin'", "require Linux, and this is", False),
}


@pytest.mark.parametrize("case", REASONS)
def test_torchdata_is_left_alone(case: str) -> None:
    setup, reason, is_logged = REASONS[case]
    code = f"""
import json, logging, sys
from torch.utils.data import IterDataPipe
{setup}
logged = []
logging.getLogger("wds_datapipes").addHandler(handler := logging.Handler())
handler.emit = lambda record: logged.append(record.getMessage())
from wds_datapipes.loading.torchdata_patches import patches
print(json.dumps([[patch[2:] for patch in patches.list_patches()], logged]))
"""
    states, logged = run(code)
    assert len(states) == 7
    assert all(not applied and reason in why for applied, why in states[:5])
    assert [applied for applied, _ in states[5:]] == [
        case != "environment",
        HAS_STATEFUL_LOADER and case != "environment",
    ]
    assert len(logged) == is_logged
    assert all(reason in line for line in logged)


def test_importing_shows_no_warning(tmp_path: Path) -> None:
    code = "import wds_datapipes, torchdata.dataloader2, torchdata.datapipes"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path)
