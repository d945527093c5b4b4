"""Write planned shards, in this process or in forked ones."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wds_datapipes.codecs.decoding import Decoder, DecoderChain, decode_samples
from wds_datapipes.errors import EncodeError, MissingDependencyError, SampleSourceError, UnsafeInputError
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.io.openers import redact
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.parallel.error_log import HOST_ERRORS
from wds_datapipes.parallel.executors import defer_exit
from wds_datapipes.prepare.plan import Plan, get_rekeyed_spec
from wds_datapipes.prepare.sample_spec import Source, read_sample
from wds_datapipes.prepare.shard_run import WrittenShard
from wds_datapipes.types import Sample
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["SampleMaker", "ShardMaker", "check_results"]


class ShardMaker:
    """Writes the shards of a plan, in this process or in forked ones."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        outputs: list[str],
        rekey: str,
        make: SampleMaker | None,
        writing: Mapping[str, Any],
        on_error: OnError,
    ) -> None:
        self._source, self._plan, self._outputs, self._rekey, self._make = source, plan, outputs, rekey, make
        self._writing, self._raises = writing, on_error == "raise"

    def __call__(self, number: int, _attempt: str) -> WrittenShard:
        """Write a shard, and return it with the errors of skipped samples."""
        skipped: list[Exception] = []
        with defer_exit():
            shard = TarWriter(self._outputs[number], **self._writing)
        with shard:
            for at in self._plan.shard(number):
                try:
                    self._write(shard, at)
                except (SampleSourceError, EncodeError) as error:  # noqa: PERF203  each sample may fail
                    if self._raises:
                        raise
                    skipped.append(error)
        assert shard.info is not None  # noqa: S101  it was closed without an error
        return WrittenShard(shard.info, shard.info.samples + len(skipped), len(skipped), errors=tuple(skipped))

    def describe_output(self, number: int) -> str:
        """Return the URL of a shard for messages."""
        return redact(self._outputs[number])

    def compute_identity(self, number: int) -> str:
        """Return a digest of the samples of a shard and the options that it is written with."""
        settings = {
            name: value for name, value in sorted(self._writing.items()) if name not in ("storage_options", "key_rule")
        }
        if self._make is not None:
            settings["function"] = self._make.fingerprint
        members = self._plan.shard(number)
        stamps = array("Q", (self._plan.stamps[at] for at in members))
        digest = hashlib.sha256(repr((settings, self._rekey)).encode())
        digest.update(members.tobytes())
        digest.update(stamps.tobytes())
        return digest.hexdigest()

    def _write(self, shard: TarWriter, at: int) -> None:
        spec = get_rekeyed_spec(self._source, at, self._rekey)
        sample = read_sample(spec)
        size = sum(len(sample[field]) for field in spec.parts)
        planned = self._plan.payloads[at]
        if planned not in (-1, size):
            raise SampleSourceError(
                f"{spec.location} has changed since it was measured: its fields had {planned} bytes, and now have "
                f"{size}. Wait until nothing writes to these files, and try again"
            )
        made = [sample] if self._make is None else self._make(sample, spec.location)
        for packed in [shard.pack(each) for each in made]:  # all or none
            shard.append(packed)


class SampleMaker:
    """Applies a user function to samples, after decoding their fields if requested.

    Args:
        function: maps a sample to a sample, ``None`` to drop it, or several samples.
        decode: decoders for the fields, as in ``wds_decode``; ``None`` passes bytes.

    Raises:
        ValueError: a decoder has an unknown name.

    Examples:
        >>> make = SampleMaker(lambda sample: {**sample, "cls": sample["cls"] + 1}, [])
        >>> make({"__key__": "a", "cls": b"6"}, "a.jpg")
        [{'__key__': 'a', 'cls': 7}]
    """

    def __init__(
        self, function: Callable[[Sample], Sample | Iterable[Sample] | None], decode: Sequence[Decoder] | None
    ) -> None:
        self._function = function
        self._chain = None if decode is None else DecoderChain(decode, {})
        #: Identifies the function and its decoders.
        self.fingerprint = fingerprint(function, decode)

    def __call__(self, sample: Sample, location: str) -> list[Sample]:
        """Return the samples to write; ``location`` is the origin of the sample for messages.

        Raises:
            SampleSourceError: decoding or the function fails, or the function returns something other than samples.
        """
        try:
            if self._chain is not None:
                [sample] = decode_samples([sample], self._chain)
            return check_results(self._function(sample), "it must return a sample, samples or None, not")
        except (MemoryError, MissingDependencyError, UnsafeInputError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in HOST_ERRORS:
                raise
            name = getattr(self._function, "__name__", type(self._function).__name__)
            cause = f"{type(error).__name__}: {error}"
            raise SampleSourceError(f"{name} failed on {location}: {cause}") from error


def check_results(made: Any, rule: str) -> list[Sample]:
    """Normalize the result of a function (a sample, ``None`` or several samples) to a list.

    Raises:
        TypeError: the result is not a sample; the message is ``rule`` followed by the type.
    """
    is_one = isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable)
    found: list[Any] = [] if made is None else [made] if is_one else list(made)
    for each in found:
        if not isinstance(each, Mapping):
            raise TypeError(f"{rule} {type(each).__name__}")
    return found
