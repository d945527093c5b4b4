"""How fast do batches arrive from the processes of a cluster, and what does a task cost?

    python benchmarks/bench_cluster.py --json cluster.json

Shards of JPEG files of 400 x 300 pixels are decoded, cropped to 224 x 224 and batched by two processes: workers of the
loader, or `.process_shards()` on a ProcessPoolExecutor or on a Dask cluster of this machine. All of them deliver the
same batches. The next contest decodes nothing: its tasks return random bytes, so only their delivery costs time. The
last one returns nothing: it shows what a task costs.

Results on two idle cores: Dask has 0.67 times the rate of the workers, and the pool 0.73. One trainer process receives
0.7 GB/s from Dask, limited by copying in memory, and 2.5 GB/s from the pool. The overhead of a task is 5 ms with Dask,
and 0.3 ms with the pool.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import torch
from contest import Contender, Contest, options, parse, plot_contests, write_report
from datasets import folder, photograph
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import CenterCrop, ImageDecoder, ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

PROCESSES = 2
WORKERS, POOL, DASK = "workers of the loader", "ProcessPoolExecutor", "Dask"
DECODER = ImageDecoder("torchrgb8", crop=CenterCrop(224))
#: The bytes that a task returns, as of four batches of 64 images of 224 x 224 pixels.
PAYLOAD = 4 * 64 * 3 * 224 * 224


def decoded(pipe: IterDataPipe[str]) -> IterDataPipe[Any]:
    """Return batches of images and classes."""
    samples = pipe.load_wds_shards().group_samples().wds_decode(DECODER)
    batches: IterDataPipe[Any] = samples.to_tuple("jpg", "cls").batch(64).collate()
    return batches


def decoded_shard(urls: list[str]) -> IterDataPipe[Any]:
    """Return the batches of a shard."""
    return decoded(ShardList(urls))


def payload(size: int, _urls: list[str]) -> IterDataPipe[Any]:
    """Return one item of a number of bytes, which nothing has computed."""
    return IterableWrapper([torch.empty(size, dtype=torch.uint8)], deepcopy=False)


def from_workers(urls: list[str]) -> Iterable[Any]:
    """Yield batches from workers of the loader."""
    loader: DataLoader2[Any] = DataLoader2(
        decoded(ShardList(urls).sharding_filter()), reading_service=ShardReadingService(PROCESSES)
    )
    with loader:
        yield from loader


def processed(executor: Executor, build: Callable[[list[str]], IterDataPipe[Any]], urls: list[str]) -> Any:
    """Return the items of the tasks of an executor."""
    return ShardList(urls).process_shards(build, executor=executor, prefetch_shards=PROCESSES + 1)


def images_in(batch: Any) -> int:
    """Return the number of bytes in the images of a batch."""
    return int(batch[0].nbytes)


def write_shards(where: Path, shards: int, samples: int) -> list[str]:
    """Write shards of synthetic photographs."""
    where.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    images = [photograph(random, 400, 300) for _ in range(16)]
    urls = [str(where / f"cluster-{shard:02d}.tar") for shard in range(shards)]
    for url in urls:
        build_shard(url, [{"__key__": f"{n:06d}", "jpg": images[n % 16], "cls": b"1"} for n in range(samples)])
    return urls


def main() -> None:
    """Run the three contests on a pool of processes and on a Dask cluster."""
    arguments = parse(options(__doc__, rounds=5))
    urls = write_shards(folder(arguments.data), 8, max(64, int(256 * arguments.scale)))
    tasks = [str(number) for number in range(max(4, int(40 * arguments.scale)))]
    cluster = distributed.LocalCluster(n_workers=PROCESSES, threads_per_worker=1, dashboard_address=":0")
    with (
        ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("forkserver")) as pool,
        cluster,
        distributed.Client(cluster) as client,
        client.get_executor(pure=False) as dask,
    ):
        executors: dict[str, Executor] = {POOL: pool, DASK: dask}

        def contenders(build: Callable[[list[str]], IterDataPipe[Any]], over: list[str]) -> list[Contender]:
            return [
                Contender(name, partial(processed, executor, build, over), len) for name, executor in executors.items()
            ]

        contests = [
            Contest(
                "Decode, crop, batch",
                [
                    Contender(WORKERS, partial(from_workers, urls), images_in),
                    *(
                        Contender(name, partial(processed, executor, decoded_shard, urls), images_in)
                        for name, executor in executors.items()
                    ),
                ],
                WORKERS,
                "batch",
            ),
            Contest("Deliver 38 MB per task", contenders(partial(payload, PAYLOAD), tasks), POOL, "task"),
            Contest("Tasks that return nothing", contenders(partial(payload, 0), tasks), POOL, "task"),
        ]
        for contest in contests:
            contest.run(arguments.rounds)
            contest.show()
    write_report(arguments.json, [contest.facts() for contest in contests])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
