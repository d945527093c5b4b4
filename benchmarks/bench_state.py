"""What do states cost: to save and resume, merged from many ranks, and of runs that are explained and changed?

    python benchmarks/bench_state.py --only merged_state --ranks 512 --workers 8 --buffer 1000

**state**: Samples have 200 bytes of text and a class, in shards of 40,000 samples, and batches have 64 samples. The
loop stops in the middle of the epoch. Ours is ``DataLoader2`` with ``ShardReadingService``, after
``.shuffle_samples(n)``. The reference is torchdata's ``StatefulDataLoader`` with a webdataset pipeline, which has no
state: it resumes by rereading everything before the position, and in a different order, because its shuffle is not
seeded. The two alternate, in a different order in each round.

The table shows the size of the state in bytes, and the number of samples that wait in the shuffle buffer; the time that
``state_dict()`` takes, also relative to that of a batch; the share of their time that workers spend on recording their
position; and the time from ``load_state_dict()`` to the next batch, including the start of the workers. The gain is the
ratio of this time to that of the reference. Figures are medians, and ratios are computed within a round.

Batches of images, 64 x 3 x 224 x 224 decoded from JPEG files of 15 KB, are measured without a reference, to show the
cost relative to such a batch.

Workers take a snapshot after each batch, and send it with the changes to their buffers. The main process makes a state
of a snapshot on request.

**merged_state**: Each worker has a full shuffle buffer, from shards of 1,000 samples of about 100 kB, that it has read
for a while. The states are made without reading; then a process of its own merges them, or loads what was merged. The
table has the size for each waiting sample, the CPU time, and how much the memory of the process has grown.

**runs**:

- A step of a run over a million shards of 10,000 samples is explained, without keys, from a state and the dataset: the
  processor time, and by how much the memory grows at most.
- An epoch of 100,000 small samples is read with constant weights, and with a schedule that changes them 100 times; from
  all samples, and without some of them. They alternate in one process, and ratios are computed within a round.
- A run is amended 100 times, with other weights each time: the size of its state.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from random import Random
from typing import Any

from harness.processes import cost_of, in_child
from harness.questions import Question, answer, options
from measures.runs import runs
from measures.saving import state

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


def merged_state(arguments: Namespace) -> dict[str, Any]:
    """Measure merging and loading, each in a process of its own."""
    ranks, workers, buffer = 8 if arguments.quick else arguments.ranks, arguments.workers, arguments.buffer
    pipe = pipeline(buffer)
    parts = [make_part(seed, buffer) for seed in range(BUFFERS)]
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
    costs = {name: in_child(cost_of, action) for name, action in actions.items()}
    return {
        "ranks": ranks,
        "workers": workers,
        "bytes": len(merged[STATE]),
        "waiting": ranks * workers * buffer,
        "costs": {name: {"cpu_s": cost.cpu_s, "grown_mb": cost.bytes / 1e6} for name, cost in costs.items()},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=512, help="the ranks whose states are merged (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="the workers of each of these ranks (%(default)s)")
    parser.add_argument("--buffer", type=int, default=1000, help="the samples in the buffer of each (%(default)s)")
    answer(parser, Question("state", state, 5), Question("merged_state", merged_state), Question("runs", runs, 7))


if __name__ == "__main__":
    main()
