"""The declarations of stages of torch and torchdata."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

from wds_datapipes.datapipes import SHARDING_PRIORITIES, Shuffler
from wds_datapipes.pipes.groups import part_in
from wds_datapipes.pipes.inspection import loop_of, takes_seed
from wds_datapipes.pipes.roles import Buffer, Loader, Role, Source, Splitter, Transform

#: The attribute of a ``.sharding_filter()`` that holds the rotation of its assignment.
_ROTATION = "_wds_datapipes_turn"

#: The default size of the buffer of torch's ``.shuffle()``.
TORCH_BUFFER_SIZE = 10_000

_MIXED = "Use .mix_samples(), or mix the shards before .load_wds_shards()"


class ForeignStage(Role):
    """The declarations of a stage of another package: the defaults, unless it is in `STAGES`.

    Args:
        pipe: the stage.
    """

    #: What to use instead if it has no position, for the message; "" if there is nothing.
    alternative = ""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe


class _Batcher(Buffer, ForeignStage):
    is_stateless = True
    combines_samples = True
    draws_globally = False
    argument_uses: ClassVar = {"batch_size": "per rank"}

    def is_even(self) -> bool:
        return True

    def count_in_batch(self) -> int:
        size: int = self.pipe.batch_size
        return size


class _IterableWrapper(Source, ForeignStage):
    @property
    def draws_globally(self) -> bool:  # type: ignore[override]  # it depends on an argument
        return type(self.pipe.iterable) not in (list, tuple, range, str, dict)

    def known_list(self) -> Sequence[str]:
        urls = self.pipe.iterable
        return urls if isinstance(urls, list | tuple) and all(isinstance(url, str) for url in urls) else ()


class _Mapper(Transform, ForeignStage):
    is_one_to_one = True

    def unsplit(self) -> Any:
        source = declared(self.pipe.datapipe).unsplit()
        if source is None:
            return None
        mapper = copy.copy(self.pipe)
        mapper.datapipe = source
        return mapper


class _ShardingFilter(Splitter, ForeignStage):
    draws_globally = False
    alternative = "Put .sharding_filter() before .load_wds_shards()"

    def may_hold(self, taken: int) -> bool:
        return Role.may_hold(self, taken)  # it may drop all samples of a pass: those of other instances

    def number_instances(self) -> None:
        pipe, only = self.pipe, self.pipe.sharding_group_filter
        instances, instance = part_in(pipe.groups) if only is None else pipe.groups.get(only, (1, 0))
        pipe.num_of_instances = instances
        pipe.instance_id = (instance + vars(pipe).get(_ROTATION, 0)) % instances

    def rotate_assignment(self, turn: int, stages: Sequence[Any]) -> None:
        if any(declared(stage).has_lanes() for stage in stages):  # only between the workers of a rank
            turn *= self.pipe.groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))[0]
        vars(self.pipe)[_ROTATION] = turn
        self.number_instances()

    def unsplit(self) -> Any:
        return self.pipe.source_datapipe if self.pipe.sharding_group_filter is None else None


class _Shuffler(Buffer, ForeignStage):
    draws_globally = False
    alternative = "Use .shuffle_samples(n) for samples; .shuffle() belongs before .load_wds_shards()"

    def shuffled_source(self) -> Any:
        is_default = type(self.pipe) is Shuffler and self.pipe.buffer_size == TORCH_BUFFER_SIZE
        return self.pipe.datapipe if is_default else None

    def has_lanes(self) -> bool:
        count: int = getattr(self.pipe, "lanes", 1)  # ours has this argument
        return count > 1

    def draw_list(self) -> Any:
        return getattr(self.pipe, "draw_list", super().draw_list)()  # torch's has no draw_list


class _Repeater(ForeignStage):
    def repeats_shards(self) -> bool:
        return True


class _SequenceRepeater(_Repeater):
    draws_globally = False


class _Cycler(Transform, _Repeater):
    is_stateless = False
    draws_globally = False

    def restarts_once(self) -> bool:
        return False


class _LengthSetter(ForeignStage):
    draws_globally = False
    alternative = "Use .with_length(n)"

    def declares_length(self) -> bool:
        return True


class _InMemoryCache(ForeignStage):
    def restarts_once(self) -> bool:
        return False

    def replay_obstacle(self, stages: Sequence[Any]) -> str:
        is_random = any(map(takes_seed, stages))
        return "keeps the order of the epoch in which it was filled" if is_random else ""


def _row(*roles: type[Role], **facts: Any) -> type[ForeignStage]:
    """Return the role and facts of a stage that do not depend on its arguments; without a role, it is unknown."""
    return type("ForeignStage", (*roles, ForeignStage), facts)


#: The declarations of stages, by the package and the name of the class that defines ``__iter__``.
STAGES: dict[str, dict[str, type[ForeignStage]]] = {
    "torch": {
        "BatcherIterDataPipe": _Batcher,
        "ConcaterIterDataPipe": _row(draws_globally=False, alternative=_MIXED),
        "FileListerIterDataPipe": _row(Source, draws_globally=False),
        "FilterIterDataPipe": _row(Transform),
        "IterableWrapperIterDataPipe": _IterableWrapper,
        "MapperIterDataPipe": _Mapper,
        "MultiplexerIterDataPipe": _row(draws_globally=False, alternative=_MIXED),
        "SamplerIterDataPipe": _Repeater,
        "ShardingFilterIterDataPipe": _ShardingFilter,
        "ShufflerIterDataPipe": _Shuffler,
        "UnBatcherIterDataPipe": _row(draws_globally=False),
        "ZipperIterDataPipe": _row(
            draws_globally=False,
            alternative="Use .associate() with a table, or write all fields of a sample to one shard",
        ),
    },
    "torchdata": {
        "BatchMapperIterDataPipe": _row(alternative="Use .batch(n) and .map()"),
        "CyclerIterDataPipe": _Cycler,
        "EnumeratorIterDataPipe": _row(draws_globally=False),
        "FullSyncIterDataPipe": _row(Loader, process_boundary="ranks", is_transparent=True),
        "HeaderIterDataPipe": _row(draws_globally=False, alternative="Use .slice_samples(n)"),
        "InMemoryCacheHolderIterDataPipe": _InMemoryCache,
        "LengthSetterIterDataPipe": _LengthSetter,
        "PinMemoryIterDataPipe": _row(alternative="Use ShardReadingService(pin_memory=True)"),
        "PrefetcherIterDataPipe": _row(alternative="The workers of ShardReadingService prefetch items already"),
        "RepeaterIterDataPipe": _SequenceRepeater,
        "ShardingRoundRobinDispatcherIterDataPipe": _row(Loader, process_boundary="dispatched"),
        # The items of a worker or of the dispatching process.
        "NonBlocking": _row(Loader, process_boundary="remote"),
        "_DummyIterDataPipe": _row(Loader, process_boundary="remote"),
        "_IterateQueueDataPipes": _row(Loader, process_boundary="remote"),
    },
}
# Lists of shards make subclasses of torch's stages of the same names.
STAGES["wds_datapipes"] = STAGES["torch"]


def declared(pipe: Any) -> Role:
    """Return the declarations of a stage of any package."""
    if isinstance(pipe, Role):
        return pipe
    kind = loop_of(*type(pipe).__mro__) or type(pipe)
    return STAGES.get(kind.__module__.partition(".")[0], {}).get(kind.__name__, ForeignStage)(pipe)
