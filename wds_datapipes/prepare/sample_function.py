"""Samples that are made anew of files, by a function of the user, before they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wds_datapipes.codecs.decoding import Decoder, DecoderChain, decode_samples
from wds_datapipes.errors import MissingDependencyError, SampleSourceError, UnsafeCodecError
from wds_datapipes.fingerprint.values import fingerprint
from wds_datapipes.parallel.error_log import NOT_OF_A_SAMPLE
from wds_datapipes.types import Sample

__all__ = ["SampleMaker", "check_results"]


class SampleMaker:
    """Calls a function with each sample, whose fields are decoded before if that is wanted.

    Args:
        function: gets a sample and returns a sample, ``None`` to drop it, or several samples.
        decode: what decodes the fields before, as for ``wds_decode``; ``None`` leaves them bytes.

    Raises:
        ValueError: one of the words for decoders is none.

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
        #: What tells it from one that makes other samples.
        self.fingerprint = fingerprint(function, decode)

    def __call__(self, sample: Sample, origin: str) -> list[Sample]:
        """Return what is to be written of a sample; ``origin`` is where it comes from, for messages.

        Raises:
            SampleSourceError: it cannot be decoded, the function fails, or it returns what is no sample.
        """
        try:
            if self._chain is not None:
                [sample] = decode_samples([sample], self._chain)
            return check_results(self._function(sample), "it returns a sample, samples or None, and not")
        except (MemoryError, MissingDependencyError, UnsafeCodecError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NOT_OF_A_SAMPLE:
                raise
            name = getattr(self._function, "__name__", type(self._function).__name__)
            cause = f"{type(error).__name__}: {error}"
            raise SampleSourceError(f"{origin} cannot be made anew by {name}: {cause}") from error


def check_results(made: Any, rule: str) -> list[Sample]:
    """Return the samples that a function has returned: one, ``None`` or several.

    Raises:
        TypeError: it is no sample; the message begins with the rule, and ends with the type.
    """
    is_one = isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable)
    found: list[Any] = [] if made is None else [made] if is_one else list(made)
    for each in found:
        if not isinstance(each, Mapping):
            raise TypeError(f"{rule} {type(each).__name__}")
    return found
