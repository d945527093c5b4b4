"""A real Ray cluster on this machine, whose nodes stand for hosts, and pipelines for its workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from loader_kinds import Service
from pipeline_table import draw_beside, key_of

from wds_datapipes import RayReadingService, ShardList
from wds_datapipes.testing import build_shard

#: The memory of the object store of each node, in bytes.
STORE_BYTES = 200_000_000
#: What the workers import besides the package.
FOLDERS = [Path(__file__).parents[2], *(Path(__file__).parents[1] / name for name in ("support", "properties"))]
#: Long enough for any step on a busy machine, in seconds; only a hang takes longer.
LIMIT_S = 120.0


class Remote(Service):
    """A `DataLoader2` with a `RayReadingService`."""

    @staticmethod
    def service() -> Any:
        return RayReadingService


class Hosts:
    """A cluster of a node for the training process and two others for workers, which tests may kill."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ.update(RAY_worker_niceness="0")  # by default, workers yield to all else that this machine does
        self.ray: Any = ray
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=self._options(0))
        self._nodes: dict[str, Any] = {}
        self.start()
        paths = os.pathsep.join(map(str, FOLDERS))
        ray.init(address=self.cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})

    @staticmethod
    def _options(cpus: int, **resources: int) -> dict[str, Any]:
        return {
            "num_cpus": cpus,
            "object_store_memory": STORE_BYTES,
            "resources": resources,
            "include_dashboard": False,
        }

    def start(self) -> None:
        """Start the nodes that do not run, ``a`` and ``b``."""
        for name in {"a", "b"} - self._nodes.keys():
            self._nodes[name] = self.cluster.add_node(**self._options(4, **{name: 100}))

    def kill(self, name: str) -> None:
        """Kill a node, and all that runs on it and lies in its store."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def actors(self) -> list[psutil.Process]:
        """Return the processes of the workers."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RemoteWorker"):
                    found.append(process)
        return sorted(found, key=lambda each: each.pid)

    def await_idle(self) -> None:
        """Wait until no worker is left, and no object."""
        deadline = time.monotonic() + LIMIT_S
        while (left := self.used()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left

    def used(self) -> dict[str, float]:
        """Return the CPUs that workers hold, the bytes that objects take, and the processes of workers."""
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        used = {name: total.get(name, 0) - free.get(name, 0) for name in ("CPU", "object_store_memory")}
        return {name: amount for name, amount in (*used.items(), ("processes", len(self.actors()))) if amount}

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()


def running_hosts() -> tuple[Any, Any]:
    """Return fixtures of a module: a cluster, if Ray is installed, and its hosts, on which a test leaves nothing."""

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Hosts]:
        pytest.importorskip("ray")
        running = Hosts()
        yield running
        running.close()

    @pytest.fixture
    def hosts(cluster: Hosts) -> Iterator[Hosts]:
        cluster.start()
        yield cluster
        cluster.start()
        cluster.await_idle()

    return cluster, hosts


def kill(process: psutil.Process) -> None:
    """Kill a process, and wait for its end."""
    with suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait()


def write_shards(shards: int, samples: int) -> None:
    """Write shards with samples whose size varies."""
    for shard in range(shards):
        named = [(f"{shard}-{number}", f"{number}") for number in range(samples)]
        build_shard(f"{shard}.tar", [{"__key__": key, "cls": n, "txt": "x" * (7 * int(n) % 60)} for key, n in named])


def samples(shards: int) -> Any:
    pipe = ShardList([f"{number}.tar" for number in range(shards)]).shuffle().sharding_filter()
    return pipe.load_wds_shards().group_samples().shuffle_samples(20)


def keys(shards: int) -> Any:
    return samples(shards).map(key_of)


def drawn(shards: int) -> Any:
    """A pipeline that draws numbers for each sample."""
    return samples(shards).map(key_of).map_samples_with_rng(draw_beside)


def arrays(shards: int) -> Any:
    """A pipeline of items that are too large for a reply, so that they lie in the object store of a host."""
    return samples(shards).map(with_array)


def stream(shards: int) -> Any:
    """A pipeline whose epochs do not end with the shards."""
    return samples(shards).map(key_of).with_epoch(50)


def replayed(shards: int) -> Any:
    """A pipeline without a position, which resumes by replay."""
    return samples(shards).map(key_of).batch(3).unbatch()


def with_array(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "array": np.full(50_000, int(sample["cls"]), np.int64)}


def poisoned(key: str) -> str:
    """End the process at one of the samples."""
    if key == "2-17":
        os._exit(7)
    return key


def fail(key: str) -> str:
    if key == "2-17":
        raise ValueError(f"the sample {key} is odd")
    return key


def failing(shards: int) -> Any:
    return keys(shards).map(fail)


def hang(key: str) -> str:
    if key == "2-17":
        time.sleep(1000)
    return key


def large(shards: int, size: int) -> Any:
    """A pipeline of arrays of one size, in bytes."""
    return samples(shards).map(partial(with_size, size))


def with_size(size: int, sample: dict[str, Any]) -> Any:
    return np.full(size, int(sample["cls"]), np.uint8)


def count_made(item: Any) -> Any:
    """Count an item in a file, which has a byte for each."""
    with open("made", "ab") as file:
        file.write(b".")
    return item
