"""What explaining and changing runs costs, as bench_state.py measures it."""

from __future__ import annotations

import gc
import statistics
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness.contest import Contender, Contest
from harness.datasets import SETS
from harness.processes import cost_of, in_child

from wds_datapipes import IndexedSamples, StatefulShards
from wds_datapipes.index import EpochOptions, Manifest, build_indexes
from wds_datapipes.index.order.sample_order import Order
from wds_datapipes.tools.runs.steps import RunSteps, StepSample
from wds_datapipes.types import ShardInfo

__all__ = ["runs"]

SHARDS, SAMPLES, STEP, GLOBAL_BATCH = 10**6, 10**4, 1_234_567, 4096
#: The orders of the large dataset, and their lanes.
ORDERS: Sequence[tuple[Order, int]] = (("global", 1), ("window", 1), ("window", 512))
BATCH, PHASES, EPOCH_SCALE = 64, 100, 10


def explain(pipe: Any, state: Any, found: list[StepSample]) -> None:
    found += RunSteps(pipe, state).samples(STEP, keys=False)


def explain_steps(order: Order, lanes: int, shards: int, rounds: int) -> list[tuple[float, float]]:
    """Return the processor time of explaining a step, in seconds, and the growth of memory, in MB, for each round."""
    manifest = Manifest(ShardInfo(f"s3://data/{n:07}.tar", samples=SAMPLES, bytes=10**9) for n in range(shards))

    def build() -> Any:
        return IndexedSamples(manifest, order=order, lanes=lanes, global_batch_size=GLOBAL_BATCH).batch(GLOBAL_BATCH)

    state, costs = StatefulShards(build(), seed=1).state_dict(), list[tuple[float, float]]()
    for _ in range(rounds):
        pipe = build()  # it keeps what it has computed
        gc.collect()
        found = list[StepSample]()
        cost = cost_of(partial(explain, pipe, state, found))
        costs.append((cost.cpu_s, cost.bytes / 1e6))
        if len({(each.shard, each.number) for each in found}) != GLOBAL_BATCH:
            raise AssertionError(f"the step has {len(found)} samples, not {GLOBAL_BATCH}")
    return costs


def mixture(parts: Sequence[Manifest], weights: Any) -> Any:
    datasets = dict(zip("ab", parts, strict=True))
    return IndexedSamples(datasets, weights=weights, global_batch_size=BATCH).batch(BATCH)


def contests(urls: Sequence[str]) -> list[Contest]:
    """Read an epoch with constant weights and with a schedule, and with all samples and without some."""
    parts = [Manifest(build_indexes([url])) for url in urls]
    whole = Manifest(build_indexes(urls))
    count = whole.counts.sum() // len(urls)
    equal = {"a": 1, "b": 1}
    schedule = [(0, {"a": 3, "b": 1}), (max(len(urls) * count // BATCH, PHASES), {"a": 1, "b": 3}, "linear")]

    def without(every: int) -> Any:
        keys = [f"{number:06d}" for number in range(every - 1, count - 1, every)]
        options = EpochOptions(exclude=keys)
        return StatefulShards(IndexedSamples(whole, global_batch_size=BATCH, epoch=options).batch(BATCH), seed=1)

    return [
        Contest(
            "Weights of two datasets",
            [
                Contender("constant", lambda: StatefulShards(mixture(parts, equal), seed=1)),
                Contender("changed 100 times", lambda: StatefulShards(mixture(parts, schedule), seed=1)),
            ],
            "constant",
            unit="step",
        ),
        Contest(
            "Exclusions",
            [
                Contender("none", lambda: without(count)),
                Contender("1 of 100 samples", lambda: without(100)),
                Contender("1 of 10 samples", lambda: without(10)),
            ],
            "none",
            unit="step",
        ),
    ]


def amended(urls: Sequence[str]) -> int:
    """Return the size of the state of a run that was amended often, in bytes."""
    parts = [Manifest(build_indexes([url])) for url in urls]
    state: Any = None
    for phase in range(PHASES):
        data = StatefulShards(mixture(parts, {"a": phase + 1, "b": 7}), seed=1)
        if state is not None:
            data.load_state_dict(state, amend=True)
        if next(iter(data), None) is None:  # an epoch was over
            next(iter(data))
        state = data.state_dict()
    return len(state["wds_datapipes"])


def runs(arguments: Namespace) -> dict[str, Any]:
    """Explain a step, read with changes, and amend a run."""
    shards = max(int(SHARDS * arguments.scale), 4096)
    explained = []
    for order, lanes in ORDERS:
        costs = in_child(explain_steps, order, lanes, shards, arguments.rounds)
        cpu, memory = statistics.median(each for each, _ in costs), max(each for _, each in costs)
        explained.append({"order": order, "lanes": lanes, "cpu_s": cpu, "grown_mb": memory, "costs": costs})
    urls = SETS["SMALL"].write(arguments.data, EPOCH_SCALE * arguments.scale)
    return {
        "shards": shards,
        "samples": SAMPLES,
        "batch": GLOBAL_BATCH,
        "explained": explained,
        "contests": [contest.run(arguments.rounds) for contest in contests(urls)],
        "phases": PHASES,
        "state_bytes": amended(urls),
    }
