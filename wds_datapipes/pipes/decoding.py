"""Stages that decode samples, and the ways to add more of them."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe

from wds_datapipes.codecs.decoding import Decoder, DecoderChain, decode_samples
from wds_datapipes.codecs.extensions import ByExtension, ExtensionDecoder, handle_extension, split_extensions
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.codecs.registry import name_decoder
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError, check_on_error, refuse_handler
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.types import Sample

__all__ = ["ImageDecoder", "RegisteredDecoder", "SampleDecoder", "handle_extension", "register_decoder"]

F = TypeVar("F", bound=Callable[[bytes], Any])


@register_stage("wds_decode")
class SampleDecoder(Stage[Sample]):
    """Decodes the fields of samples, each by its extension (functional name: ``wds_decode``).

    Fields ending in ``.gz`` are decompressed first. Then the first of these that answers gives the value: the keyword
    with the field's extension, the decoders in their order, and the basic table by the last extension:

    - ``txt text transcript html htm``: str, from UTF-8
    - ``cls cls2 class count index inx id``: int
    - ``json jsn``, ``mp msgpack msg``, ``cbor``: what they hold; the last two need the extras ``msgpack`` and ``cbor``
    - ``npy``: array; ``npz``: dict of arrays; ``ten tenbin tb``: list of arrays
    - ``pth``: what ``torch.save`` wrote, on the CPU, if it is tensors and plain Python values
    - ``pyd pickle pkl``: refused unless ``unsafe`` is true

    All other fields stay bytes, images, video and audio too unless a decoder for them is named.

    Yields:
        dict: a new one for each sample, with the same keys in the same order. Values of keys that begin with ``__`` are
            not touched.

    Args:
        source: samples, as ``group_samples`` yields them.
        decoders: an image spec (`ImageDecoder` has the table), ``"torch_video"``, ``"torch_audio"``, the name of a
            registered decoder, an `ImageDecoder`, what `handle_extension` makes, or a function ``(field, data)`` that
            gets the field's name without a leading dot (and without ``.gz``) and its bytes, and returns the value,
            ``None`` for a field that it leaves to the next decoder, or a `Continue`. Functions written for webdataset,
            which passes ``.png``, serve if they ask ``name.endswith(".png")``. A function that has decoded nothing
            when the samples end, or after 1,000 of them, is warned of.
        only: whole names of the fields to decode, ``"jpg cls"`` or a list of them; the others stay bytes.
        partial: let values pass that are not bytes, such as those decoded before; they are an error otherwise.
        unsafe: allow codecs that can run any code that is in the data: ``pyd pickle pkl``, and ``pth`` with other
            objects.
        on_error: ``"raise"``; or, to pass over the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        limits: what fields that are compressed within, such as ``json.gz`` and ``npz``, may expand to: ``member_bytes``
            and ``expansion`` of `ReadLimits` count.
        by_extension: functions ``bytes -> value``, such as ``json=parse``, before all other decoders.

    Raises:
        DecodeError: bytes are not what the field's name says, or expand to more than the limits; the message has the
            shard, key, field and decoder.
        UnsafeCodecError: a field needs ``unsafe``.
        MissingDependencyError: a field needs a package that is not installed.

    A subclass is a decoder with arguments or state. It sets `extensions`, defines ``decode(self, data)``, and has a
    constructor that passes ``source`` on; as a stage it decodes the fields with those extensions and passes the rest.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": b"7", "meta.json": b'{"ok": true}', "bin": b"x"}])
        >>> list(samples.wds_decode("rgb8", bin=len))
        [{'__key__': 'a', 'cls': 7, 'meta.json': {'ok': True}, 'bin': 1}]
    """

    is_stateless = True

    #: In a subclass: the extensions it decodes, as for `handle_extension`.
    extensions: str | Iterable[str] = ()

    def __init__(
        self,
        source: Iterable[Sample],
        /,
        *decoders: Decoder,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        unsafe: bool = False,
        on_error: OnError = "raise",
        limits: ReadLimits = DEFAULT_LIMITS,
        **by_extension: Callable[[bytes], Any],
    ) -> None:
        check_on_error(on_error)
        refuse_handler(by_extension, "keywords are extensions, as in json=parse")
        if self.extensions and (decoders or by_extension):
            raise TypeError(f"{type(self).__name__} decodes by itself, and takes no other decoders")
        self.source = source
        self.on_error = on_error
        # In an object of its own: torch pickles what is in tuples and dicts to find datapipes, and fails on a lambda.
        self._chain = DecoderChain(
            decoders,
            by_extension,
            only=only,
            partial=partial,
            unsafe=unsafe,
            basic=not self.extensions,
            limits=limits,
        )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.extensions:
            cls.extensions = split_extensions(cls.extensions)
            if cls.decode is SampleDecoder.decode:
                raise TypeError(f"{cls.__name__} sets extensions, and has to define decode(self, data) too")

    def decode(self, data: bytes) -> Any:
        """In a subclass: return the value of a field's bytes; ``None`` leaves the field as it is."""
        raise NotImplementedError(f"{type(self).__name__} sets no extensions, so it has nothing to decode by itself")

    def _own(self) -> tuple[ByExtension, ...]:
        return (handle_extension(self.extensions, self.decode),) if self.extensions else ()

    def __iter__(self) -> Iterator[Sample]:
        yield from decode_samples(self.source, self._chain.after(*self._own()), self.on_error, warn_unused=True)


class RegisteredDecoder(SampleDecoder):
    """The stage of a function that `register_decoder` has registered; it pickles as the function does.

    Args:
        source: samples.
        decoder: the function and its extensions.
        only, partial, on_error, limits: as for `SampleDecoder`.
    """

    def __init__(
        self,
        source: Iterable[Sample],
        /,
        decoder: ExtensionDecoder,
        *,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        on_error: OnError = "raise",
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        self.extensions = decoder.extensions
        super().__init__(source, only=only, partial=partial, on_error=on_error, limits=limits)
        self.decoder = decoder

    def _own(self) -> tuple[ByExtension, ...]:
        return (self.decoder,)


def register_decoder(name: str, extensions: str | Iterable[str]) -> Callable[[F], F]:
    """Register a function ``bytes -> value`` as a stage, and as a word of ``wds_decode``; for use as a decorator.

    From then on ``.name()`` exists on every datapipe, decodes the fields with those extensions, and passes the rest;
    its arguments are ``only``, ``partial``, ``on_error`` and ``limits``. ``.wds_decode("name")`` does so among other
    decoders. The decorator returns the function itself, so a pipeline pickles if the function does. Running the same
    code again replaces the function; a pipeline that was built before keeps the old one.

    Args:
        name: of the stage: a Python identifier that no datapipe has as a method.
        extensions: as for `handle_extension`: ``"jpg seg.png"`` or a list of such words.

    Raises:
        ValueError: the name cannot be used, or is taken.

    Examples:
        >>> @register_decoder("reversed_text", "rev")
        ... def reversed_text(data):
        ...     return data.decode()[::-1]
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([{"rev": b"olleh", "cls": b"7"}]).reversed_text())
        [{'rev': 'hello', 'cls': b'7'}]
        >>> list(IterableWrapper([{"rev": b"olleh", "cls": b"7"}]).wds_decode("reversed_text"))
        [{'rev': 'hello', 'cls': 7}]
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(f"a stage is called like a method, such as 'sketch', and not {name!r}")
    words = split_extensions(extensions)

    def register(function: F) -> F:
        decoder = handle_extension(words, function)
        registered = IterDataPipe.functions.get(name)
        if hasattr(IterDataPipe, name) or (registered is not None and not isinstance(registered, _Registration)):
            raise ValueError(
                f"the stage name {name!r} is taken: every datapipe of torch or another package has it already. "
                f"Choose another name for the decoder"
            )
        name_decoder(name, decoder)
        IterDataPipe.register_function(name, _Registration(decoder))
        return function

    return register


class _Registration:
    """What a registered name calls: ``datapipe.name(...)``."""

    def __init__(self, decoder: ExtensionDecoder) -> None:
        self.decoder = decoder
        self.__doc__ = decoder.function.__doc__

    def __call__(self, source: IterDataPipe[Sample], /, **options: Any) -> RegisteredDecoder:
        return RegisteredDecoder(source, self.decoder, **options)
