"""The seed of a loader: set on its generator, or drawn for each epoch if the loader has none."""

from __future__ import annotations

import threading
from typing import Any

import torch

from wds_datapipes.seeds import seed_of

#: The last seed drawn in each thread, for a loader without a seed.
_drawn = threading.local()


def seed_loader(seed_generator: Any, seed: int, rank: int | None = None) -> None:
    """Set the seed of a loader's generator, unless it has this seed.

    Args:
        seed_generator: the generator.
        seed: the seed.
        rank: the rank of this process, if another reading service has seeded the ranks.
    """
    if seed_of(seed_generator) != seed:
        seed_generator.seed(seed)
        if rank is not None:
            seed_generator.spawn(rank, inplace=True)


def draw_seed() -> int:
    """Draw the seed of an epoch from torch's generator, for a loader without a seed."""
    _drawn.seed = int(torch.randint(-(2**63), 2**63 - 1, ()).item()) + 2**63
    return int(_drawn.seed)


def is_drawn(seed_generator: Any) -> bool:
    """Whether the seed of a generator was just drawn, because its loader has none."""
    return seed_of(seed_generator) == getattr(_drawn, "seed", None)
