"""The command ``bench``: what it measures and its errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from wds_datapipes.testing import build_shard

QUICK = ("--seconds", "0.05", "--batch-size", "4")


def image(seed: int, side: int = 40) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def images(folder: Path) -> list[str]:
    return [
        build_shard(
            f"{shard}.tar",
            [{"__key__": f"{shard}-{n}", "jpg": image(n, 40 + n), "cls": "7", "txt": "a cat"} for n in range(6)],
        )
        for shard in range(3)
    ]


@pytest.mark.parametrize("more", [("--crop", "16"), ("--decode", "none")])
def test_the_results_are_json(program: Any, images: list[str], more: tuple[str, ...]) -> None:
    done = program("bench", *images, *QUICK, "--num-workers", "2,0", "--json", "--step-time", "0.5", *more)
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["shards"] == 3
    assert list(facts["fields"]) == ["jpg", "cls", "txt"]
    assert facts["fields"]["cls"] == 1
    assert facts["sample_bytes"] == pytest.approx(sum(facts["fields"].values()))
    assert list(facts["stages"]) == ["read", "decode", "batch"]
    assert sum(stage["share"] for stage in facts["stages"].values()) == pytest.approx(1)
    assert [each["workers"] for each in facts["deliveries"]] == [0, 2]
    for each in facts["deliveries"]:
        assert each["samples_per_s"] > 0
        assert each["first_batch_s"] > 0
        assert 0 < each["loop_share"] <= 1
        assert each["headroom"] == pytest.approx(each["samples_per_s"] * 0.5 / 4)
    assert facts["skipped"] == {}


PIPELINES = """
from wds_datapipes import ShardList

def tuples(urls):
    return ShardList(urls).load_wds_shards().group_samples().map_samples(pair).batch(4).collate()

def pair(sample):
    return len(sample["jpg"]), sample["__key__"]

def nothing(urls):
    return ShardList(urls).load_wds_shards().group_samples().filter(no)

def no(sample):
    return False
"""


def test_a_pipeline_of_the_user_is_measured(program: Any, images: list[str]) -> None:
    Path("pipelines_to_measure.py").write_text(PIPELINES)
    arguments = ("bench", *images, *QUICK, "--num-workers", "0,2", "--json", "--pipeline")
    facts = json.loads(program(*arguments, "pipelines_to_measure:tuples").out)
    assert list(facts["stages"]) == ["pipeline"]
    assert [each["workers"] for each in facts["deliveries"]] == [0, 2]
    done = program(*arguments, "pipelines_to_measure:nothing")
    assert done.code == 1
    assert "the pipeline yielded nothing" in done.err


def test_samples_that_cannot_be_decoded_are_counted_and_an_error(program: Any, images: list[str]) -> None:
    build_shard("bad.tar", [{"__key__": f"b{n}", "jpg": "oops"} for n in range(3)])
    done = program("bench", images[0], "bad.tar", *QUICK, "--num-workers", "0", "--json")
    assert done.code == 1
    skipped = json.loads(done.out)["skipped"]
    assert skipped["wds_decode: DecodeError"] > 0
    assert "skipped, such as: field 'jpg' of sample 'b" in done.err


def test_an_interrupt_prints_what_was_measured_and_leaves_no_worker(images: list[str]) -> None:
    command = [sys.executable, "-m", "wds_datapipes", "bench", *images, "--num-workers", "0,2", "--seconds", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as run:
        while len(_children_of(run.pid)) < 2:
            assert run.poll() is None
            time.sleep(0.02)
        children = _children_of(run.pid)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
    assert run.returncode == 130, (out, err)
    assert b"in one process" in out
    assert b"workers" in out
    assert err.decode().splitlines()[-1] == "Interrupted"
    while any(os.path.exists(f"/proc/{child}") for child in children):
        time.sleep(0.02)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
