"""The stage ``.log_samples()``: log samples or their keys."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from wds_datapipes.arguments import check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.epoch import Epoch
from wds_datapipes.pipes.instance import instance_of_process
from wds_datapipes.pipes.stage import CountingStage
from wds_datapipes.samples.sample_log import LogTarget, log_samples


class SampleLogger(CountingStage[Any]):
    """Log a summary of some samples, and the positions of all (functional name: ``log_samples``).

    The summary shows the type, the shape or length, and the start of each value. Samples are counted per worker and
    epoch.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields samples, or anything else.
        first: the number of samples to log at the start.
        every: after that, log each sample whose number, from 1, is a multiple of this.
        logger: a ``logging.Logger``, which gets records of the level INFO; or ``"stderr"`` or ``"stdout"``. The default
            is the logger ``wds_datapipes``, which shows nothing until the program configures logging, for example by
            ``logging.basicConfig(level="INFO")``.
        positions: a folder for a log of the positions of all samples, from which `explain` and ``wds-datapipes steps``
            determine the samples of each step of a stream. A file for each epoch and worker has 8 bytes per sample;
            the ranks may share the folder. It requires a loader that counts epochs; put it right before ``.batch()``.

    Raises:
        MissingSidecarError: ``positions`` cannot be written, or lacks samples from before a resume.
        RuntimeError: no loader counts the epochs, or the samples have no positions.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "jpg": b"..."}, {"__key__": "b", "jpg": b"..."}])
        >>> _ = list(samples.log_samples(first=1, logger="stdout"))
        log_samples: item 0 of worker 0, rank 0
            __key__: str of 1: 'a'
            jpg: bytes of 3: b'...'
    """

    function = staticmethod(log_samples)
    current_epoch: Epoch | None = None

    def __init__(
        self,
        source: IterDataPipe[Any],
        *,
        first: int = 3,
        every: int | None = None,
        logger: LogTarget | None = None,
        positions: str | os.PathLike[str] | None = None,
    ) -> None:
        check_integer("first", first, 0)
        check_optional_integer("every", every, 1)
        target: Any = logging.getLogger("wds_datapipes") if logger is None else logger
        if not isinstance(target, logging.Logger) and not (isinstance(target, str) and target in ("stdout", "stderr")):
            raise TypeError(f'logger must be a logging.Logger, "stderr" or "stdout", not {logger!r}')
        super().__init__(source, target=target, first=first, every=every)
        self.position_log = None if positions is None else Path(positions)

    def position_log_folder(self) -> Path | None:
        """Return the folder in which it logs the positions of samples; None if it logs none."""
        return self.position_log

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function, with the rank and worker from torch or from stages that split.

        Raises:
            RuntimeError: there is no log without the number of the epoch and the positions of samples.
        """
        instance = instance_of_process(self)
        options, path = super().function_options(), self.position_log
        epoch, self.current_epoch = self.current_epoch, None
        if path is not None:
            if epoch is None or options["position"] is None:
                raise RuntimeError(
                    "log_samples(positions=) needs samples from shards, and StatefulShards or a ShardReadingService "
                    "that counts epochs. Put it after .mix_samples() and .with_epoch(), which restart their sources"
                )
            name = f"{instance.rank}of{instance.ranks}-{instance.worker}of{instance.workers}"
            path = path / f"{epoch.first:016x}" / f"{epoch.number:06}-{name}.positions"
        return {**options, "instance": instance, "positions": path}
