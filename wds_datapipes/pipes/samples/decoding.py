"""The stage that decodes samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from wds_datapipes.codecs.decoding import Decoder, DecoderChain
from wds_datapipes.codecs.extensions import ByExtension
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError, check_on_error, refuse_handler
from wds_datapipes.pipes.samples.sampling import seeds_of_samples
from wds_datapipes.pipes.stage import OneToOneStage, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import SampleSeeds
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self

T_co = TypeVar("T_co", covariant=True)


class DecodingStage(OneToOneStage[T_co]):
    """Base class of stages that decode fields, some of whose decoders may draw random numbers.

    Loaders draw a seed for each stage that takes one. So that ordinary decoders do not change the seeds of other
    stages, random ones are instances of a subclass, which `__new__` creates.
    """

    _chain: DecoderChain
    #: The subclass for random decoders.
    _random_class: type[DecodingStage[Any]] | None = None

    def __new__(cls, source: Any = None, /, *decoders: Decoder, **options: Any) -> Self:  # noqa: ARG004
        """Create an instance of the subclass for random decoders if one of them is random."""
        is_random = any(isinstance(decoder, ByExtension) and decoder.is_random for decoder in decoders)
        kind = cls._random_class if is_random and "_random_class" in vars(cls) else None
        return super().__new__(cast("type[Self]", kind or cls))

    def sample_seeds(self) -> SampleSeeds | None:
        """Return the seeds of the samples of a new pass, or None if no decoder is random."""
        return None


class SeededDecodingStage(SeededStage, DecodingStage[T_co]):
    """Base class of decoding stages with random decoders: they have a seed for each sample."""

    shares_seed = True
    _own_seed = 0

    def reset(self) -> None:
        """Start an epoch, with the seed that was set for it or one from torch's generator."""
        self._own_seed = self.take_seed()

    def sample_seeds(self) -> SampleSeeds:
        """Return the seeds of the samples of a new pass."""
        return seeds_of_samples(self, self._own_seed, self._chain.stage)


@register_stage("wds_decode")
class SampleDecoder(DecodingStage[Sample]):
    """Decodes the fields of samples, each by its extension (functional name: ``wds_decode``).

    Fields ending in ``.gz`` are decompressed first. The first match decodes a field: the keyword with the field's
    extension, then the decoders in their order, then the basic table by the last extension:

    - ``txt text transcript html htm``: str, from UTF-8
    - ``cls cls2 class count index inx id``: int
    - ``json jsn``, ``mp msgpack msg``, ``cbor``: any value; the last two need the extras ``msgpack`` and ``cbor``
    - ``npy``: array; ``npz``: dict of arrays; ``ten tenbin tb``: list of arrays
    - ``pth``: the tensors and plain Python values that ``torch.save`` wrote, on the CPU
    - ``pyd pickle pkl``: refused unless ``allow_pickle`` is true

    All other fields stay bytes. So do images, video and audio, unless a decoder for them is passed.

    Yields:
        dict: a new one for each sample, with the same keys in the same order. Values of keys that start with ``__`` are
            unchanged.

    Args:
        source: samples, as ``group_samples`` yields them.
        decoders: an image spec (see `ImageDecoder`), ``"torch_video"``, ``"torch_audio"``, an `ImageDecoder`, a result
            of `handle_extension`, or a function ``(field, data)``. The function receives the field's name without a
            leading dot (and without ``.gz``) and its bytes, and returns the value, ``None`` to leave the field to the
            next decoder, or a `Continue`. Functions written for webdataset, which passes ``.png``, work if they test
            ``name.endswith(".png")``.
        only: the names of the fields to decode, ``"jpg cls"`` or a list of them; the others stay bytes.
        partial: accept values that are not bytes, such as already decoded ones; otherwise they are an error.
        allow_pickle: allow codecs that can run arbitrary code in the data: ``pyd pickle pkl``, and ``pth`` with other
            objects.
        on_error: ``"raise"``; or, to skip the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        limits: ``member_bytes`` and ``expansion`` of `ReadLimits` limit the decompressed size of compressed fields,
            such as ``json.gz`` and ``npz``.
        by_extension: functions ``bytes -> value``, such as ``json=parse``, which precede all other decoders.

    Raises:
        DecodeError: the bytes do not fit the field's name, or expand to more than the limits; the message has the
            shard, key, field and decoder.
        UnsafeInputError: a field needs ``allow_pickle``.
        MissingDependencyError: a field needs a package that is not installed.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": b"7", "meta.json": b'{"ok": true}', "bin": b"x"}])
        >>> list(samples.wds_decode("rgb8", bin=len))
        [{'__key__': 'a', 'cls': 7, 'meta.json': {'ok': True}, 'bin': 1}]
    """

    is_stateless = True
    draws_globally = True

    def __init__(
        self,
        source: Iterable[Sample],
        /,
        *decoders: Decoder,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        allow_pickle: bool = False,
        on_error: OnError = "raise",
        limits: ReadLimits = DEFAULT_LIMITS,
        **by_extension: Callable[[bytes], Any],
    ) -> None:
        check_on_error(on_error)
        refuse_handler(by_extension, "keywords are extensions, as in json=parse")
        self.source = source
        self.on_error = on_error
        # An object, since torch pickles tuples and dicts in attributes to find datapipes, and fails on a lambda.
        self._chain = DecoderChain(
            decoders,
            by_extension,
            only=only,
            partial=partial,
            allow_pickle=allow_pickle,
            limits=limits,
        )

    def __iter__(self) -> Iterator[Sample]:
        chain, source = self._chain, self.source
        if (seeds := self.sample_seeds()) is not None:
            chain, source = chain.with_rng(seeds.make_rng), seeds.follow(source)
        yield from convert_samples(source, chain, self.counted_errors)


class RandomSampleDecoder(SeededDecodingStage[Sample], SampleDecoder):
    """A `SampleDecoder` with random crops."""


SampleDecoder._random_class = RandomSampleDecoder
