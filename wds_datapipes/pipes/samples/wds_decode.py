"""The stage ``.wds_decode()``: decode the fields of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from wds_datapipes.codecs.decoding import Decoder, DecoderChain
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.samples.seeded_samples import SeedingStage
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    pass
from wds_datapipes.pipes.samples.decoding import DecodingStage, decode_samples


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
