"""`external_source` feeds the samples of a pipeline to an NVIDIA DALI pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterableWrapper, IterDataPipe
from wds_datapipes.errors import EmptySourceError, EncodeError, StateError
from wds_datapipes.extras import require
from wds_datapipes.loading.data_parallel_group import Distributed
from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.shards.shard_list import ShardList

dali = require("nvidia.dali", extra="dali", purpose="feed a DALI pipeline")

Cycle: TypeAlias = Literal["quiet", "raise", "no"]
#: The values of a sample's fields, one for each input.
Arrays: TypeAlias = tuple[Any, ...]

#: The images to read by default.
IMAGES = "jpg;jpeg;img;image;pbm;pgm;png"


def external_source(
    dp: IterDataPipe[Any] | None = None,
    *,
    paths: str | Sequence[str] | None = None,
    extensions: str | Sequence[str] = IMAGES,
    random_shuffle: bool = False,
    initial_fill: int = 256,
    seed: int = 0,
    pad_last_batch: bool = False,
    read_ahead: bool = False,
    cycle: Cycle = "quiet",
    distributed: Distributed = None,
    **options: Any,
) -> Any:
    """Return the inputs of a DALI pipeline, fed with the samples of a pipeline of this package.

    Call it instead of ``fn.readers.webdataset``, in a function that ``pipeline_def`` decorates. Bytes arrive in DALI as
    arrays of ``uint8``, which ``fn.decoders`` decode; arrays, tensors and numbers arrive unchanged. The samples come in
    the order of the pipeline, each once per epoch. With DALI's checkpoints, a run resumes with the next batch.

    Args:
        dp: a pipeline of samples. Its ``.sharding_filter()`` splits the shards between ranks.
        paths: instead of ``dp``, a pattern or a list of shards, as for `ShardList`.
        extensions: the fields of each sample. Alternatives are separated by ``;``. A string defines a single input, and
            a sequence defines one for each element.
        random_shuffle: shuffle the samples through a buffer, with a different order in each epoch.
        initial_fill: the size of this buffer, in samples.
        seed: the seed of all random orders of the pipeline, the same on all ranks.
        pad_last_batch: repeat the last sample of an epoch until its last batch is complete.
        read_ahead: read all samples into memory now, and none later.
        cycle: what follows the last sample. ``"quiet"`` continues with the first sample of the next epoch, in the same
            batch. ``"raise"`` raises ``StopIteration``; after ``reset()`` of the DALI pipeline, the next epoch follows.
            ``"no"`` raises ``StopIteration``, even after ``reset()``.
        distributed: the ranks that share the data, as for `StatefulShards`.
        options: further arguments of ``nvidia.dali.fn.external_source``, such as ``layout`` and ``device``.

    Returns:
        A ``DataNode``, or a tuple with one for each of ``extensions``.

    Raises:
        TypeError: an argument has the wrong type; or both ``dp`` and ``paths`` are given, or neither.
        ValueError: an argument has an invalid value.
        RuntimeError: the function is called outside of one that ``pipeline_def`` decorates.
        MissingFieldError: during a run, a sample lacks a field.
        EncodeError: during a run, DALI cannot hold a value.
        EmptySourceError: during a run, an epoch has no samples.
        StateError: during a run, a checkpoint of DALI was restored for a pipeline with ``with_epoch``.
        MissingDependencyError: this module is imported without DALI.

    Examples:
        >>> from nvidia.dali import pipeline_def
        >>> from wds_datapipes.integrations.dali import external_source
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": str(n), "cls": str(n)} for n in range(5)])
        >>> @pipeline_def(batch_size=2, num_threads=1, device_id=None)
        ... def classes():
        ...     return external_source(paths=shard, extensions="cls", cycle="raise")
        >>> pipe = classes()
        >>> [bytes(value) for value in pipe.run()[0]]
        [b'0', b'1']
    """
    check_choice("cycle", cycle, Cycle)
    running = dali.Pipeline.current()
    if running is None:
        raise RuntimeError("external_source must be called in a function that nvidia.dali.pipeline_def decorates")
    fields = [extensions] if isinstance(extensions, str) else list(extensions)
    if not fields:
        raise ValueError("extensions must name at least one field")
    samples = _samples(dp, paths).to_tuple("__key__", *fields)
    if read_ahead:
        samples = IterableWrapper(list(StatefulShards(samples, seed=seed, distributed=distributed)), deepcopy=False)
        distributed = False  # these samples are the share of this rank
    if random_shuffle:
        samples = samples.shuffle_samples(initial_fill)
    data = StatefulShards(samples, seed=seed, distributed=distributed)
    size = running.max_batch_size
    reader = DaliReader(data, fields, cycle, size if pad_last_batch else 1)

    def next_batch(info: Any) -> tuple[list[Any], ...]:
        found = reader.read(info.epoch_idx, info.iteration * size, size)
        return tuple(map(list, zip(*found, strict=True)))

    nodes = dali.fn.external_source(next_batch, num_outputs=len(fields), batch=True, batch_info=True, **options)
    return nodes[0] if isinstance(extensions, str) else tuple(nodes)


def _samples(dp: IterDataPipe[Any] | None, paths: str | Sequence[str] | None) -> Any:
    """Return the pipeline, or one for the shards at some paths."""
    if (dp is None) == (paths is None):
        raise TypeError("external_source takes a pipeline of samples, or paths= of shards: pass one of them")
    if paths is not None:
        return ShardList(paths).sharding_filter().load_wds_shards().group_samples()
    if not isinstance(dp, IterDataPipe):
        raise TypeError(f"external_source takes a pipeline of samples, not {dp!r:.200}; paths= takes names of shards")
    return dp


class DaliReader:
    """Reads samples by epoch and position, without reading any of them again if they are requested in order.

    Args:
        data: yields the values of the key and of some fields of each sample.
        fields: the names of the fields.
        cycle: as for `external_source`.
        multiple: samples of an epoch are padded to a multiple of this number.
    """

    def __init__(self, data: StatefulShards, fields: Sequence[str], cycle: Cycle, multiple: int) -> None:
        self._data = data
        self._fields = fields
        self._cycle = cycle
        self._multiple = multiple
        self._samples: Iterator[Arrays] = iter(())
        self._next = -1, 0

    def read(self, epoch: int, position: int, count: int) -> list[Arrays]:
        """Return up to ``count`` samples of an epoch from a position on.

        Raises:
            StopIteration: there are none.
            StateError: samples would have to be read again, but each epoch continues the previous one.
        """
        if (epoch, position) != self._next:
            follows = (epoch, position) == (self._next[0] + 1, 0)
            if not follows and (epoch > 0 or self._next[0] >= 0) and PipelineGraph(self._data.pipe).spans_epochs:
                raise StateError(
                    "A DALI checkpoint cannot be restored into a pipeline with with_epoch, because each epoch "
                    'continues the previous one. Remove with_epoch, and pass cycle="quiet"'
                )
            self._samples = self._samples_from(epoch)
            next(islice(self._samples, position, position), None)  # skip to a restored checkpoint
        found = list(islice(self._samples, count))
        self._next = epoch, position + count  # even past the last sample, because DALI may request more
        if not found:
            raise StopIteration
        return found

    def _samples_from(self, epoch: int) -> Iterator[Arrays]:
        """Yield the samples of an epoch, and those of the epochs that follow without a reset."""
        if epoch > 0 and self._cycle == "no":
            return
        while True:
            self._data.set_epoch(epoch)
            count, arrays = 0, ()
            for key, *values in self._data:
                count += 1
                arrays = tuple(_as_array(value, key, field) for value, field in zip(values, self._fields, strict=True))
                yield arrays
            if not count:
                raise EmptySourceError(
                    f"Epoch {epoch} has no samples for DALI on this rank. Give each rank a shard with samples"
                )
            yield from repeat(arrays, -count % self._multiple)
            if self._cycle != "quiet":
                return
            epoch += 1


def _as_array(value: Any, key: str, field: str) -> Any:
    """Return a value as an array that DALI can copy."""
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.numpy()  # DALI would ask torch for a CUDA stream
    if isinstance(value, np.ndarray | torch.Tensor):
        return value
    if isinstance(value, bool | int | float | np.generic):
        return np.asarray(value)
    raise EncodeError(
        f"Field {field!r} of sample {key!r} is of type {type(value).__name__}, which DALI cannot hold: convert it to "
        "bytes, an array or a number first"
    )
