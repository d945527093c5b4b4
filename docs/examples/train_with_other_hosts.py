"""Train with workers on another host, which dies: the weights are those of an undisturbed run with local workers.

Nodes of a Ray cluster on this machine stand for hosts. On a cluster of yours, call ``ray.init("auto")`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from wds_datapipes import RayReadingService, ShardList, ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

EPOCHS = 3


def train(service: Any, after_step: Callable[[int], None] | None = None) -> torch.nn.Linear:
    """Train a model, and call a function after each step."""
    samples = ShardList("data/train-{000..003}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    pipe = samples.shuffle_samples(50).wds_decode("torchl").to_tuple("png", "cls").batch(2).collate()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(7)
        for _ in range(EPOCHS):
            for images, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images.flatten(1)), labels).backward()
                optimizer.step()
                step += 1
                if after_step is not None:
                    after_step(step)
    return model


def main() -> None:
    """Train twice, and compare the weights."""
    node = {"object_store_memory": 200_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})  # no CPU here is for workers
    host = cluster.add_node(num_cpus=2, **node)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)

    def kill_host(step: int) -> None:
        if step == 5:
            cluster.remove_node(host, allow_graceful=False)
            cluster.add_node(num_cpus=2, **node)  # in time, the scheduler of a real cluster does this

    local = train(ShardReadingService(num_workers=2))
    remote = train(RayReadingService(num_workers=2, restart=True), kill_host)
    print("Same weights:", torch.equal(local.weight, remote.weight) and torch.equal(local.bias, remote.bias))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
