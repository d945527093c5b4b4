"""What grows with the size of the data, the length of training, and the number of workers and hosts?

    python benchmarks/bench_scale.py --only growth

**growth**. Each measurement runs in a separate process:

- Skipping: ``select_files`` selects only the last member of shards with 10,000 to 100,000 small ones. The time per
  member should not depend on the number of earlier members, and skipped members should take no memory.
- Lists of 100,000 and 1,000,000 shards: the time to create the list and yield its first URL, and the memory per URL.
- An epoch of ten million samples, from 250 shards and two workers: the memory of all processes, and the size of a
  state, at ten points.
- States of a loader with two workers and a list of 100 to 1,000,000 shards.
- A shard cache with 1,000 to 100,000 copies: the time to find a copy, and that of a download which has to evict one.
- ``.cache_samples()`` with 10,000 and 100,000 samples: the time per sample, without and with the cache.
- 1 to 16 workers that decode IMG, crop and batch, against webdataset's WebLoader in alternating rounds: samples per
  second, and the memory of a worker. Beyond the number of cores, which is the limit, the rate should not fall.

**hosts**: What a run on 64 hosts costs each of them, counted without hosts: orders, caches, lengths, lists and
manifests. Real processes start, agree, change epochs and resume. The rest is computed: the code of the package finds
what some of 512 ranks with 8 workers read of 20,000 shards of 5,000 samples, with 64 samples for a rank and step. Times
are those of one process, in CPU seconds, but for processes that start. The first column has what was measured before;
the last one is the goal. ``bench_state.py --only merged_state`` has the sizes of states.
"""

from __future__ import annotations

import os
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.contest import in_turn
from harness.datasets import PHOTOGRAPHS, Fields, write_shard
from harness.processes import in_child
from harness.questions import Question, answer, options
from loaders.process import measure
from loaders.table import OURS, REFERENCE
from measures.growth import LISTERS, READERS, cache_samples, copies, epoch, list_shards, skip, state_of
from measures.hosts import hosts

MEMBERS = (10_000, 30_000, 100_000)
LISTS = (100_000, 1_000_000)
EPOCH_SHARDS, SHARD_SAMPLES = 250, 40_000
STATES = (100, 10_000, 1_000_000)
COPIES = (1_000, 10_000, 100_000)
CACHED = (10_000, 100_000)
WORKERS = (1, 2, 4, 8, 16)


def shard(data: Path, samples: int) -> str:
    """Write a shard of small samples, unless it exists; the key of the last one is "last"."""
    path = data / f"skip-{samples}.tar"
    if not path.exists():
        fields: Fields = {"txt": b"x" * 100}
        write_shard(path, ((key, fields) for key in [*(f"{index:08d}" for index in range(1, samples)), "last"]))
    return str(path)


def measure_reading(data: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return the medians of skipping and of long lists."""
    sizes, lists = _scaled(MEMBERS, scale), _scaled(LISTS, scale)
    skipped = {
        reader: {size: [in_child(skip, reader, shard(data, size), size) for _ in range(rounds)] for size in sizes}
        for reader in READERS
    }
    listed = {
        lister: {size: [in_child(list_shards, lister, size) for _ in range(rounds)] for size in lists}
        for lister in LISTERS
    }
    return {"skipping": _medians(skipped), "listing": _medians(listed)}


def measure_state(data: Path, scale: float, rounds: int) -> dict[str, Any]:
    """Return the points of an epoch, and the medians for states and caches."""
    size, shards = _scaled([SHARD_SAMPLES], scale)[0], max(4, int(EPOCH_SHARDS * min(1.0, scale)))
    path = shard(data, size)
    state = {length: [in_child(state_of, path, length) for _ in range(rounds)] for length in _scaled(STATES, scale)}
    copied = {number: [in_child(copies, number) for _ in range(rounds)] for number in _scaled(COPIES, scale)}
    cached = {
        number: [in_child(cache_samples, shard(data, number), number) for _ in range(rounds)]
        for number in _scaled(CACHED, scale)
    }
    return {
        "epoch": in_child(epoch, path, shards, size),
        **_medians({"states": state, "copies": copied, "cached": cached}),
    }


def measure_workers(data: Path, scale: float, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Return the samples per second, and the bytes of a worker, by loader and number of workers."""
    images = PHOTOGRAPHS["IMG"]._replace(shards=max(WORKERS), samples=192)
    urls = images.write(data, scale, multiple=64)
    samples = images.shards * 64 * max(1, round(images.samples * scale / 64))
    measures = {
        (name, workers): partial(measure, name, urls, workers, samples, None)
        for workers in (WORKERS if scale > 0.1 else WORKERS[:1])
        for name in (REFERENCE, OURS)
    }
    found, _ = in_turn("workers", measures, rounds)
    runs: dict[str, dict[int, list[tuple[float, float]]]] = {OURS: {}, REFERENCE: {}}
    for (name, workers), some in found.items():
        runs[name][workers] = [(run.samples_per_s, run.worker_memory) for run in some]
    return _medians(runs)


def _scaled(sizes: Sequence[int], scale: float) -> list[int]:
    return [max(200, int(size * min(1.0, scale))) for size in sizes] if scale < 1 else list(sizes)


def _medians(runs: Mapping[Any, Mapping[Any, Sequence[Sequence[float]]]]) -> dict[Any, dict[Any, list[float]]]:
    """Return the medians of the columns of all rounds."""
    return {
        name: {key: [statistics.median(column) for column in zip(*rounds, strict=True)] for key, rounds in by.items()}
        for name, by in runs.items()
    }


def growth(arguments: Namespace) -> dict[str, Any]:
    """Measure all kinds of growth."""
    data, scale, rounds = arguments.data, arguments.scale, arguments.rounds
    facts = measure_reading(data, scale, rounds) | measure_state(data, scale, rounds)
    return facts | {"cores": os.cpu_count(), "workers": measure_workers(data, scale, rounds)}


if __name__ == "__main__":
    answer(options(__doc__), Question("growth", growth, 3), Question("hosts", hosts))
