"""The declarations of a stage that loaders read, with defaults for a stage about which nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wds_datapipes.counters import Counters
from wds_datapipes.errors import StateError
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.inspection import loop_of, name_of
from wds_datapipes.shards.position import Resharding, SamplePosition

if TYPE_CHECKING:
    from wds_datapipes.index.order.exclusions import Exclusions

#: The declarations that describe a loop, with their values for an unknown loop.
PROMISES = {
    **dict.fromkeys(
        ("has_state", "is_stateless", "has_position", "rereads_samples", "can_reshard", "keeps_share"), False
    ),
    **dict.fromkeys(("is_transparent", "is_one_to_one", "reads_shards", "reads_members"), False),
    "draws_globally": True,
    "holds_items": None,
}


class Declarations:
    """The properties that the engine knows of a stage, from any package.

    `Stage` documents those for users' stages. The others are internal: the stages of this package declare them as
    attributes, and `foreign_stages` declares them for stages of torch and torchdata.

    A subclass that overrides ``__iter__`` has a different loop. It therefore does not inherit the declarations that
    describe the loop (`PROMISES`), and must repeat them.

    Attributes:
        has_state: whether ``state_dict`` contains everything that the stage keeps between two items; true if it is
            defined.
        accepts_again: whether ``load_state_dict`` has a parameter ``again`` for the positions of samples that later
            stages have buffered, which the stage yields first, without counting them.
        has_position: whether its state contains the position of the pipeline in the shards, so that the stages before
            it need no state.
        spans_epochs: whether an epoch continues where the previous one ended.
        keeps_share: whether each item belongs to the same instance of the pipeline in every pass over its source.
        is_transparent: whether it never affects which samples are yielded, so that states are valid with or without it.
        is_loaders: whether a loader has added it after the user's pipeline.
        is_remote: whether its items come from another process, so that only the loader can restart it.
        is_dispatched: whether one process per rank runs the stages before it, for all workers.
        syncs_ranks: whether torchdata has added it and has split the data between ranks.
        is_one_to_one: whether it yields one item for each item that it reads, except for errors.
        leaves_holes: whether it may leave out items at some positions, so that other ranks may have yielded more.
        samples_per_batch: the number of samples in each batch; None if it does not batch, or has no fixed batch size.
        reads_shards: whether its source is the list of shards.
        reads_members: whether it yields the members of shards, which its `open_reader` yields faster.
        open_shards: the number of shards that it keeps open.
        lists_shards: whether it is a source of shards with its own ``.shuffle()``, which shuffles the whole list.
        is_default_shuffle: whether it is torch's ``.shuffle()``, with its default buffer.
        lanes: the number of lanes of its items; each rank gets the same lanes in every epoch.
        claims_shards: whether it gives each shard to a single process, and counts it as read when the next one is
            requested.
        repeats_shards: whether a shard may occur more than once in an epoch.
        restarts_once: whether it restarts its source exactly once in each epoch.
        draws_globally: whether it may draw from the generators of Python, NumPy and torch, as users' functions do.
        holds_items: whether it may read any number of items before it yields one; None if unknown.
        declares_length: whether its length was declared by the user, so that the number of items may differ.
        derives_seeds: whether it derives the seeds of later passes from that of the first, as `SeededStage` does.
        can_rotate: whether it splits the data, and `rotate_assignment` can give it another worker's share.
        skipped_shards: the number of shards that it skips when it resumes.
        alternative: advice on what to use instead if it has no position; "" if there is none.
        ignored_arguments: the names of arguments that do not affect which samples are yielded.
        arguments_of_rank: the names of arguments that are divided between the ranks.
        position_log: the folder in which it logs the positions of samples; None if it logs none.
        exclusions: the samples that it leaves out and that a run may add to; None if it leaves out none.
        free_arguments: the names of arguments that may change in a run, as no position depends on them.
        has_phases: whether it has `load_phases` and the other methods of `IndexedSamples` for the phases of a run.
        on_error: the error policy; see `OnError`.
    """

    is_stateless: bool = False
    rereads_samples: bool = False
    combines_samples: bool = False
    can_reshard: bool = False
    shares_seed: bool = False

    has_state: bool = False
    accepts_again: bool = False
    has_position: bool = False
    spans_epochs: bool = False
    keeps_share: bool = False
    is_transparent: bool = False
    is_loaders: bool = False
    is_remote: bool = False
    is_dispatched: bool = False
    syncs_ranks: bool = False
    is_one_to_one: bool = False
    leaves_holes: bool = False
    samples_per_batch: int | None = None
    reads_shards: bool = False
    reads_members: bool = False
    open_shards: int = 1
    lists_shards: bool = False
    is_default_shuffle: bool = False
    lanes: int = 1
    claims_shards: bool = False
    repeats_shards: bool = False
    restarts_once: bool = True
    draws_globally: bool = True
    holds_items: bool | None = None
    declares_length: bool = False
    derives_seeds: bool = False
    can_rotate: bool = False
    skipped_shards: int = 0
    alternative: str = ""
    ignored_arguments: frozenset[str] = frozenset()
    arguments_of_rank: frozenset[str] = frozenset()
    position_log: Any = None
    exclusions: Exclusions | None = None
    free_arguments: frozenset[str] = frozenset()
    has_phases: bool = False
    on_error: OnError = "raise"

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

    def share_list(self, is_recorded: bool) -> None:
        """Take the share of a list by index, if possible, while a `ShardOrder` before this stage records the list."""

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

    def is_alike_on_ranks(self, state: Mapping[str, Any], ranks: int, workers: int, worker: int) -> bool:  # noqa: ARG002
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
