"""The command ``steps``: the samples of training steps, given a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from wds_datapipes import IndexedSamples, StatefulShards
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.shard_contents import read_contents

PIPELINE = """
from wds_datapipes import IndexedSamples

def build():
    return IndexedSamples("steps-{0,1}.tar", global_batch_size=4, remainder="pad").batch(4)
"""


@pytest.fixture
def batches(folder: Path) -> list[list[str]]:
    """The keys of two epochs, whose state is saved in two files."""
    for number in range(2):
        build_shard(f"steps-{number}.tar", [{"__key__": f"{number}-{n}", "cls": str(n)} for n in range(3)])
    Path("built_for_steps.py").write_text(PIPELINE)
    data = StatefulShards(IndexedSamples("steps-{0,1}.tar", global_batch_size=4, remainder="pad").batch(4), seed=3)
    found = [[sample["__key__"] for sample in batch] for _ in range(2) for batch in data]
    torch.save({"model": {"weight": torch.zeros(2)}, "loaders": [data.state_dict()]}, "run.pt")
    Path("run.json").write_text(json.dumps(data.state_dict()))
    return found


def test_steps_are_printed_and_copied(program: Any, batches: list[list[str]]) -> None:
    run = program("steps", "run.pt", "built_for_steps:build", "--step", "0:4", "--json", "--tar", "found.tar")
    assert (run.code, run.err) == (0, "")
    rows = [json.loads(line) for line in run.out.splitlines()]
    assert [row["key"] for row in rows] == [key for batch in batches for key in batch]
    assert [row["step"] for row in rows] == [step for step in range(4) for _ in range(4)]
    assert [row["is_padding"] for row in rows] == [False] * 6 + [True] * 2 + [False] * 6 + [True] * 2
    copied = [sample.key for sample in read_contents("found.tar").samples]
    assert copied == [f"{step}/{at:05}/{key}" for step, batch in enumerate(batches) for at, key in enumerate(batch)]

    Path("replayed.py").write_text("def receive(batch):\n    print(*[sample['__key__'] for sample in batch])\n")
    run = program(
        "steps", "run.pt", "built_for_steps:build", "--step", "2", "--show", "2.html", "--replay", "replayed:receive"
    )
    assert run.out.splitlines()[-1].split() == batches[2]
    page = Path("2.html").read_text()
    assert all(re.search(f"\\b{key}\\b", page) for key in batches[2])

    table = program("steps", "run.json", "built_for_steps:build", "--step", "1").out.splitlines()
    assert table[0].split() == ["step", "rank", "worker", "dataset", "shard", "number", "key"]
    assert [line.split()[5] for line in table[1:]] == batches[1]
    assert table[3].endswith("(padding)")


def test_the_steps_of_a_key_are_found(program: Any, batches: list[list[str]]) -> None:
    key = batches[2][1]
    run = program("steps", "run.pt", "built_for_steps:build", "--step", "0:4", "--find", key)
    steps = [int(line.split()[0]) for line in run.out.splitlines()[1:]]
    assert steps == [step for step, batch in enumerate(batches) for each in batch if each == key]
    run = program("steps", "run.pt", "built_for_steps:build", "--step", "0:4", "--find", "none")
    assert (run.out, run.code) == ("", 1)
    assert "none of 4 steps had a sample with such a key" in run.err


@pytest.mark.usefixtures("batches")
def test_the_provenance_of_a_run_is_printed(program: Any) -> None:
    run = program("steps", "run.pt", "built_for_steps:build", "--provenance")
    assert (run.code, run.err) == (0, "")
    lines = run.out.splitlines()
    assert lines[0] == "Training data of 4 steps:"
    assert lines[4].split(" | ")[1:3] == ["2", "6"]
    assert lines[4].split(" | ")[-2:] == ["12", "2 |"]
    facts = json.loads(program("steps", "run.pt", "built_for_steps:build", "--provenance", "--json").out)
    assert facts["datasets"][""]["samples_seen"] == 12
    assert [phase["step"] for phase in facts["phases"]] == [0]


@pytest.mark.usefixtures("batches")
def test_wrong_use_is_an_error_that_says_what_is_wrong(program: Any) -> None:
    Path("empty.json").write_text("{}")
    for arguments, message in {
        ("none.pt", "built_for_steps:build", "--step", "0"): "none.pt is not a file of torch.save or JSON: ",
        ("empty.json", "built_for_steps:build", "--step", "0"): "contains 0 states of loaders instead of one",
        ("run.pt", "built_for_steps:build", "--step", "3:1"): "--step must be a number from 0, or FIRST:END",
        ("run.pt", "built_for_steps:build"): "Use either --step or --provenance",
        ("run.pt", "built_for_steps", "--step", "3"): "PIPELINE must be MODULE:FUNCTION",
        ("run.pt", "builtins:len", "--step", "3"): "PIPELINE must be a function without arguments, but 'builtins:len'",
        ("run.pt", "built_for_steps:build", "--step", "3", "--no-keys", "--find", "a"): "--find needs the keys",
    }.items():
        run = program("steps", *arguments)
        assert run.code == 2
        assert message in run.err
