"""The stage ``.decode_batch()``: decode, collate and batch samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import default_collate

from wds_datapipes.arguments import check_integer
from wds_datapipes.codecs.batch_decoding import decode_batches
from wds_datapipes.codecs.decoding import Decoder, DecoderChain
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError, refuse_handler
from wds_datapipes.pipes.samples.seeded_samples import SeedingStage
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    pass
from wds_datapipes.pipes.samples.decoding import DecodingStage


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
    argument_uses: ClassVar = {"num_threads": "ignored"}

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
