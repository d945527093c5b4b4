"""What does the merged state of many ranks cost a rank that saves it or loads it, with as many ranks or fewer?

    python benchmarks/bench_merged_state.py --ranks 512 --workers 8 --buffer 1000

Each worker has a full shuffle buffer, from shards of 1,000 samples of about 100 kB, that it has read for a while. The
states are made without reading; then a process of its own merges them, or loads what was merged. The table has the size
for each waiting sample, the CPU time, and how much the memory of the process has grown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from wds_datapipes import ShardList, merge_states
from wds_datapipes.epoch import Epoch
from wds_datapipes.loading.checkpoint.format import STATE, Checkpoint, WorkerState, checkpoints_in, state_of
from wds_datapipes.loading.checkpoint.resharding import state_of_rank
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.shards.position import SamplePosition, pack_positions
from wds_datapipes.types import Instance

#: The number of different buffers; making more takes long, and shows nothing else.
BUFFERS = 16


def pipeline(buffer_size: int) -> Any:
    urls = ShardList([f"train-{number:05}.tar" for number in range(20_000)]).shuffle().sharding_filter()
    return urls.load_wds_shards().group_samples().shuffle_samples(buffer_size)


def make_part(seed: int, buffer_size: int) -> WorkerState:
    """Return the state of a worker after six times as many samples as its buffer holds."""
    rng, held, end = Random(seed), list[SamplePosition](), 0
    for number in range(6 * buffer_size):
        shard, place = divmod(number, 1000)
        start = end if place else 0
        end = start + 1536 + 512 * round(rng.lognormvariate(0, 0.5) * 200)
        held.append(SamplePosition(shard, start, -1 if place == 999 else end))
        if len(held) > buffer_size:
            slot = rng.randrange(len(held))
            held[slot] = held[-1]
            held.pop()
    source = {"next": [shard + 1, 512, "a key"], "shard_list": [[20_000, "0123456789abcdef" * 2, "train-12345.tar"]]}
    shuffle = {"waiting": pack_positions(held), "draws": 5 * buffer_size, "buffer_size": buffer_size}
    return WorkerState.of([source, shuffle])


def cost_of(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the CPU time of an action in a process of its own, in seconds, and what it adds to its memory, in MB."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def measure() -> None:
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        kept = action()
        spent, after = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        del kept
        results.put((spent, (after - before) / 1024))

    process = context.Process(target=measure)
    process.start()
    found: tuple[float, float] = results.get()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--workers", type=int, default=8, help="of each rank")
    parser.add_argument("--buffer", type=int, default=1000, help="of each worker, in samples")
    parser.add_argument("--quick", action="store_true", help="use 8 ranks, as a smoke test")
    args = parser.parse_args()
    if args.quick:
        args.ranks = 8
    ranks, workers, pipe = args.ranks, args.workers, pipeline(args.buffer)
    parts = [make_part(seed, args.buffer) for seed in range(BUFFERS)]
    facts: dict[str, Any] = {"epoch": Epoch(1, 0, 1, 2), "stages": descriptions(pipe)}
    own = [[parts[(rank * workers + worker) % BUFFERS] for worker in range(workers)] for rank in range(ranks)]
    instances = [Instance(rank, ranks, workers=workers) for rank in range(ranks)]
    states = [state_of([Checkpoint(instance=each, parts=own[each.rank], **facts)]) for each in instances]
    merged = merge_states(states)

    def load(count: int) -> Any:
        rank = state_of_rank(checkpoints_in(merged), pipe, Instance(ranks=count, workers=workers))
        return [part.stages for part in rank.parts]

    actions: dict[str, Callable[[], Any]] = {
        "merge": lambda: merge_states(states),
        "load": lambda: load(ranks),
        "load on three quarters of the ranks": lambda: load(ranks * 3 // 4),
        "load on twice as many": lambda: load(ranks * 2),
    }
    size = len(merged[STATE])
    waiting = size / (ranks * workers * args.buffer)
    table = Table("", "CPU s", "MB", title=f"{size / 1e6:.1f} MB, {waiting:.2f} bytes for each waiting sample")
    for name, action in actions.items():
        spent_s, grown_mb = cost_of(action)
        table.add_row(name, f"{spent_s:.3f}", f"{grown_mb:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
