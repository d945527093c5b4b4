"""Programs with releases of torch that have no datapipes, or that warn of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks_of

from wds_datapipes.tools.cli.demo import write_photographs

#: The program of the README, and its continuation with DataLoader2.
README = [block.text for block in blocks_of((ROOT / "README.md").read_text("utf-8")) if block.kind == "python"][:2]
#: What is done with a pipeline, in a program that is a file, as workers are spawned.
PROGRAM = """
from forked_ranks import on_ranks
from torch.utils.data import DataLoader
from wds_datapipes import ShardList, StatefulShards, testing
from wds_datapipes.pipes.graph import graph_of
def pipe():
    shards = ShardList("wds-datapipes-demo/train-{000..003}.tar").shuffle().sharding_filter()
    return shards.load_wds_shards().group_samples().to_tuple("__key__")
def read(loader):
    try:
        return len(list(loader))
    except RuntimeError as error:
        return str(error).strip().partition(". ")[2]
def read_whole(rank):
    whole = pipe()
    graph_of(whole).splitters[0].apply_sharding(1, 0)
    return read(DataLoader(pipe(), batch_size=None)), read(whole) == count
if __name__ == "__main__":
    count = len(list(pipe()))
    print(*on_ranks(2, read_whole))
    testing.check_stage(pipe)
    spawned = DataLoader(StatefulShards(pipe()), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    print(len(list(spawned)) == count)
    print(read(DataLoader(pipe(), batch_size=None, num_workers=2)))
"""


def run(release: str, program: str) -> tuple[str, str]:
    """Return what a program prints with a release of torch, in which warnings are errors."""
    Path("program.py").write_text(program)
    environ = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent}:{ROOT / 'tests' / 'support'}",
        "TORCH_DATAPIPES": release,
    }
    # The stacks of forked ranks are recorded in files that stay open.
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "program.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout, done.stderr


@pytest.fixture
def shards(folder: Path) -> None:
    """What the command above the program in the README writes."""
    Path("wds-datapipes-demo").mkdir()
    write_photographs(Path("wds-datapipes-demo"))


def test_the_readme_runs_without_datapipes_in_torch(shards: None) -> None:
    assert run("gone", README[0]) == ("", "")


def test_workers_are_spawned_and_a_loader_that_would_not_split_is_an_error(shards: None) -> None:
    advice = "Pass StatefulShards(pipeline) to it, or call apply_sharding(1, 0) to read all shards here"
    assert run("gone", PROGRAM) == (f"{(advice, True)} {(advice, True)}\nTrue\n{advice}\n", "")


def test_no_warning_of_torch_reaches_a_program(shards: None) -> None:
    assert "UserWarning: torch.utils.data.datapipes is deprecated" in run("deprecated", "import torch.utils.data")[1]
    program = f"import wds_datapipes\n{''.join(README)}\nclass Own(wds_datapipes.Stage): pass"
    assert run("deprecated", program) == ("", "")
