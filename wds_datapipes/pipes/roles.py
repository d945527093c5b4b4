"""The roles of stages: their declared attributes, and the methods that loaders call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from wds_datapipes.counters import Counters
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.inspection import loop_of, name_of
from wds_datapipes.shards.position import Resharding, SamplePosition
from wds_datapipes.types import Instance

Boundary: TypeAlias = Literal["", "remote", "dispatched", "ranks", "loop"]
ShardAccess: TypeAlias = Literal["", "read", "claimed"]
ArgumentUse: TypeAlias = Literal["ignored", "per rank", "free"]

#: The declarations that describe a loop, with their values for an unknown loop.
PROMISES: dict[str, Any] = {
    **dict.fromkeys(
        ("has_state", "is_stateless", "has_position", "rereads_samples", "can_reshard", "is_transparent"), False
    ),
    "is_one_to_one": False,
    "shard_access": "",
    "draws_globally": True,
}

#: The maximum number of items that an unknown stage may read before it yields one.
MAX_HELD_BACK = 100_000


class Role:
    """The facts that the engine knows of a stage, from any package; here, of one about which nothing is known.

    `Stage` documents those for users' stages. The others are internal: the stages of this package have one of the roles
    below and declare what differs as attributes, and `foreign_stages` does so for stages of torch and torchdata.

    A subclass that overrides ``__iter__`` has a different loop. It therefore does not inherit the facts that describe
    the loop (`PROMISES`), and must declare them again.

    Attributes:
        has_state: whether ``state_dict`` contains everything that the stage keeps between two items; true if it is
            defined.
        has_position: whether its state contains the position of the pipeline in the shards, so that the stages before
            it need no state.
        spans_epochs: whether an epoch continues where the previous one ended.
        is_transparent: whether it never affects which samples are yielded, so that states are valid with or without it.
        process_boundary: ``"remote"`` if its items come from another process, so that only the loader can restart it;
            ``"dispatched"`` if one process per rank runs the stages before it, for all workers; ``"ranks"`` if
            torchdata has added it and has split the data between ranks; ``"loop"`` if a loader has added it after the
            user's pipeline; otherwise "".
        is_one_to_one: whether it yields one item for each item that it reads, except for errors.
        shard_access: ``"read"`` if its source is the list of shards; ``"claimed"`` if it gives each shard to a single
            process, and counts it as read when the next one is requested; otherwise "".
        argument_uses: how arguments affect the items, by name: ``"ignored"`` if they do not; ``"per rank"`` if they are
            divided between the ranks; ``"free"`` if they may change in a run, as no position depends on them.
        draws_globally: whether it may draw from the generators of Python, NumPy and torch, as users' functions do.
    """

    is_stateless: bool = False
    rereads_samples: bool = False
    combines_samples: bool = False
    can_reshard: bool = False
    shares_seed: bool = False

    has_state: bool = False
    has_position: bool = False
    spans_epochs: bool = False
    is_transparent: bool = False
    process_boundary: Boundary = ""
    is_one_to_one: bool = False
    shard_access: ShardAccess = ""
    argument_uses: ClassVar[Mapping[str, ArgumentUse]] = {}
    draws_globally: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        others = (
            [base for base in cls.__bases__ if loop_of(*base.__mro__) is not None] if "__iter__" in vars(cls) else []
        )
        for name, unknown in PROMISES.items() if others else ():
            definer = next(kind for kind in cls.__mro__ if name in vars(kind))
            if definer is not cls and any(issubclass(base, definer) for base in others):
                setattr(cls, name, unknown)

    @cached_property
    def counters(self) -> Counters:
        """The counters of skipped and read items."""
        return Counters()

    def may_hold(self, taken: int) -> bool:
        """Whether it may need more items than the ``taken`` ones before it yields one."""
        return taken < MAX_HELD_BACK

    def is_even(self) -> bool:
        """Whether it yields equally many items on each rank if its source does, so that ranks stay in step."""
        return self.has_position or self.is_one_to_one or self.is_transparent

    def count_in_batch(self) -> int | None:
        """Return the number of samples in each batch; None if it does not batch, or has no fixed batch size."""
        return None

    def member_reader(self) -> Any:
        """Return the stage whose `open_reader` yields the members of shards faster; None if the stage yields none."""
        return None

    def repeats_shards(self) -> bool:
        """Whether a shard may occur more than once in an epoch."""
        return False

    def keeps_share(self) -> bool:
        """Whether every pass over its source assigns each item to the same rank and worker."""
        return self.spans_epochs

    def declares_length(self) -> bool:
        """Whether its length was declared by the user, so that the number of items may differ."""
        return False

    def phased_source(self) -> Any:
        """Return the source that alone decides what the stage yields, by the phases of a run; None if there is none.

        It is `IndexedSamples` itself, or, for a stage that joins its rows, the one before it: stages in between, which
        may drop no sample, have no part in the decision.
        """
        return None

    def position_log_folder(self) -> Path | None:
        """Return the folder in which it logs the positions of samples; None if it logs none."""
        return None

    def reset_state(self) -> None:
        """Discard a loaded state, so that the next iteration starts from the beginning."""

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the last item yielded.

        The default, None, means the position of the previous stage, which is correct if this stage yields each item
        before it reads another one.
        """
        return None

    def nested_sources(self) -> Sequence[Any]:
        """Return the sources that the stage may restart at any time, and whose states are part of its own."""
        return ()

    def known_list(self) -> Sequence[str]:
        """Return the URLs of shards that the stage yields, if known without reading; otherwise, an empty list."""
        return ()

    def draw_list(self) -> Any:
        """Return a long list as a `UrlList` in the order of the next pass, or None to read it item by item."""
        return None

    def read_share(self, count: int, first: int) -> Iterator[Any] | None:  # noqa: ARG002
        """Return every ``count``-th item, starting with number ``first``; None if all items have to be read."""
        return None

    def shuffled_source(self) -> Any:
        """Return the source of torch's ``.shuffle()`` with its default buffer; None for any other stage."""
        return None

    def has_lanes(self) -> bool:
        """Whether it shuffles a list so that each rank gets the same part of it in every epoch."""
        return False

    def restarts_once(self) -> bool:
        """Whether it restarts its source exactly once in each epoch."""
        return True

    def check_position(self) -> None:
        """Check that the position in the stage's state, if any, refers to the shards.

        Raises:
            StateError: the position does not.
        """

    def check_resharding(self) -> None:
        """Check that the rest of an epoch can be assigned to a different number of workers.

        Raises:
            StateError: the stage cannot be resharded.
        """
        if not self.can_reshard:
            raise StateError(
                f"{name_of(self)} records or counts what each worker has read, so its state is invalid with a "
                f"different number of ranks or workers. Resume with as many ranks and workers as before, or remove it"
            )

    def reshard_states(self, rest: Resharding) -> list[dict[str, Any]]:
        """Return the states from which a different number of instances resumes, if the state has the position."""
        raise NotImplementedError

    def is_alike_on_ranks(self, state: Mapping[str, Any], instance: Instance) -> bool:  # noqa: ARG002
        """Whether the same worker on every rank has this state once it has yielded the same number of items."""
        return False

    def replay_obstacle(self, stages: Sequence[Any]) -> str:  # noqa: ARG002
        """Return why an epoch cannot be replayed, as a predicate of the stage; "" if it can.

        Args:
            stages: the stage and those before it.
        """
        return "continues from one epoch to the next" if self.spans_epochs else ""

    def number_instances(self) -> None:
        """Number the instances between which the stage splits the data like `Instance.number`."""

    def rotate_assignment(self, turn: int, stages: Sequence[Any]) -> None:
        """Rotate the assignment by ``turn`` workers, if this stage splits the data.

        Args:
            turn: the number of workers.
            stages: the stage and those before it.
        """

    def unsplit(self) -> Any:
        """Return a copy of the stage that reads the list of shards before it is split, or None if that is unknown."""
        return None

    def share_length(self, instance: Any) -> None:
        """Make ``len()`` return one worker's part of a length that is declared for all workers of a rank."""


PROMISES["may_hold"] = Role.may_hold  # it follows from the loop, too


class Source(Role):
    """Yields what comes from outside the pipeline: the URLs of shards, or their samples."""

    def may_hold(self, taken: int) -> bool:  # noqa: ARG002
        """Whether it may need more items before it yields one."""
        return False


class Transform(Role):
    """Yields at most one item for each item that it reads, and keeps nothing between two, or only counts."""

    is_stateless = True

    def may_hold(self, taken: int) -> bool:  # noqa: ARG002
        """Whether it may need more items before it yields one."""
        return False


class Buffer(Role):
    """Holds items back: it may read any number of them before it yields one."""

    def may_hold(self, taken: int) -> bool:  # noqa: ARG002
        """Whether it may need more items before it yields one."""
        return True


class Splitter(Role):
    """Splits the data between ranks and workers.

    `Role.rotate_assignment` gives each the share of another one, unless the stage always keeps its share.
    """

    def may_hold(self, taken: int) -> bool:  # noqa: ARG002
        """Whether it may need more items before it yields one."""
        return False


class Loader(Role):
    """Belongs to a loader, which has added it to the user's pipeline or reads it."""

    def may_hold(self, taken: int) -> bool:  # noqa: ARG002
        """Whether it may need more items before it yields one."""
        return False
