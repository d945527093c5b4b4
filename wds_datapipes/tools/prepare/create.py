"""Create shards from a source of samples: plan them first, then write them in parallel."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any

from wds_datapipes.arguments import check_optional_integer, checks_calls
from wds_datapipes.codecs.decoding import Decoder
from wds_datapipes.errors import EmptySourceError, SampleSourceError, WdsError, WorkerDiedError, cause_of
from wds_datapipes.io.compression.formats import find_compression
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.signatures import spells_hints
from wds_datapipes.system import default_workers
from wds_datapipes.tools.prepare.job_options import DEFAULT_JOB, JobOptions
from wds_datapipes.tools.prepare.sample_spec import Source, read_sample
from wds_datapipes.tools.prepare.shard_plan import Plan, SpecFile, make_plan
from wds_datapipes.tools.prepare.shard_run import ConvertedShard, SampleWork, write_shards
from wds_datapipes.tools.prepare.subset import check_rekey
from wds_datapipes.types import Sample
from wds_datapipes.writing.options import DEFAULT_WRITING, WriteOptions
from wds_datapipes.writing.shard_names import NUMBER, check_pattern


@dataclass(frozen=True)
class SourceSamples:
    """The samples of planned shards."""

    plan: Plan
    storage_options: Mapping[str, Any] | None = field(repr=False)

    @property
    def items(self) -> range:
        """The numbers of the shards."""
        return range(len(self.plan.ends))

    def version(self, item: int) -> str:
        """Return a digest of the keys and files of a shard's samples."""
        stamps = array("Q", (self.plan.stamps[at] for at in self.plan.shard(item)))
        return hashlib.sha256(stamps.tobytes()).hexdigest()

    def read(self, item: int, on_error: OnError) -> Iterator[Sample]:
        """Yield the samples of a shard."""
        policy = ErrorPolicy(on_error, "create_shards")
        for at in self.plan.shard(item):
            try:
                yield self._read_sample(at)
            except SampleSourceError as error:  # noqa: PERF203  each sample may fail
                policy.handle(error)

    def _read_sample(self, at: int) -> Sample:
        spec = self.plan.specs.read(at)
        sample = read_sample(spec, self.storage_options)
        size = sum(len(sample[field]) for field in spec.parts)
        planned = self.plan.payloads[at]
        if planned not in (-1, size):
            raise SampleSourceError(
                f"{spec.location} has changed since it was measured: its fields had {planned} bytes, but now have "
                f"{size}. Wait until nothing writes to these files and try again"
            )
        return {**sample, "__url__": spec.location}


@spells_hints
@checks_calls
def create_shards(
    source: Source,
    output: str | os.PathLike[str],
    *,
    maxcount: float = 100_000,
    maxsize: float = 3e9,
    function: Callable[[Sample], Sample | Iterable[Sample] | None] | None = None,
    decode: Sequence[Decoder] | None = None,
    rekey: str = "",
    seed: int | None = None,
    on_error: OnError = "raise",
    num_workers: int | None = None,
    options: WriteOptions = DEFAULT_WRITING,
    job: JobOptions = DEFAULT_JOB,
) -> list[ConvertedShard]:
    """Write the samples of a source to shards in parallel.

    All samples are first measured and assigned to shards, so each shard has the same bytes for any number of workers,
    and the same as from `ShardWriter`. A shard appears once it is complete: after an error or Ctrl-C, there are only
    finished shards, no partial ones.

    Args:
        source: the samples.
        output: a pattern such as ``%06d.tar``. Without a placeholder for the number, a single archive of any size is
            written, and ``maxcount`` and ``maxsize`` cannot be used. Local folders are created.
        maxcount: the maximum number of samples in a shard.
        maxsize: the maximum size of a shard in bytes, including headers and before compression; a single sample may be
            larger. The output of commands counts as 0 bytes; with a function, the size of its input counts.
        function: maps each sample to a sample, to ``None`` to drop it, or to several samples. Values are encoded by the
            names of their fields. Without a function, files are written unchanged.
        decode: decode the fields first, with these decoders, as in ``wds_decode``; ``[]`` uses only the basic decoders.
            By default, the function gets bytes.
        rekey: a pattern for new keys with ``{number}``, the position in the source, ``{key}``, and ``{name}``, the last
            part of the key.
        seed: shuffle the samples with this seed.
        on_error: how to handle samples that cannot be written, as in all stages. A sample skipped during writing is
            missing from its shard; other shards are not affected. A handler is called in this process and cannot end a
            shard.
        num_workers: the number of worker processes, by default one per CPU; 0 writes in this process.
        options: how the bytes of the shards are written: ``WriteOptions(compress=, encoder=, index=...)``.
        job: how the work is done: ``JobOptions(journal=, retries=, remove_old=, limits=...)``.

    Returns:
        All shards, in order.

    Raises:
        EmptySourceError: the source has no samples.
        SampleSourceError: the files of a sample cannot be read, or the function fails.
        EncodeError: a sample would not be read back unchanged.
        ShardWriteError: a shard cannot be written.
        WorkerDiedError: a process ended without a result.
        ValueError: an argument is invalid.

    Examples:
        >>> from pathlib import Path
        >>> from wds_datapipes.tools.prepare.sources.image_folder import find_images
        >>> for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        ...     Path("pets", name).parent.mkdir(parents=True, exist_ok=True)
        ...     _ = Path("pets", name).write_bytes(b"not really an image")
        >>> [(shard.info.url, shard.info.samples) for shard in create_shards(find_images("pets"), "%d.tar", maxcount=2)]
        [('0.tar', 2), ('1.tar', 1)]
        >>> [(sample["__key__"], sample["cls"]) for sample in ShardList("1.tar").load_wds_shards().group_samples()]
        [('dog/1', b'1')]
    """
    check_on_error(on_error)
    if rekey:
        check_rekey(rekey, ("number", "key", "name"))
    text = os.fspath(output)
    find_compression(options.compress, text)  # before all files are measured
    is_one = not NUMBER.search(text)
    if is_one:
        if (maxcount, maxsize) != (100_000, 3e9):  # the defaults
            raise ValueError(
                f"maxcount and maxsize limit numbered shards, but {redact(text)!r} is one archive of any size. Put a "
                "placeholder for the number into the name, as in out-%06d.tar"
            )
        maxcount, maxsize = 2**62, float("inf")
    else:
        check_pattern(text, maxcount=maxcount, maxsize=maxsize)
    check_optional_integer("num_workers", num_workers, 0)
    if decode is not None and function is None:
        raise ValueError("decode requires a function for the decoded values. Without one, files are written unchanged")
    if function is None and options.encoder is True:
        options = replace(options, encoder=False)  # files are written unchanged
    store = options.storage_options if job.input_options is None else job.input_options
    policy = ErrorPolicy(on_error, "create_shards")
    with closing(SpecFile()) as specs:
        total = length_hint(source) or None
        with ProgressMeter("Measuring", total, shown=job.progress, unit="samples") as meter:
            plan = make_plan(
                source,
                specs,
                maxcount=maxcount,
                maxsize=maxsize,
                rekey=rekey,
                seed=seed,
                key_rule=options.key_rule,
                policy=policy,
                storage_options=store,
                on_measured=lambda samples, size: meter.add(samples=samples, size=size),
            )
        if not plan.order:
            raise EmptySourceError(f"The source has no samples to write to {text!r}, or none that can be written")
        outputs = [text if is_one else text % number for number in range(len(plan.ends))]

        def error_of(failures: Mapping[int, BaseException]) -> BaseException:
            ((number, failure),) = failures.items()
            if isinstance(failure, WdsError) and not isinstance(failure, WorkerDiedError):
                return failure
            kind = WorkerDiedError if isinstance(failure, WorkerDiedError) else SampleSourceError
            where = "; ".join([*getattr(failure, "__notes__", ()), f"while writing {redact(outputs[number])}"])
            return kind(cause_of(failure), f" ({where}). Finished shards remain")

        return write_shards(
            SourceSamples(plan, store),
            outputs,
            text,
            SampleWork(function, decode),
            policy,
            options=options,
            job=job,
            journal=job.journal_of(text, by_default=False),
            if_changed="redo",
            error_of=error_of,
            stops=True,
            label="Writing",
            # A single archive may be standard output.
            num_workers=0 if is_one or (num_workers is None and default_workers() == 1) else num_workers,
        )
