"""The share of an instance in an epoch of indexed samples: the positions that it reads, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from wds_datapipes.index.order.batch_share import WHOLE_EPOCH, BatchShare, RestOfEpoch, rest_of_epoch
from wds_datapipes.pipes.instance import instance_in
from wds_datapipes.pipes.samples.indexed_phases import PhasedSamples
from wds_datapipes.pipes.sharding import SplittingStage
from wds_datapipes.pipes.stage import SnapshotStage
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import Resharding, SamplePosition
from wds_datapipes.types import Instance, Sample


class SharedSamples(PhasedSamples, SplittingStage[Sample], SnapshotStage[Sample]):
    """Splits each global batch of an epoch between ranks, and the batches of a rank between its workers.

    The state of an instance is the number of samples that it has yielded. With other ranks or workers, all instances
    share the rest of the epoch.
    """

    has_position = True
    can_reshard = True

    _rest: RestOfEpoch  # the part of the epoch that the instances share
    _done: int  # how many samples of its share this instance has yielded
    _position: int  # that of the last of them

    def keeps_share(self) -> bool:
        """Whether every pass has the same shares: those of batches are fixed."""
        return True

    def is_even(self) -> bool:
        """Whether the ranks stay in step."""
        return not self._leaves_holes

    @property
    def _leaves_holes(self) -> bool:
        """Whether it leaves out samples that are excluded or cannot be read, instead of replacing them."""
        return self.remainder == "keep" and (self.on_error != "raise" or bool(self.exclusions))

    def __len__(self) -> int:
        """Return the number of samples of an epoch in this process."""
        if self._leaves_holes:
            what = "exclude=" if self.exclusions else f"on_error={self.on_error!r}"
            raise TypeError(f"IndexedSamples has no length, because {what} may skip samples")
        return len(self._share())

    def _share(self, rest: RestOfEpoch = WHOLE_EPOCH) -> BatchShare:
        """Return the share of this instance in the rest of an epoch."""
        return self._share_of(self._instance, rest)

    @property
    def _instance(self) -> Instance:
        return instance_in(self.groups)

    def _share_of(self, instance: Instance, rest: RestOfEpoch) -> BatchShare:
        return BatchShare(self._count, self.batch_of(instance.ranks), self.remainder, instance, rest, self.lanes)

    def _share_in(self, instance: Instance, rest: RestOfEpoch, states: Sequence[Mapping[str, Any]]) -> BatchShare:  # noqa: ARG002
        """Return the share of an instance in the rest of an epoch, of which there are some states."""
        return self._share_of(instance, rest)

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the position of the last sample yielded."""
        return lambda: SamplePosition(0, self._position, self._position + 1)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of samples that this instance has yielded in the epoch, and the number of ranks."""
        done, rest, _ = self._loaded or (self._done, self._rest, NONE_AWAITED)
        state: dict[str, Any] = {"yielded": done, "ranks": self._instance.ranks}
        if rest != WHOLE_EPOCH:
            state["rest"] = rest.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`, or ``{}`` if only the samples of ``again`` remain.
            again: the samples that later stages have buffered; they are yielded first.
        """
        rest = RestOfEpoch.from_state(state.get("rest"))
        self._loaded = state.get("yielded", 0), rest, again

    def is_alike_on_ranks(self, state: Mapping[str, Any], instance: Instance) -> bool:
        """Whether the same worker on every rank has this state; the position in the epoch determines it."""
        share = self._share_in(instance, RestOfEpoch.from_state(state.get("rest")), [state])
        return share.is_alike_on_ranks(state["yielded"])

    def state_of_most(self, state: Mapping[str, Any], instance: Instance, *, is_over: bool) -> dict[str, Any]:
        """Return the state of the same worker on the rank that has yielded the most, if the ranks are in step.

        Args:
            state: the state of an instance.
            instance: this instance.
            is_over: whether its rank has no samples left.
        """
        share = self._share_in(instance, RestOfEpoch.from_state(state.get("rest")), [state])
        yielded = share.most_yielded(state["yielded"], is_over=is_over)
        return {**state, "yielded": yielded, "ranks": instance.ranks}

    def reshard_states(self, resharding: Resharding) -> list[dict[str, Any]]:
        """Return the states from which a different number of instances resumes; they share the rest of the epoch."""
        known = [state or {} for state in resharding.states]
        # An instance that has not begun does not know the number. If none has begun, nothing depends on it.
        ranks = next((state["ranks"] for state in known if state.get("yielded")), 1)
        rest = RestOfEpoch.from_state(next((state["rest"] for state in known if "rest" in state), None))
        workers = len(known) // ranks
        shares = [
            (
                self._share_in(Instance(number % ranks, ranks, number // ranks, workers), rest, known),
                state.get("yielded", 0),
            )
            for number, state in enumerate(known)
        ]
        held = chain.from_iterable(map(resharding.waiting, range(len(known))))
        left = rest_of_epoch(shares, [position.start for position in held])
        return [{"yielded": 0, "rest": left.state_dict()} for _ in resharding.own]
