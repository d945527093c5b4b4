"""The stage that encodes samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wds_datapipes.codecs.encoding import EncoderChain, FieldEncoder, encode_samples
from wds_datapipes.on_error.policy import OnError, check_on_error, refuse_handler
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.types import Sample

__all__ = ["SampleEncoder"]


@register_stage("wds_encode")
class SampleEncoder(Stage[Sample]):
    """Encodes the fields of samples, each by its extension (functional name: ``wds_encode``).

    It is what ``wds_decode`` is the reverse of. Bytes are never touched, whatever their field is called. Other values
    go to the keyword with the field's extension, and else by their last extension to this table:

    - ``txt text transcript html htm``: str, to UTF-8
    - ``cls cls2 class count index inx id``: int
    - ``json jsn``, ``mp msgpack msg``, ``cbor``: what these hold; the last two need the extras ``msgpack`` and ``cbor``
    - ``npy``: array or tensor; ``npz``: dict of these; ``ten tenbin tb``: one, or a list of these
    - ``jpg jpeg img image png webp tif tiff ppm pgm pbm pnm``: an array (H, W) or (H, W, C), a tensor (H, W) or
      (C, H, W), of uint8 or of floats from 0 to 1, or a Pillow image. Gray arrays may be uint16 for ``png tif pgm``
      and bool for ``pbm``. JPEG is written with the quality 100, and WebP without loss
    - ``pth``: tensors, and plain Python values that hold them
    - ``pyd pickle pkl``: refused unless ``unsafe`` is true

    A field that ends in ``.gz`` is encoded by the rest of its name, and compressed.

    Yields:
        dict: a new one for each sample, with the same keys in the same order and bytes as values. Values of keys that
            begin with ``__`` are not touched.

    Args:
        source: samples.
        only: whole names of the fields to encode, ``"jpg cls"`` or a list of them; the others stay as they are.
        unsafe: allow codecs whose data can run any code when it is decoded: ``pyd pickle pkl``, and ``pth`` with other
            objects.
        on_error: ``"raise"``; or, to pass over the whole sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.
        by_extension: functions from a value to bytes, such as ``pts=pack``; or options for Pillow's writer of an image
            format: ``jpg={"quality": 90}``.

    Raises:
        EncodeError: a value is not what the field's name says, or nothing encodes such fields; the message has the
            key, the field, what was found and what is accepted.
        UnsafeCodecError: a field needs ``unsafe``.
        MissingDependencyError: a field needs a package that is not installed.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": 7, "meta.json": {"ok": True}, "jpg": b"..."}])
        >>> list(samples.wds_encode())
        [{'__key__': 'a', 'cls': b'7', 'meta.json': b'{"ok": true}', 'jpg': b'...'}]
    """

    is_stateless = True

    def __init__(
        self,
        source: Iterable[Sample],
        /,
        *,
        only: str | Iterable[str] | None = None,
        unsafe: bool = False,
        on_error: OnError = "raise",
        **by_extension: FieldEncoder,
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        refuse_handler(by_extension, "keywords are extensions, as in json=dump")
        self.source = source
        self.on_error = on_error
        # In an object of its own: torch pickles what is in tuples and dicts to find datapipes, and fails on a lambda.
        self._chain = EncoderChain(by_extension, only=only, unsafe=unsafe)

    def __iter__(self) -> Iterator[Sample]:
        yield from encode_samples(self.source, self._chain, self.on_error)
