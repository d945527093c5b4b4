"""Stages that decode and encode the fields of samples, and registration of decoders as stages."""

from __future__ import annotations

import functools
import keyword
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.utils.data import default_collate

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.codecs.batch_decoding import decode_batches
from wds_datapipes.codecs.decoding import Decoder, DecoderChain
from wds_datapipes.codecs.encoding import EncoderChain, FieldEncoder
from wds_datapipes.codecs.extensions import (
    ByExtension,
    find_decoder,
    handle_extension,
    name_of,
    registered_decoders,
    split_extensions,
)
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.samples.mapping import SeedingStage
from wds_datapipes.pipes.stage import FunctionStage, register_stage
from wds_datapipes.samples.sampling import SampleSeeds
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])
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


@register_stage("wds_decode")
class SampleDecoder(DecodingStage[Sample]):
    """Decodes the fields of samples, each by its extension (functional name: ``wds_decode``).

    Fields ending in ``.gz`` are decompressed first. The first match decodes a field: the keyword with the field's
    extension, then the decoders in order, then this table, by the last extension:

    - ``txt text transcript html htm``: str, from UTF-8
    - ``cls cls2 class count index inx id``: int
    - ``json jsn``, ``mp msgpack msg``, ``cbor``: any value; the last two need the extras ``msgpack`` and ``cbor``
    - ``npy``: array; ``npz``: dict of arrays; ``ten tenbin tb``: list of arrays
    - ``pth``: the tensors and plain Python values that ``torch.save`` wrote, on the CPU
    - ``pyd pickle pkl``: rejected unless ``allow_pickle`` is true

    All other fields stay bytes. So do images, video and audio, unless a decoder for them is passed.

    Yields:
        dict: a new dict for each sample, with the same keys in the same order. Values of keys that start with ``__``
            are unchanged.

    Args:
        source: yields samples, as ``group_samples`` does.
        decoders: an image spec (see `ImageDecoder`), ``"torch_video"``, ``"torch_audio"``, the name of a decoder that
            `register_decoder` has registered, an `ImageDecoder`, a result of `handle_extension`, or a function
            ``(field, data)``. The function receives the field's name without a leading dot (and without ``.gz``) and
            its bytes. It returns the value, ``None`` to leave the field to the next decoder, or a `Continue`. Functions
            written for webdataset, which passes ``.png``, work if they test ``name.endswith(".png")``.
        only: the names of the fields to decode, ``"jpg cls"`` or a list of them; the others stay bytes.
        partial: accept values that are not bytes, such as decoded ones; otherwise, they are an error.
        allow_pickle: allow codecs that can run arbitrary code from the data: ``pyd pickle pkl``, and ``pth`` with other
            objects.
        on_error: ``"raise"``; or, to skip the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        limits: ``member_bytes`` and ``expansion`` of `ReadLimits` limit the decompressed size of compressed fields,
            such as ``json.gz`` and ``npz``, and ``image_pixels`` the size of images.
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

    draws_globally = True
    function = staticmethod(decode_samples)

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
        refuse_handler(by_extension, "keywords are extensions, as in json=parse")
        chain = DecoderChain(
            decoders, by_extension, only=only, partial=partial, allow_pickle=allow_pickle, limits=limits
        )
        super().__init__(source, chain=chain, on_error=on_error)


class RandomSampleDecoder(SeedingStage[Sample], SampleDecoder):
    """A `SampleDecoder` with random crops."""

    seeded_by = "wds_decode"


SampleDecoder._random_class = RandomSampleDecoder


@register_stage("decode_batch")
class BatchDecoder(DecodingStage[dict[str, Any]]):
    """Decode batches of samples, with all images of a field in one tensor (functional name: ``decode_batch``).

    It yields the same batches as ``.wds_decode().batch(n).collate()``, with fewer copies, because each image is decoded
    directly into its place in the batch. With ``num_threads``, several images are decoded at once, which helps loaders
    with fewer workers than processors.

    The images of a field must have the same size: pass a ``crop`` to the `ImageDecoder`, unless all images already do.
    All samples of a batch must have the same fields: rename ``jpg`` and ``png`` to one name before ``.batch()``.

    Yields:
        dict: the columns of a batch by field name. Images are a ``torch.Tensor`` of shape (N, C, H, W) for specs that
            start with ``torch``, or (N, H, W, C) for array specs, without C for gray images; uint8 from 0 to 255, or
            float32 from 0 to 1. Other columns are the results of ``collate_fn``.

    Args:
        source: yields lists of samples, as from ``.batch(n)``.
        decoders: as for ``.wds_decode()``.
        num_threads: the number of threads that decode images. With 1, no thread is started.
        collate_fn: the function that collates the other fields. It takes a list of dicts and returns a dict of columns,
            like `collate_samples`. The default is that of ``.collate()``.
        only: as for ``.wds_decode()``.
        allow_pickle: as for ``.wds_decode()``.
        limits: as for ``.wds_decode()``.
        by_extension: as for ``.wds_decode()``.
        on_error: ``"raise"``; or, to skip the sample, so that its batch is smaller, ``"warn"``, ``"skip"``, an
            `ErrorBudget` or a handler.

    Raises:
        DecodeError: the bytes do not fit the field's name, or images differ in size; the message has the shard, key,
            field and decoder.
        UnsafeInputError: a field needs ``allow_pickle``.
        MissingDependencyError: a field needs a package that is not installed.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = [{"__key__": str(n), "ppm": b"P6 2 2 255 " + bytes(12), "cls": b"%d" % n} for n in range(3)]
        >>> for batch in IterableWrapper(samples).batch(2).decode_batch("torchrgb8"):
        ...     print(batch["ppm"].shape, batch["cls"], batch["__key__"])
        torch.Size([2, 3, 2, 2]) tensor([0, 1]) ['0', '1']
        torch.Size([1, 3, 2, 2]) tensor([2]) ['2']
    """

    function = staticmethod(decode_batches)
    ignored_arguments = frozenset({"num_threads"})

    def __init__(
        self,
        source: IterDataPipe[list[Sample]],
        /,
        *decoders: Decoder,
        num_threads: int = 1,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        only: str | Iterable[str] | None = None,
        allow_pickle: bool = False,
        on_error: OnError = "raise",
        limits: ReadLimits = DEFAULT_LIMITS,
        **by_extension: Callable[[bytes], Any],
    ) -> None:
        refuse_handler(by_extension, "keywords are extensions, as in json=parse")
        check_integer("num_threads", num_threads, 1)
        chain = DecoderChain(
            decoders, by_extension, only=only, allow_pickle=allow_pickle, limits=limits, stage="decode_batch"
        )
        super().__init__(source, chain=chain, collate=collate_fn, num_threads=num_threads, on_error=on_error)


class RandomBatchDecoder(SeedingStage[dict[str, Any]], BatchDecoder):
    """A `BatchDecoder` with random crops."""

    seeded_by = "decode_batch"


BatchDecoder._random_class = RandomBatchDecoder


class RegisteredDecoder(DecodingStage[Sample]):
    """The stage for a function registered with `register_decoder`: it decodes the fields with its extensions."""

    draws_globally = True
    function = staticmethod(decode_samples)


@checks_calls
def register_decoder(name: str, extensions: str | Iterable[str]) -> Callable[[F], F]:
    """Register a function ``bytes -> value`` as a stage, and as a decoder of ``wds_decode``; used as a decorator.

    Every datapipe gets a method ``.name()``, which decodes the fields with these extensions and leaves all others
    unchanged. It takes ``only``, ``partial`` and ``on_error``, like ``wds_decode``, and passes other keywords to the
    function. ``.wds_decode("name")`` combines it with other decoders. Registering the same function again, as when a
    notebook cell is rerun, replaces it.

    Args:
        name: the name of the stage: a Python identifier that is not a method of datapipes.
        extensions: as for `handle_extension`: ``"jpg seg.png"`` or a list of such words.

    Raises:
        ValueError: the name is invalid or taken.

    Examples:
        >>> @register_decoder("reversed_text", "rev")
        ... def reversed_text(data, encoding="utf-8"):
        ...     return data.decode(encoding)[::-1]
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"rev": b"olleh", "cls": b"7"}]).reversed_text(encoding="ascii"))
        [{'rev': 'hello', 'cls': b'7'}]
        >>> list(IterableWrapper([{"rev": b"olleh", "cls": b"7"}]).wds_decode("reversed_text"))
        [{'rev': 'hello', 'cls': 7}]
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(f"the name of a stage must be a valid method name, such as 'sketch', not {name!r}")
    words = split_extensions(extensions)

    def register(function: F) -> F:
        known = registered_decoders.get(name)
        if known is None:
            is_taken = hasattr(IterDataPipe, name) or name in IterDataPipe.functions or _is_decoder(name)
        else:
            is_taken = name_of(known.function) != name_of(function)
        if is_taken:
            raise ValueError(
                f"the name {name!r} is taken by a method or stage of datapipes, or by another decoder: choose another "
                f"name for {name_of(function)}"
            )

        def build(
            source: IterDataPipe[Sample],
            /,
            *,
            only: str | Iterable[str] | None = None,
            partial: bool = False,
            on_error: OnError = "raise",
            **arguments: Any,
        ) -> RegisteredDecoder:
            decode = functools.partial(function, **arguments) if arguments else function
            chain = DecoderChain([handle_extension(words, decode)], {}, only=only, partial=partial, basic=False)
            return RegisteredDecoder(source, chain=chain, on_error=on_error)

        build.__doc__ = function.__doc__
        registered_decoders[name] = handle_extension(words, function)
        IterDataPipe.register_function(name, build)
        return function

    return register


def _is_decoder(name: str) -> bool:
    try:
        find_decoder(name)
    except ValueError:
        return False
    return True


@register_stage("wds_encode")
class SampleEncoder(FunctionStage[Sample]):
    """Encodes the fields of samples, each by its extension (functional name: ``wds_encode``).

    This is the inverse of ``wds_decode``. Bytes are unchanged in any field. Other values are encoded by the keyword
    with the field's extension, or else by the field's last extension:

    - ``txt text transcript html htm``: str, to UTF-8
    - ``cls cls2 class count index inx id``: int
    - ``json jsn``, ``mp msgpack msg``, ``cbor``: any value of the format; the last two need the extras ``msgpack`` and
      ``cbor``
    - ``npy``: array or tensor; ``npz``: dict of them; ``ten tenbin tb``: one or a list of them
    - ``jpg jpeg img image png webp tif tiff ppm pgm pbm pnm``: an array (H, W) or (H, W, C), a tensor (H, W) or
      (C, H, W), of uint8 or of floats from 0 to 1, or a Pillow image. Gray arrays may be uint16 for ``png tif pgm``
      and bool for ``pbm``. JPEG has the quality 100, and WebP is lossless
    - ``pth``: tensors, and plain Python values that contain them
    - ``pyd pickle pkl``: rejected unless ``allow_pickle`` is true

    A field that ends in ``.gz`` is encoded by the rest of its name, and then compressed.

    Yields:
        dict: a new dict for each sample, with the same keys in the same order and bytes as values. Values of keys that
            start with ``__`` are unchanged.

    Args:
        source: yields samples.
        only: the names of the fields to encode, ``"jpg cls"`` or a list of them; the others are unchanged.
        allow_pickle: allow codecs whose data can run arbitrary code on decoding: ``pyd pickle pkl``, and ``pth`` with
            other objects.
        on_error: ``"raise"``; or, to skip the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        by_extension: functions from a value to bytes, such as ``pts=pack``; or options for Pillow's writer of an image
            format: ``jpg={"quality": 90}``.

    Raises:
        EncodeError: a value does not fit the field's name, or the field has no encoder; the message has the key, the
            field, the type found and the types accepted.
        UnsafeInputError: a field needs ``allow_pickle``.
        MissingDependencyError: a field needs a package that is not installed.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": 7, "meta.json": {"ok": True}, "jpg": b"..."}])
        >>> list(samples.wds_encode())
        [{'__key__': 'a', 'cls': b'7', 'meta.json': b'{"ok": true}', 'jpg': b'...'}]
    """

    is_one_to_one = True
    draws_globally = True
    function = staticmethod(convert_samples)

    def __init__(
        self,
        source: Iterable[Sample],
        /,
        *,
        only: str | Iterable[str] | None = None,
        allow_pickle: bool = False,
        on_error: OnError = "raise",
        **by_extension: FieldEncoder,
    ) -> None:
        refuse_handler(by_extension, "keywords are extensions, as in json=dump")
        chain = EncoderChain(by_extension, only=only, allow_pickle=allow_pickle)
        super().__init__(source, chain=chain, on_error=on_error)
