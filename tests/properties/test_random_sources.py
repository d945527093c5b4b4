"""Sources drawn at random that share shards otherwise, or change: directories, and replaced shards.

The model and the loaders are those of the random pipelines.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawn_loaders import Run
from drawn_pipelines import Options, Topology, draw_indexed
from drawn_runs import run_on_ranks
from pipeline_model import Steps, flat, population, shards_of
from test_random_pipelines import write_in

from wds_datapipes.testing import build_shard

#: How many cases of each kind are drawn; `nox -s nightly` draws more.
CASES = 60 if os.environ.get("WHOLE_SWEEPS") else 4
LOADERS = ("DataLoader2", "StatefulShards", "DataLoader")


def draw_run(rng: Random, steps: Steps, epochs: int = 1) -> Run:
    loader = rng.choice(LOADERS)
    topology = Topology(rng.choice([1, 1, 2]), rng.choice([0, 1, 2, 3]))
    return Run(steps, loader, topology, None, rng.randrange(1000), Options(rng.choice([1, 10])), epochs)


def folder_of(tmp_path: Path, steps: Steps) -> Path:
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    folder.mkdir()
    write_in(folder, steps)
    return folder


def came(answers: object) -> Counter[object]:
    return Counter(each for answer in answers for epoch in answer.epochs for each in flat(epoch))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(CASES))
def test_processes_share_a_directory(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    sizes = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 12)))
    after = rng.choice(["keep", "delete"])
    source = ("directory", "a", sizes, rng.choice(["oldest", "random"]), after)
    steps: Steps = (source, ("load",), *((("shuffle_samples", 4, 2),) if rng.random() < 0.5 else ()), ("key",))
    folder = folder_of(tmp_path, steps)
    run = draw_run(rng, steps)
    found = Counter[object]()
    if rng.random() < 0.5:  # a loop that ends early returns the shard that it was reading
        whole = rng.randint(1, 12)
        alone: Steps = (source, ("load",), ("key",))
        first = run_on_ranks(
            replace(run, steps=alone, loader="pipeline", topology=Topology(1, 0), broken=whole), folder
        )
        left = {path.name for path in (folder / "a").glob("*.tar")}
        found = Counter(key for key in came(first).elements() if f"a-{str(key)[1:].partition('-')[0]}.tar" not in left)
    found += came(run_on_ranks(run, folder))
    assert found == population(steps)
    assert not [*(folder / "a").glob("*.tar")]
    done = sorted(path.name for path in (folder / "a" / "done").glob("*")) if after == "keep" else []
    assert done == (sorted(f"a-{shard}.tar" for shard in range(len(sizes))) if after == "keep" else [])


@pytest.mark.parametrize("seed", range(CASES))
def test_a_replaced_shard_is_not_read_by_its_old_index(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    sizes = tuple(rng.randint(1, 9) for _ in range(rng.choice([2, 4, 5, 6])))  # with a manifest
    (source,) = draw_indexed(rng, "a", sizes)
    steps: Steps = (source, ("key",))
    folder = folder_of(tmp_path, steps)
    number = rng.randrange(len(source[2]))
    path = folder / f"a-{number}.tar"
    before = path.stat()
    (samples,) = shards_of("b", (source[2][number],))  # of the same size, under other keys
    fields = [
        {**old, "__key__": new["__key__"]} for old, new in zip(shards_of("a", source[2])[number], samples, strict=True)
    ]
    build_shard(folder / "new.tar", fields)
    assert (folder / "new.tar").stat().st_size == before.st_size
    shutil.move(folder / "new.tar", path)
    if rng.random() < 0.5:  # as `cp -p` does
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    run = draw_run(rng, steps)
    message = ""
    try:
        found = came(run_on_ranks(run, folder))
    except RuntimeError as error:
        message = str(error)
    if message:
        assert "ChangedShardError" in message
    else:  # none of its samples belonged to the epoch
        assert not any(str(key).startswith((f"a{number}-", "b")) for key in found)
