"""Workers on the nodes of a Ray cluster, as bench_other_hosts.py measures them."""

from __future__ import annotations

import itertools
import os
import resource
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness.contest import in_turn
from harness.crops import BATCH
from harness.datasets import PHOTOGRAPHS
from loaders.ours import crops_of
from torchdata.dataloader2 import DataLoader2

from measures.items import KINDS, Source
from wds_datapipes import RayReadingService, ShardReadingService
from wds_datapipes.loading.transport.flow_control import CALLS_AHEAD, MAX_TOGETHER

__all__ = ["BARE", "LOCAL", "OURS", "TENSORS", "measure_crops", "measure_deliveries", "measure_starts", "nodes"]

BARE, TENSORS, OURS, LOCAL = "bare actors", "bare actors, tensors", "RayReadingService", "ShardReadingService"
#: Where actors run: on the node of the training process, and on another one. The names are resources of the nodes.
PLACES = {"near": "one node", "far": "two nodes"}
WORKERS = 2
WARM_UP_S = 0.4
STORE_BYTES = 400_000_000


class Run(NamedTuple):
    """What a loop has received, and what that took.

    Attributes:
        samples_per_s: the samples per second.
        cpu_us: the CPU time of the training process for a sample, in µs.
    """

    samples_per_s: float
    cpu_us: float


@contextmanager
def nodes() -> Iterator[None]:
    """Run a cluster of two nodes on this machine. Actors get the priority of this process, as on hosts of their own."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_worker_niceness="0")
    cluster: Any = Cluster()
    for place in PLACES:
        options = {"object_store_memory": STORE_BYTES, "include_dashboard": False, "resources": {place: 100}}
        cluster.add_node(num_cpus=32, **options)
    folders = [Path(__file__).parents[1], Path(__file__).parents[2]]
    variables = {"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, folders))}}
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, runtime_env=variables)
    yield
    ray.shutdown()
    cluster.shutdown()


class Maker:
    """A bare actor, which makes the same items as a worker, without a pipeline."""

    def __init__(self, kind: str, *, tensors: bool) -> None:
        torch.set_num_threads(1)
        self.items, self.tensors = KINDS[kind].items(), tensors

    def make(self) -> Any:
        """Return a batch, as arrays that Ray does not copy or as tensors, or a list of samples."""
        first = next(self.items)
        if isinstance(first, tuple):
            return first if self.tensors else tuple(each.numpy() for each in first)
        return [first, *itertools.islice(self.items, MAX_TOGETHER - 1)]


def bare(kind: str, place: str, *, tensors: bool = False) -> Iterator[Any]:
    """Yield the items of bare actors in turn, with as many calls in flight as our service has."""
    import ray

    options: dict[str, Any] = {"num_cpus": 1, "resources": {place: 1}}
    actors: list[Any] = [ray.remote(Maker).options(**options).remote(kind, tensors=tensors) for _ in range(WORKERS)]
    calls = [deque(actor.make.remote() for _ in range(CALLS_AHEAD)) for actor in actors]
    try:
        for number in itertools.cycle(range(WORKERS)):
            found: Any = ray.get(calls[number].popleft())
            calls[number].append(actors[number].make.remote())
            if isinstance(found, list):
                yield from found
            else:
                yield found
    finally:
        for actor in actors:
            ray.kill(actor)


def loaded(pipe: Any, service: Any) -> Iterator[Any]:
    """Yield the items of a loader; each worker makes all of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* read all of .*, because no stage splits it")
        with DataLoader2(pipe, reading_service=service) as loader:
            yield from loader


def remote(place: str, workers: int = WORKERS) -> RayReadingService:
    return RayReadingService(workers, worker_options={"resources": {place: 1}})


def measure(items: Iterable[Any], samples: int, seconds: float) -> Run:
    """Take items for a while, and read a byte of each page of their tensors."""
    running = iter(items)
    next(running)
    end = time.perf_counter() + WARM_UP_S
    for _ in running:
        if time.perf_counter() > end:
            break
    count, used_s, begin = 0, cpu_s(), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        item = next(running)
        if isinstance(item, tuple):
            np.asarray(item[0]).reshape(-1)[::4096].sum()
        del item
        count += samples
    took_s, used_s = time.perf_counter() - begin, cpu_s() - used_s
    getattr(running, "close", lambda: None)()
    return Run(count / took_s, 1e6 * used_s / count)


def cpu_s() -> float:
    """Return the CPU time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ours(kind: str, place: str) -> Iterator[Any]:
    return loaded(Source(kind), remote(place))


def local(kind: str, place: str) -> Iterator[Any]:  # noqa: ARG001  as the others
    return loaded(Source(kind), ShardReadingService(WORKERS))


CONTENDERS: dict[str, Callable[[str, str], Iterator[Any]]] = {
    BARE: bare,
    TENSORS: partial(bare, tensors=True),
    OURS: ours,
    LOCAL: local,
}


def measure_contender(name: str, kind: str, place: str, seconds: float) -> Run:
    return measure(CONTENDERS[name](kind, place), KINDS[kind].samples, seconds)


def measure_deliveries(rounds: int, kinds: Iterable[str], seconds: float) -> dict[str, dict[str, list[Run]]]:
    """Measure bare actors, ours and local workers in turn."""
    found = {}
    for kind, (place, title) in itertools.product(kinds, PLACES.items()):
        names = [name for name in CONTENDERS if kind == "BATCHES" or name != TENSORS]
        measures = {name: partial(measure_contender, name, kind, place, seconds) for name in names}
        found[f"{kind}, {title}"], _ = in_turn(f"{kind}, {title}", measures, rounds)
    return found


def measure_crops(rounds: int, data: Path, scale: float, seconds: float) -> dict[str, dict[str, list[Run]]]:
    """Measure batches of crops of JPEG images, with local workers and with as many actors on this node and another."""
    urls = PHOTOGRAPHS["IMG"].write(data, scale, multiple=BATCH)

    def crops(service: Callable[[], Any]) -> Run:
        return measure(loaded(crops_of(urls * 100), service()), BATCH, seconds)

    found = {}
    for place, title in PLACES.items():
        services = {LOCAL: partial(ShardReadingService, WORKERS), OURS: partial(remote, place)}
        measures = {name: partial(crops, service) for name, service in services.items()}
        found[title], _ = in_turn(f"JPEG to crops, {title}", measures, rounds)
    return found


class Empty:
    """An actor that does nothing."""

    def answer(self) -> int:
        return 1


def measure_starts(rounds: int, actors: int) -> dict[str, list[float]]:
    """Measure the seconds until the first item of a loader, and until empty actors have answered."""
    import ray

    def start_empty() -> float:
        begin = time.perf_counter()
        running: list[Any] = [ray.remote(Empty).options(num_cpus=1).remote() for _ in range(actors)]
        ray.get([each.answer.remote() for each in running])
        took_s = time.perf_counter() - begin
        for each in running:
            ray.kill(each)
        return took_s

    def start_loader() -> float:
        begin = time.perf_counter()
        with DataLoader2(Source("SMALL"), reading_service=RayReadingService(actors)) as loader:
            next(iter(loader))
            return time.perf_counter() - begin

    found, _ = in_turn(f"{actors} actors", {"empty actors": start_empty, OURS: start_loader}, rounds)
    return found
