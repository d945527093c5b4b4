"""Each fault causes the right error at the right position, no leftovers and no hang."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_runner
import pytest
from fault_table import NONE_OPENED, all_faults, died

Result = dict[str, Any]

FAULTS = all_faults()

#: The time limit of a fault, in seconds. Only a hang, or spawning on a busy machine, takes this long.
LIMIT_S = 300

# All faults run in one fixture, and have their own limits.
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Return the result of a fault; the first request runs all that the tests of this session need."""
    done: dict[str, Result] = {}

    def run(names: list[str]) -> None:
        ran = subprocess.run(
            [sys.executable, fault_runner.__file__, str(LIMIT_S)],
            env={**os.environ, "FAULTS_FOLDER": str(tmp_path_factory.mktemp("faults"))},
            input=json.dumps(names),
            capture_output=True,
            check=False,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        done.update(json.loads(ran.stdout))

    def result_of(name: str) -> Result:
        if not done:
            chosen = {each.callspec.params.get("name") for each in request.session.items if hasattr(each, "callspec")}
            run([each for each in FAULTS if each in chosen])
        if name not in done:
            run([name])
        return done[name]

    return result_of


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_and_leaves_nothing(name: str, results: Callable[[str], Result]) -> None:
    fault, result = FAULTS[name], results(name)
    assert re.fullmatch(fault.says, result["outcome"], re.DOTALL), result["outcome"]
    assert re.fullmatch(fault.noise, result["noise"], re.DOTALL), result["noise"]
    if fault.left is None:
        assert result["left"] == []
    else:
        assert all(re.fullmatch(fault.left, each) for each in result["left"]), result["left"]


def test_the_outcome_depends_on_the_number_of_descriptors(results: Callable[[str], Result]) -> None:
    ends = [results(f"start: {left} descriptors")["outcome"] for left in (1, 11)]
    assert ends[0] != ends[-1] == "60; end"


UNGUARDED = """
import warnings
warnings.simplefilter("ignore")
from torchdata.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2
from wds_datapipes import ShardReadingService
pipe = IterableWrapper([f"{number:06}.tar" for number in range(100_000)]).sharding_filter()
with DataLoader2(pipe, reading_service=ShardReadingService(1, "spawn")) as loader:
    list(loader)
"""


def test_a_program_that_workers_cannot_import_ends(tmp_path: Path) -> None:
    # The program lacks `if __name__ == "__main__"`, and its pipeline is larger than a pipe's buffer.
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, check=False, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "before the current process has finished its bootstrapping phase" in " ".join(done.stderr.split())
    assert re.search(died("Worker 0", "ended with exit code 1", NONE_OPENED), done.stderr)
