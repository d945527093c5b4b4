"""What every random stage does with its seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Seeded"]


class Seeded:
    """Holds the seed of a stage from when a loader sets it until the epoch begins."""

    _seed: int | None = None

    def set_seed(self, seed: int) -> Self:
        """Give the seed of the next epoch; loaders call this."""
        self._seed = seed
        return self

    def _take_seed(self) -> int:
        """Return the seed that was set for an epoch that begins, or else one from torch's generator."""
        seed, self._seed = self._seed, None
        return int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed
