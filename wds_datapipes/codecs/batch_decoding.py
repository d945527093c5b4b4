"""Decode batches of samples, with all images of a field in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from wds_datapipes.codecs.crops import GLOBAL_RNG
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.field_chain import name_field
from wds_datapipes.errors import DecodeError, SampleError
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy, OnError
from wds_datapipes.samples.fields import not_a_sample_error
from wds_datapipes.samples.sampling import SampleSeeds
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from wds_datapipes.codecs.images import ImageDecoder


def decode_batches(
    source: Iterable[Sequence[Sample]],
    chain: DecoderChain,
    collate: Callable[[list[Any]], Any],
    *,
    seeds: SampleSeeds | None = None,
    num_threads: int = 1,
    on_error: OnError | CountedErrors = "raise",
) -> Iterator[dict[str, Any]]:
    """Yield a dict of columns for each batch, except for batches whose samples all fail.

    Args:
        source: lists of samples.
        chain: decodes the fields.
        collate: collates dicts of all fields but the images.
        seeds: the seeds of random crops; by default, the module ``random`` draws their numbers.
        num_threads: the number of threads that decode images; with 1, the calling thread decodes them.
        on_error: what to do with samples that fail.
    """
    policy = ErrorPolicy(on_error, chain.stage)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=chain.stage) if num_threads > 1 else None
    with pool or nullcontext():
        for batch in source:
            if not isinstance(batch, list | tuple):
                raise TypeError(
                    f"{chain.stage} needs lists of samples, but got a {type(batch).__name__}: put it after .batch()"
                )
            decoding = _BatchDecoding(batch, chain, seeds, pool)
            if kept := decoding.finish(policy):
                yield decoding.columns(kept, collate)
            if policy.has_ended:
                break
    policy.finish()


class _BatchDecoding:
    """Decodes one batch: images in threads, other fields in `finish`."""

    def __init__(
        self, batch: Sequence[Sample], chain: DecoderChain, seeds: SampleSeeds | None, pool: Executor | None
    ) -> None:
        self._batch = batch
        self._chain = chain
        self._rows: list[dict[str, Any]] = [{} for _ in batch]
        self._images: dict[str, _ImageColumn] = {}
        for index, sample in enumerate(batch):
            if not isinstance(sample, dict):
                raise not_a_sample_error(chain.stage, sample)
            seed = None if seeds is None else seeds.derive(sample)
            for field in sample:
                if (column := self._images.get(field)) is None:
                    if (decoder := chain.find_image_decoder(field)) is None:
                        continue
                    column = self._images[field] = _ImageColumn(chain, decoder, field, len(batch))
                column.add(index, sample, seed, pool)

    def finish(self, policy: ErrorPolicy) -> list[int]:
        """Decode the other fields, apply the error policy, and return the indices of the samples to keep."""
        kept = []
        for index, sample in enumerate(policy.counted(self._batch)):
            field = ""
            try:
                for field in sample:
                    if field in self._images:
                        self._images[field].finish(index, sample)
                    else:
                        self._rows[index][field] = self._chain.convert_field(sample, field)
                kept.append(index)
            except SampleError as error:
                if not policy.handle(error, sample, field=field):
                    break
        return kept

    def columns(self, kept: list[int], collate: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Return the columns of the given samples, in the order of their fields."""
        first = self._batch[kept[0]]
        for index in kept:
            if (sample := self._batch[index]).keys() != first.keys():
                raise DecodeError(
                    f"{self._chain.stage} needs samples with the same fields in a batch, but sample "
                    f"{first.get('__key__')!r} has {list(first)}, and sample {sample.get('__key__')!r} has "
                    f"{list(sample)}. Select or rename fields before .batch()"
                )
        others = collate([self._rows[index] for index in kept]) if self._rows[kept[0]] else {}
        return {field: self._images[field].tensor(kept) if field in self._images else others[field] for field in first}


class _ImageColumn:
    """The images of one field in a batch, which are decoded into one tensor.

    With a crop, the size of the images is known, and each is decoded directly into its place. Otherwise, `finish`
    copies them there, and the first one determines their size.
    """

    def __init__(self, chain: DecoderChain, decoder: ImageDecoder, field: str, count: int) -> None:
        self._chain, self._decoder, self._field, self._count = chain, decoder, field, count
        self._jobs: dict[int, Callable[[], NDArray[Any] | None]] = {}
        self._size: tuple[int, int] | None = None
        if decoder.crop is not None:
            self._allocate(decoder.crop.shape)

    def add(self, index: int, sample: Sample, seed: int | None, pool: Executor | None) -> None:
        """Decode an image in a thread of the pool, or later, in `finish`, if there is no pool."""
        read = partial(self._read, index, sample, seed)
        self._jobs[index] = read if pool is None else pool.submit(read).result

    def finish(self, index: int, sample: Sample) -> None:
        """Wait for an image, and raise its error if decoding failed."""
        pixels = self._jobs.pop(index)()
        if pixels is None:
            return
        height, width = pixels.shape[:2]
        if self._size is None:
            self._allocate((height, width))
        elif (height, width) != self._size:
            raise DecodeError(
                f"{name_field(sample, self._field)} is an image of {height} x {width} pixels, but the batch has images "
                f"of {self._size[0]} x {self._size[1]}. Give the ImageDecoder a crop, such as RandomResizedCrop(224), "
                f"or use wds_decode, and resize the images before .batch()"
            )
        self._pack(index, pixels)

    def tensor(self, kept: list[int]) -> torch.Tensor:
        """Return the images of the given samples."""
        return self._tensor if len(kept) == self._count else self._tensor[kept]

    def _allocate(self, size: tuple[int, int]) -> None:
        import torch

        from wds_datapipes.codecs.pixels import packed_shape  # imports Pillow

        container, mode, floats = self._decoder.result
        shape = (self._count, *packed_shape(mode, size, container))
        self._size = size
        self._tensor = torch.empty(shape, dtype=torch.float32 if floats else torch.uint8)
        self._array = self._tensor.numpy()

    def _read(self, index: int, sample: Sample, seed: int | None) -> NDArray[Any] | None:
        """Decode an image, directly into its place if the tensor exists."""
        rng = GLOBAL_RNG if seed is None else Random(seed)
        pixels = self._chain.read_pixels(sample, self._field, self._decoder, rng)
        if self._decoder.crop is None:
            return pixels
        self._pack(index, pixels)
        return None

    def _pack(self, index: int, pixels: NDArray[Any]) -> None:
        from wds_datapipes.codecs.pixels import pack  # imports Pillow

        container, mode, _ = self._decoder.result
        pack(pixels, mode, container, self._array[index])
