"""The stage ``.wds_encode()``: encode the fields of samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from wds_datapipes.codecs.encoding import EncoderChain, FieldEncoder
from wds_datapipes.codecs.field_chain import convert_samples
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    pass


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
