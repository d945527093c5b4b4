"""What does it cost to move items: from stage to stage, and from a worker process to the training loop?

    python benchmarks/bench_transport.py --only delivery --workers 2 --kinds IMG

**delivery**: The sources are synthetic and cost almost nothing, so only delivery is measured:

- SMALL: samples of 200 B of text and a class, one by one;
- IMG: samples of 100 KB of bytes and a class, one by one;
- LISTS: lists of 64 such samples;
- ARRAY: samples of a tensor of 100 KB, cloned each time, and a class, one by one;
- BATCHES: a tensor of 64 x 3 x 224 x 224 bytes, cloned each time, and 64 labels.

The loop reads a byte of each page of the received tensors, and drops them. Each contender runs in a separate process,
forked after the imports and killed with its workers after the measurement. Contenders alternate. The rate is measured
after a warm-up of a third of a second. The time to the first item includes building the loader. Memory is the increase
of all processes together (PSS, which counts shared memory once) when prefetching has reached its limit.

Idle loaders are measured as well: how long the last sample before a pause of the pipeline takes, how many cores all
processes take while the loop waits for a worker or the workers for the loop, and the time to the first item from a
worker that is spawned.

**stages**: The same stage is chained 0 to 4 times after a source in memory. The slope of a line fitted to the times is
the cost of a stage. It does not include the source, whose cost differs between pipes and generators.

Results in µs per item: 0.02 for a plain generator, 0.11 for one of our pipes that yields its input, 0.32 for the same
pipe without our base class, and 0.6 for torch's ``.map``. With ``WDS_DATAPIPES_PATCHES=0``, the last two take 1.6 and
1.8. ``.map_dict`` (0.56), ``.rename`` (1.04) and ``.to_tuple`` (1.02) also create a new dict or tuple.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from harness.contest import Contender, Contest
from harness.questions import Question, answer, options
from measures.delivery import (
    LOADERS,
    OURS,
    REFERENCE,
    deliver,
    measure_delay,
    measure_in_turn,
    measure_waiting_loop,
    measure_waiting_workers,
)
from measures.items import FAST
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import Stage

Build = Callable[[list[Any], int], Iterable[Any]]
STAGES = range(5)


def same(item: Any) -> Any:
    return item


def forward(source: Iterable[Any]) -> Iterator[Any]:
    # Not `yield from`, because stages handle each item.
    for item in source:  # noqa: UP028  see above
        yield item


class Forwarder(Stage[Any]):
    """A stage implemented like those of this package."""

    is_stateless = True

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return forward(self.source)


class PlainForwarder(IterDataPipe[Any]):
    """A stage implemented as in torch's documentation."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from forward(self.source)


def generators(items: list[Any], stages: int) -> Iterable[Any]:
    result: Iterable[Any] = iter(items)
    for _ in range(stages):
        result = forward(result)
    return result


def pipes(stage: Callable[[Any, int], Any]) -> Build:
    """Return a function that chains a stage; ``stage`` receives the number of stages before it."""

    def build(items: list[Any], stages: int) -> Iterable[Any]:
        pipe: IterDataPipe[Any] = IterableWrapper(items, deepcopy=False)
        for number in range(stages):
            pipe = stage(pipe, number)
        return pipe

    return build


KINDS: dict[str, Build] = {
    "plain generator": generators,
    "our pipe, yields its input": pipes(lambda pipe, _: Forwarder(pipe)),
    "ours, .map_dict(cls=same)": pipes(lambda pipe, _: pipe.map_dict(cls=same)),
    "ours, .rename(one field)": pipes(lambda pipe, number: pipe.rename(**{"ba"[number % 2]: "ab"[number % 2]})),
    "ours, .to_tuple(two fields)": pipes(lambda pipe, number: pipe.to_tuple("a", "cls") if number == 0 else pipe),
    "pipe as documented by torch, yields its input": pipes(lambda pipe, _: PlainForwarder(pipe)),
    "torch .map(same)": pipes(lambda pipe, _: pipe.map(same)),
}
#: Yields tuples instead of samples, so it cannot be chained.
ONCE = "ours, .to_tuple(two fields)"


def contender(kind: str, items: list[Any], stages: int) -> Contender:
    return Contender(f"{kind} x {stages}", lambda: KINDS[kind](items, stages))


def slopes(contest: Contest) -> dict[str, tuple[list[float], float]]:
    """Return the best times of each kind of stage and the cost of one, in µs per item.

    A round takes only milliseconds, so an interruption distorts it; the best times are the most stable ones.
    """
    found = {}
    for kind in KINDS:
        counts = [0, 1] if kind == ONCE else list(STAGES)
        times = [1e6 / contest.result(f"{kind} x {count}").best_rate for count in counts]
        found[kind] = (times, float(np.polyfit(counts, times, 1)[0]))
    return found


def stages(arguments: Namespace) -> dict[str, Any]:
    """Measure chains of each kind of stage."""
    samples = [{"__key__": str(number), "a": b"text", "cls": number} for number in range(int(20_000 * arguments.scale))]
    contenders = [
        contender(kind, samples, count) for kind in KINDS for count in STAGES if kind != ONCE or count in (0, 1)
    ]
    contest = Contest("One more stage", contenders, f"{next(iter(KINDS))} x 0", unit="item", min_duration_s=0.0)
    contest.run(arguments.rounds)
    return {kind: {"us_per_item": times, "us_per_stage": slope} for kind, (times, slope) in slopes(contest).items()}


def delivery(arguments: Namespace) -> dict[str, Any]:
    """Measure each kind of items with each number of workers, and idle loaders."""
    names = [name for name in LOADERS if name == REFERENCE or arguments.loaders in name]
    rounds, kinds, workers, seconds = arguments.rounds, arguments.kinds, arguments.workers, arguments.seconds
    idle_names = names
    if arguments.quick:
        workers, seconds, kinds, idle_names = [1], 0.1, ["BATCHES"], [OURS, REFERENCE]
    deliveries: dict[str, Any] = {}
    for kind, number in itertools.product(kinds, workers):
        title = f"{kind}, {number} worker{'s' if number > 1 else ''}"
        found = deliveries[title] = measure_in_turn(title, names, rounds, deliver, kind, number, "fork", seconds)
        sizes = {name: {run.item_bytes for run in runs} for name, runs in found.items()}
        if len(set().union(*sizes.values())) != 1:
            raise AssertionError(f"{title}: the contenders delivered items of different sizes: {sizes}")
    waiting = {
        "ms delay": measure_delay,
        "cores, loop waits": measure_waiting_loop,
        "cores, workers wait": measure_waiting_workers,
    }
    idle = {title: measure_in_turn(title, idle_names, rounds, measure, "fork") for title, measure in waiting.items()}
    spawned = measure_in_turn("spawning", idle_names, max(rounds // 2, 1), deliver, "SMALL", 1, "spawn", 0)
    return {"deliveries": deliveries, "idle": idle, "spawned": spawned}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="numbers of worker processes")
    parser.add_argument("--seconds", type=float, default=0.7, help="the duration of a measurement")
    parser.add_argument("--kinds", nargs="+", choices=FAST, default=FAST, help="the kinds of items (all)")
    parser.add_argument(
        "--loaders", default="", help="run only the reference and loaders whose name contains this text"
    )
    answer(parser, Question("delivery", delivery, 5), Question("stages", stages, 25))


if __name__ == "__main__":
    main()
