"""An epoch of a run: its number and its seed, and those of the other epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.received_epochs import NONE_RECEIVED, Left, ReceivedEpochs
from wds_datapipes.seeds import SeedGenerator, derived_seed

#: The fields of an epoch that are numbers.
NUMBERS = "first", "number", "seed", "next", "wanted"


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of a run. The seed of a loader is that of epoch 0, and each of the others follows from the previous one.

    Loaders keep this record, send it to their workers and store it in states, and stages receive it. The seeds equal
    those of torchdata, whose generator (Philox) is the same in every release of Python and torch.

    Attributes:
        first: the seed of epoch 0.
        number: the number of this epoch; -1 before epoch 0.
        seed: the seed of this epoch.
        next: the seed of the next epoch, unless the loader is seeded or an epoch is selected first; None if the loader
            has no seed.
        wanted: the number selected for the next epoch, or None.
        received: the epochs that the loop has received, up to this one.
    """

    first: int = 0
    number: int = -1
    seed: int = 0
    next: int | None = None
    wanted: int | None = None
    received: ReceivedEpochs = NONE_RECEIVED

    @classmethod
    def before(cls, seed: int, wanted: int | None = None) -> Epoch:
        """Return what precedes epoch 0 of a run with a seed."""
        return cls(seed, -1, seed, seed, wanted)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Epoch:
        """Create an epoch from the result of `state_dict`.

        Raises:
            ValueError: it is the result of something else.
        """
        numbers = [state[name] for name in NUMBERS]
        if not all(each is None or (type(each) is int and -1 <= each < 1 << 64) for each in numbers):
            raise ValueError(f"the numbers of an epoch are {numbers!r:.200}")
        return cls(**{**state, "received": ReceivedEpochs.of(state["received"])})

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch as plain values."""
        return {**{name: getattr(self, name) for name in NUMBERS}, "received": self.received.rows}

    def follow(self, seed: int, left: Left = None) -> Epoch:
        """Return the epoch that follows this one, or the first one of another run.

        Args:
            seed: the seed of the loader, the same on all ranks, so that they count the same epochs even if only rank 0
                was seeded.
            left: how the loop has left this epoch.
        """
        first, number, received = seed, 0, NONE_RECEIVED
        if self.next is not None and self.precedes(seed):
            first, number, seed, received = self.first, self.number + 1, self.next, self.received.leave(left)
        if self.wanted is not None:
            number, seed = self.wanted, selected_seed(first, self.wanted)
        return Epoch(first, number, seed, seed_after(seed), None, received.begin(number))

    def precedes(self, seed: int) -> bool:
        """Whether a loader with a seed continues this run; another reading service may have drawn from the seed."""
        return self.next is not None and seed in (self.next, seed_after(self.next))

    def check_selected(self, number: int | None) -> None:
        """Check that the selected epoch is this one, in which a run resumes.

        Raises:
            StateError: another epoch was selected.
        """
        if number not in (None, self.number):
            raise StateError(
                f"set_epoch({number}) was called, but the state was saved in the middle of epoch {self.number}. To "
                f"resume that epoch, call set_epoch({self.number}), or do not call set_epoch before it"
            )

    @property
    def is_selected(self) -> bool:
        """Whether ``set_epoch`` has selected this epoch."""
        return self.number >= 0 and self.seed == selected_seed(self.first, self.number)

    @property
    def expected_next(self) -> int | None:
        """The seed of the next epoch if ``set_epoch`` selects it as it selected this one; None if it is unknown."""
        return selected_seed(self.first, self.number + 1) if self.next is not None and self.is_selected else self.next

    def seed_of(self, number: int) -> int:
        """Return the seed of any epoch of the run.

        Raises:
            StateError: this epoch was selected by ``set_epoch``, but the first was not, so the seeds of others are
                unknown.
        """
        if number == self.number:
            return self.seed
        if self.is_selected:
            return selected_seed(self.first, number)
        seeds = [self.first]
        while len(seeds) <= max(number, self.number):
            seeds.append(seed_after(seeds[-1]))
        if self.number >= 0 and seeds[self.number] != self.seed:
            raise StateError(
                f"The seeds of this run are known for epoch {self.number} only, which set_epoch({self.number}) has "
                f"selected: epoch {number} depends on the calls of set_epoch"
            )
        return seeds[number]

    def without_record(self) -> Epoch:
        """Return the epoch without the record of what the loop has received."""
        return replace(self, received=NONE_RECEIVED)


#: No epoch has begun, and the seed is unknown.
NO_EPOCH = Epoch()


def seed_after(seed: int) -> int:
    """Return the seed of the epoch after one that ``set_epoch`` did not select."""
    return SeedGenerator(seed).generate_shared_seed()


def selected_seed(first: int, number: int) -> int:
    """Return the seed of an epoch that ``set_epoch`` selects in a run."""
    return derived_seed("epoch", first, number)
