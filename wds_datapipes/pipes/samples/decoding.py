"""The base class of stages that decode fields, and the names of their decoders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from wds_datapipes.codecs.decoding import Decoder, DecoderChain
from wds_datapipes.codecs.extensions import ByExtension
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.sampling import SampleSeeds
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self


T_co = TypeVar("T_co", covariant=True)


#: The counter of a stage's time is updated after at least this many seconds.
COUNTED_S = 0.01


class DecodingStage(FunctionStage[T_co]):
    """Base class of stages that decode fields, some of whose decoders may draw random numbers.

    Loaders draw a seed for each stage that takes one. Stages with random decoders are instances of a subclass, which
    `__new__` creates, so that ordinary decoders do not change the seeds of other stages.
    """

    is_one_to_one = True

    #: The subclass for random decoders.
    _random_class: type[DecodingStage[Any]] | None = None

    def __new__(cls, source: Any = None, /, *decoders: Decoder, **options: Any) -> Self:  # noqa: ARG004
        """Create an instance of the subclass for random decoders if one of them is random."""
        is_random = any(isinstance(decoder, ByExtension) and decoder.is_random for decoder in decoders)
        kind = cls._random_class if is_random and "_random_class" in vars(cls) else None
        return super().__new__(cast("type[Self]", kind or cls))

    def items_of(self, source: Any) -> Iterator[Any]:
        """Yield the items of the function and count the time that they take without their source."""
        figure, clock, spent_s = f"decoding_s/{self._options.value['chain'].stage}", time.perf_counter, 0.0

        def timed(items: Iterable[Any], sign: int) -> Iterator[Any]:
            nonlocal spent_s
            begin = clock()
            for item in items:
                spent_s += sign * (clock() - begin)
                if spent_s > COUNTED_S:
                    self.counters.count(figure, spent_s)
                    spent_s = 0.0
                yield item
                begin = clock()
            spent_s += sign * (clock() - begin)

        yield from timed(super().items_of(timed(source, -1)), 1)
        self.counters.count(figure, spent_s)


def decode_samples(
    source: Iterable[Sample], chain: DecoderChain, *, seeds: SampleSeeds | None = None, on_error: OnError = "raise"
) -> Iterator[Sample]:
    """Decode samples, with a seed for each sample if some decoders are random."""
    if seeds is not None:
        chain, source = chain.with_rng(seeds.make_rng), seeds.follow(source)
    return convert_samples(source, chain, on_error)
