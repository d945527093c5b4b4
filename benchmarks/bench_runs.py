"""What does it cost to explain a step, to change weights by step, to leave samples out, and to amend a run often?

    python benchmarks/bench_runs.py --json runs.json --plot runs.png

- A step of a run over a million shards of 10,000 samples is explained, without keys, from a state and the dataset: the
  processor time, and by how much the memory grows at most.
- An epoch of 100,000 small samples is read with constant weights, and with a schedule that changes them 100 times; from
  all samples, and without some of them. They alternate in one process, and ratios are computed within a round.
- A run is amended 100 times, with other weights each time: the size of its state.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from contest import Contender, Contest, in_child, options, parse, plot_contests, write_report
from datasets import SETS, folder
from memory import in_use, peak, reset_peak
from rich.console import Console
from rich.table import Table

from wds_datapipes import IndexedSamples, StatefulShards
from wds_datapipes.index import EpochOptions, Manifest, build_indexes
from wds_datapipes.index.order.sample_order import Order
from wds_datapipes.tools.runs.steps import RunSteps
from wds_datapipes.types import ShardInfo

SHARDS, SAMPLES, STEP, GLOBAL_BATCH = 10**6, 10**4, 1_234_567, 4096
#: The orders of the large dataset, and their lanes.
ORDERS: Sequence[tuple[Order, int]] = (("global", 1), ("window", 1), ("window", 512))
BATCH, PHASES, EPOCH_SCALE = 64, 100, 10


def explain_steps(order: Order, lanes: int, shards: int, rounds: int) -> list[tuple[float, float]]:
    """Return the processor time of explaining a step, in seconds, and the growth of memory, in MB, for each round."""
    manifest = Manifest(ShardInfo(f"s3://data/{n:07}.tar", samples=SAMPLES, bytes=10**9) for n in range(shards))

    def build() -> Any:
        return IndexedSamples(manifest, order=order, lanes=lanes, global_batch_size=GLOBAL_BATCH).batch(GLOBAL_BATCH)

    state, costs = StatefulShards(build(), seed=1).state_dict(), list[tuple[float, float]]()
    for _ in range(rounds):
        pipe = build()  # it keeps what it has computed
        gc.collect()
        reset_peak()
        before, begun = in_use(), time.process_time()
        samples = RunSteps(pipe, state).samples(STEP, keys=False)
        costs.append((time.process_time() - begun, (peak() - before) / 1e6))
        if len({(each.shard, each.number) for each in samples}) != GLOBAL_BATCH:
            raise AssertionError(f"the step has {len(samples)} samples, not {GLOBAL_BATCH}")
    return costs


def mixture(parts: Sequence[Manifest], weights: Any) -> Any:
    datasets = dict(zip("ab", parts, strict=True))
    return IndexedSamples(datasets, weights=weights, global_batch_size=BATCH).batch(BATCH)


def contests(urls: Sequence[str], rounds: int) -> list[Contest]:
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

    found = [
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
    for contest in found:
        contest.run(rounds)
        contest.show()
    return found


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


def main() -> None:
    arguments = parse(options(__doc__, rounds=7))
    shards = max(int(SHARDS * arguments.scale), 4096)
    table = Table("order", "lanes", "CPU s", "MB", title=f"Explain a step of {SAMPLES * shards:.0e} samples")
    explained = []
    for order, lanes in ORDERS:
        costs = in_child(explain_steps, order, lanes, shards, arguments.rounds)
        cpu, memory = statistics.median(each for each, _ in costs), max(each for _, each in costs)
        explained.append({"order": order, "lanes": lanes, "cpu_s": cpu, "grown_mb": memory, "costs": costs})
        table.add_row(order, str(lanes), f"{cpu:.2f}", f"{memory:.0f}")
    Console().print(table)
    urls = SETS["SMALL"].write(folder(arguments.data), EPOCH_SCALE * arguments.scale)
    found, size = contests(urls, arguments.rounds), amended(urls)
    Console().print(f"A state of {PHASES} phases has {size:,} bytes")
    facts = {"shards": shards, "samples": SAMPLES, "batch": GLOBAL_BATCH, "explained": explained}
    facts |= {"contests": [contest.facts() for contest in found], "phases": PHASES, "state_bytes": size}
    write_report(arguments.json, facts)
    plot_contests(arguments.plot, found)


if __name__ == "__main__":
    main()
