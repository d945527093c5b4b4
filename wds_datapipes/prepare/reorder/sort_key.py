"""What samples are sorted by: a draw, or a value that they hold."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, Literal, TypeAlias

from wds_datapipes.errors import DecodeError, MissingFieldError
from wds_datapipes.io.openers import redact
from wds_datapipes.types import Sample

__all__ = ["FieldSortKey", "RandomSortKey", "WithoutValue"]

WithoutValue: TypeAlias = Literal["raise", "first", "last"]
"""What becomes of samples without a value: an error, or they come before or after all others."""

#: How much of a value an error shows.
SHOWN = 60


class RandomSortKey:
    """Draws a number for each sample, so that samples which are sorted by them are shuffled.

    Sorted by independent numbers of 128 bits, every order of the samples is as likely as any other. What is drawn
    follows from the seed and the number of the sample alone, and not from memory, shards or the version of Python.

    Args:
        seed: another one gives another order.

    Examples:
        >>> draw = RandomSortKey(seed=1)
        >>> sorted(range(10), key=draw)
        [9, 6, 0, 3, 4, 5, 2, 1, 8, 7]
    """

    def __init__(self, seed: int) -> None:
        self._key = hashlib.sha256(f"order of samples {seed}".encode()).digest()
        self._number = 0

    def __call__(self, _sample: object) -> bytes:
        """Draw for the next sample."""
        number = self._number
        self._number += 1
        return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16, key=self._key).digest()


class FieldSortKey:
    """Tells what a sample is sorted by: its key, a field, or a value within a field of JSON.

    Text is compared by its code points. A number in JSON is a number; other text is one if ``numeric`` says so.

    Args:
        by: ``"key"``; the name of a field; or that and a path into its JSON, as in ``"json/size/width"`` or
            ``"json/captions/0"``. A dot may stand before the field: ``".key"`` is a field of that name.
        numeric: text is to be read as numbers.
        missing: what becomes of samples that have no such field, or in whose JSON the path leads nowhere or to null.
        reverse: whether they are sorted the other way round; ``missing`` means the same nevertheless.

    Raises:
        ValueError: ``by`` names no field.

    Examples:
        >>> order = FieldSortKey("json/size/0", missing="last")
        >>> order({"__key__": "a", "json": b'{"size": [640, 480]}'}), order({"__key__": "b", "json": b"{}"})
        ((0, 640), (1, 0))
    """

    def __init__(
        self, by: str, *, numeric: bool = False, missing: WithoutValue = "raise", reverse: bool = False
    ) -> None:
        field, slash, path = by.partition("/")
        self._by_key = by == "key"
        self._field = field.removeprefix(".").lower()
        if not self._field or (slash and not path) or (field == "__key__"):
            raise ValueError(f"samples are sorted by 'key', a field, or a path as in 'json/size/width', not by {by!r}")
        self._path = path.split("/") if path else []
        self._by, self._numeric, self._missing = by, numeric, missing
        self._without = (-1 if (missing == "first") is not reverse else 1, 0)
        self._kind: type | None = None

    def __call__(self, sample: Sample) -> tuple[int, Any]:
        """Return what is to be compared.

        Raises:
            MissingFieldError: the sample has no value.
            DecodeError: what it has is no JSON, no number, or cannot be compared with what others have.
        """
        value = sample["__key__"] if self._by_key else sample.get(self._field)
        if value is not None and self._path:
            value = self._found(sample, value)
        if value is None:
            if self._missing == "raise":
                has = ", ".join(field for field in sample if field[:2] != "__")
                raise MissingFieldError(
                    f"The {_name(sample)} has nothing to be sorted by: {self._by!r} is not there. It has {has}. "
                    f'To keep it, pass missing="first" or "last"'
                )
            return self._without
        if isinstance(value, str | bytes) and self._numeric:
            value = self._number(sample, value)
        kind = float if isinstance(value, int | float) else type(value)
        if kind not in _KINDS or (kind is float and math.isnan(value)):
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(value)} has no order"
            )
        if kind is not (self._kind or kind):
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(value)} is {_KINDS[kind]}, and "
                f"the samples before have {_KINDS[self._kind or kind]}"
            )
        self._kind = kind
        return 0, value

    def _found(self, sample: Sample, data: bytes) -> Any:
        """Return the value within a field of JSON, or None."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:  # of its encoding, too
            raise DecodeError(f"The field {self._field!r} of the {_name(sample)} is no JSON: {error}") from None
        for step in self._path:
            if isinstance(value, list):
                value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def _number(self, sample: Sample, text: str | bytes) -> int | float:
        """Return the number that a text is."""
        try:
            words = (text.decode("ascii") if isinstance(text, bytes) else text).strip()
            if not words.isascii() or "_" in words:  # which Python would take
                raise ValueError
            try:
                return int(words)
            except ValueError:
                number = float(words)
                if math.isnan(number):
                    raise
                return number
        except ValueError:
            raise DecodeError(
                f"The {_name(sample)} cannot be sorted by {self._by!r}: {_describe_key(text)} is no number"
            ) from None


_KINDS = {float: "a number", str: "text", bytes: "text"}


def _name(sample: Sample) -> str:
    url = sample.get("__url__")
    return f"sample {sample['__key__']!r}" + (f" of {redact(url)}" if url else "")


def _describe_key(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
