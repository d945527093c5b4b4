"""What do workers on other hosts cost, compared with bare actors of Ray and with local workers?

    python benchmarks/bench_other_hosts.py --kinds BATCHES SMALL

It needs Ray, and measures nothing without it. Two nodes of a cluster on this machine stand for hosts: that of the
training process, and another one. They share its cores, and their network is that of one machine, so only ratios within
a round say something.

Each contender has two workers. Those of "bare actors" make the same items without a pipeline: 256 small samples for
each call, or a batch as arrays that Ray does not copy; as many calls are in flight as ours have. Such arrays are
read-only, and stay in the object store while they are used. "bare actors, tensors" return the tensors themselves. The
kinds of items are those of bench_transport.py. The loop reads a byte of each page of a batch. CPU is that of the
training process alone.

Crops are cut from JPEG images of 80 KB by local workers, and by as many actors on one node or on the other one. The
start of a loader, until its first item, is compared with that of empty actors: a worker imports torch and this package.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from typing import Any

from harness.questions import Question, answer, options
from measures.items import FAST
from measures.other_hosts import measure_crops, measure_deliveries, measure_starts, nodes


def other_hosts(arguments: Namespace) -> dict[str, Any]:
    """Measure deliveries, crops and starts."""
    if find_spec("ray") is None:
        print("Ray is not installed, so nothing is measured")
        return {}
    rounds, kinds, seconds, actors = arguments.rounds, arguments.kinds, arguments.seconds, arguments.actors
    if arguments.quick:
        kinds, seconds, actors = ["BATCHES"], 0.2, 1
    with nodes():
        return {
            "deliveries": measure_deliveries(rounds, kinds, seconds),
            "crops": measure_crops(rounds, arguments.data, arguments.scale, 4 * seconds),
            "starts": measure_starts(max(rounds // 2, 1), actors),
            "actors": actors,
        }


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=FAST, default=["BATCHES", "SMALL"], help="the kinds of items")
    parser.add_argument("--seconds", type=float, default=1.0, help="the duration of a measurement")
    parser.add_argument("--actors", type=int, default=16, help="the number of actors that start together")
    answer(parser, Question("other_hosts", other_hosts, 5))
