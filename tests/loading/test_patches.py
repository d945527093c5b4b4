"""Each fault of torchdata exists without the patches, and is gone with them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchdata

from wds_datapipes.loading.torchdata_patches import patches

#: The time limit of all scenarios together, in seconds; those that hang by design take half of it on a busy machine.
LIMIT_S = 600
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

UNPICKLED = r"\w+Error: Can't (pickle|get) local object .*"
NAMED = "'fn' of the stage .map is the function add.<locals>.<lambda>"
DRAWN = "4 orders, the same in another run: True"

# The result of each scenario without the patches, and with them.
OUTCOMES = {
    "uneven": ("Can not expect any response without submitted request", r"\[0, 1000, 1, 1001, 1002, 1003, 1004\]"),
    "uneven shards": ("Can not expect any response without submitted request", "200"),
    **dict.fromkeys(
        [f"killed, {main}/{worker}" for main in (0, 10) for worker in (0, 10)],
        ("hang", r"WorkerDiedError: Worker 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\) .*memory runs out.*"),
    ),
    **dict.fromkeys(
        ["exit, 0/0", "exit, 10/0"],
        ("hang", r"WorkerDiedError: Worker 1 \(pid \d+\) ended with exit code 3 .*exit\(\).*"),
    ),
    **dict.fromkeys(
        ["exit, 0/10", "exit, 10/10"],
        ("hang", r"WorkerDiedError: Caught .* raised SystemExit\(3\) in a prefetch thread.*"),
    ),
    "exit at once": ("hang", r"WorkerDiedError: Worker 1 \(pid \d+\) ended with exit code 7 .*"),
    "killed between epochs": ("hang", r"WorkerDiedError: Worker 0 \(pid \d+\) was killed by signal 9 .*"),
    "killed, then paused": ("hang", r"WorkerDiedError: Worker 1 \(pid \d+\) was killed by signal 9 .*"),
    "killed, then limited": ("hang", r"WorkerDiedError: Worker 1 \(pid \d+\) was killed by signal 9 .*"),
    "killed, then shut down": ("hang", "shut down"),
    **dict.fromkeys(
        [f"dispatcher killed, {main}/{worker}" for main in (0, 10) for worker in (0, 10)],
        ("hang", r"WorkerDiedError: The dispatching process \(pid \d+\) was killed by signal 9 .*"),
    ),
    "item cannot be pickled": (
        "hang",
        r"PicklingError: Caught .*process 1 made a dict whose part 'meta' is a list whose part 1 is .*_thread.lock.*",
    ),
    "dispatched item cannot be pickled": ("hang", r"PicklingError: Caught .*dispatching process made a dict whose .*"),
    "error cannot be pickled": ("hang", r"RuntimeError: Caught .*nowhere.Stubborn: cannot be imported.*"),
    "apply_sharding raises": ("hang", r"LookupError: Caught .*no shard for worker 0.*"),
    "worker_init_fn raises": ("hang", r"LookupError: Caught .*no such disk in worker 0.*"),
    "worker_reset_fn raises": ("hang", r"LookupError: Caught .*no such seed in worker 0.*"),
    "worker_reset_fn raises, dispatched": ("hang", r"LookupError: Caught .*no such seed in worker 0.*"),
    "iter raises": ("hang", r"LookupError: Caught .*raised by iter.*"),
    "shutdown in a long item": ("hang", "shut down"),
    "50 loaders": ("hang", "shut down"),
    "dispatched epochs": ("hang", "700"),
    "paused at the end": ("hang", "resumed"),
    "main killed": ("2 left of 3", "0 left of 3"),
    "main terminated": ("2 left of 3", "0 left of 3"),
    "Ctrl-C": ("[1-3] left of 3", "0 left of 3"),
    "local class": (UNPICKLED, r"\[0, 1, 2\]"),
    "lambda, no workers": (UNPICKLED, r"\[1, 2, 3\]"),
    "lambda, forked": (UNPICKLED, r"\[1, 1001, 2, 1002, 3, 1003\]"),
    **dict.fromkeys(
        ["lambda, spawned", "lambda, spawned dispatcher"],
        (UNPICKLED, rf"PicklingError: Workers .* 'spawn' .*, but {NAMED} .* top level .* dill, .*_context=\"fork\""),
    ),
    "lambda, state": (UNPICKLED, rf"PicklingError: The state .*, but {NAMED} .* or use ShardReadingService, .*"),
    "order, workers, seed": ("1 orders, the same in another run: True", DRAWN),
    "order, no service, seed": ("4 orders, the same in another run: False", DRAWN),
}
if not torchdata.__version__.startswith("0.7.1"):  # which draws its seeds correctly
    OUTCOMES["order, workers, no seed"] = ("1 orders, the same in another run: True", DRAWN)
    OUTCOMES["order, in process, no seed"] = ("1 orders, the same in another run: True", DRAWN)

# Scenarios that work without the patches, and still work with them.
UNTOUCHED = {
    "break, iterate again": r"\{119\}",
    "order, in process, seed": DRAWN,
    "order, no service, no seed": DRAWN,
}


def run_scenarios(limit: float, **environment: str) -> dict[str, str]:
    script = Path(__file__).with_name("scenarios.py")
    done = subprocess.run(
        [sys.executable, script, str(limit)],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        text=True,
        timeout=LIMIT_S,
    )
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


@pytest.fixture(scope="session")
def stock() -> dict[str, str]:
    return run_scenarios(5, WDS_DATAPIPES_PATCHES="0")


@pytest.fixture(scope="session")
def patched() -> dict[str, str]:
    return run_scenarios(50, WDS_DATAPIPES_PATCHES="1")


@pytest.mark.parametrize("scenario", OUTCOMES)
def test_torchdata_has_the_fault(scenario: str, stock: dict[str, str]) -> None:
    assert re.match(OUTCOMES[scenario][0], stock[scenario].removeprefix("Exception: "), re.DOTALL)


@pytest.mark.parametrize("scenario", OUTCOMES)
def test_the_patch_fixes_it(scenario: str, patched: dict[str, str]) -> None:
    assert re.fullmatch(OUTCOMES[scenario][1], patched[scenario], re.DOTALL), patched[scenario]


@pytest.mark.parametrize("scenario", UNTOUCHED)
def test_unaffected_scenarios_still_work(scenario: str, patched: dict[str, str]) -> None:
    assert re.fullmatch(UNTOUCHED[scenario], patched[scenario])


def test_every_scenario_is_judged(patched: dict[str, str]) -> None:
    assert not set(patched) - set(OUTCOMES) - set(UNTOUCHED) - {"order, workers, no seed", "order, in process, no seed"}


def test_every_patch_is_listed_with_its_fault() -> None:
    listed = patches.list_patches()
    assert [patch.name for patch in listed] == [
        "uneven_workers",
        "dead_workers",
        "lost_errors",
        "orphans",
        "shutdown",
        "stuck_pause",
        "repeated_order",
        "uneven_ranks",
        "lists_drawn_in_workers",
        "copied_by_workers",
        "endless_passes",
        "unseeded_service",
        "local_functions",
        "pickled_pipeline",
        "uncounted_items",
        "no_set_epoch",
        "no_length",
        "later_passes",
        "local_classes",
        "copied_data",
        "unknown_position",
        "late_shuffle",
    ]
    assert all(patch.applied and not patch.reason for patch in listed)
    assert all(patch.fault.endswith(".") for patch in listed)
    assert str(listed[0]) == (
        "uneven_workers: An epoch raises an exception if the workers yield different numbers of items. "
        "[patched] https://github.com/meta-pytorch/data/issues/1310"
    )


def test_applying_again_changes_nothing() -> None:
    from torchdata.dataloader2 import MultiProcessingReadingService

    before = dict(vars(MultiProcessingReadingService)), patches.list_patches()
    patches.apply()
    assert (dict(vars(MultiProcessingReadingService)), patches.list_patches()) == before


# The reason is determined in an interpreter without other imports.

REASONS = {
    "environment": ("import os; os.environ['WDS_DATAPIPES_PATCHES'] = '0'", "WDS_DATAPIPES_PATCHES=0 is set"),
    "no torchdata": (
        "import sys; sys.modules['torchdata'] = None",
        "torchdata is not installed, or has no DataLoader2",
    ),
    "no DataLoader2": (
        "import sys; sys.modules['torchdata.dataloader2'] = None",
        "torchdata is not installed, or has no DataLoader2",
    ),
    "another version": (
        "import torchdata; torchdata.__version__ = '0.6.0+cu118'",
        "torchdata 0.6.0 is not one of 0.7.1, 0.8.0, 0.9.0",
    ),
    "another file": (
        "import hashlib; stock = hashlib.sha256; hashlib.sha256 = lambda data: stock(data + b' ')",
        "eventloop.py is not the file of torchdata",
    ),
    "another system": (
        "import os, fsspec.core, torchdata; os.name = 'nt'",
        "only watched on POSIX systems, and this one is 'nt'",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_torchdata_is_left_alone(case: str) -> None:
    setup, reason = REASONS[case]
    code = f"""
import json, sys
from torch.utils.data import IterDataPipe
{setup}
from wds_datapipes.loading.torchdata_patches import patches
patches._done.clear()
patches.apply()
print(json.dumps([patch[3:] for patch in patches.list_patches()]))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    states = json.loads(done.stdout)
    assert len(states) == 22
    assert all(not applied and reason in why for applied, why in states[:-5])
    # Names of torch itself, and those that any release of torchdata has.
    assert [applied for applied, _ in states[-5:]] == [case != "environment"] * 5


def test_importing_shows_no_warning() -> None:
    module = "wds_datapipes.loading.torchdata_patches.patches"
    code = f"from {module} import apply; apply(); import torchdata.dataloader2, torchdata.datapipes"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
