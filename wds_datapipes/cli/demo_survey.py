"""What a first look through the shards tells of a dataset: its samples, its labels, and which part is held out."""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.samples.keys import first_dot

__all__ = ["Dataset", "Part", "survey"]

#: Of the samples of a single shard, each one of so many is held out.
HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Part:
    """The samples to train on, or those that are held out."""

    shards: list[str]
    #: How many samples there are.
    count: int
    #: Their keys, where they are only some of those in the shards.
    keys: frozenset[str] | None = None

    def holds(self, sample: dict[str, Any]) -> bool:
        """Whether a sample of the shards belongs to this part."""
        return self.keys is None or sample["__key__"] in self.keys


@dataclass(frozen=True)
class Dataset:
    """Images with integer labels, in shards."""

    training: Part
    held_out: Part
    #: The field of the image; ``"jpg;png"`` is the first of them that a sample has.
    image_field: str
    label_field: str
    #: All labels, sorted. The network numbers the classes in this order.
    labels: list[int]

    def class_of(self, value: Any) -> int:
        """Return the number of the class, from the value of the label field."""
        return self.labels.index(as_integer(value))


def survey(
    shards: Sequence[str], held_out_shards: Sequence[str] = (), *, image_field: str, label_field: str
) -> Dataset:
    """Read the labels of all samples, and nothing else of them, and settle what is held out.

    That is ``held_out_shards`` if there are any; else the last shard; and of a single shard every fifth sample.

    Raises:
        PatternError: a pattern matches nothing.
        WrongUse: no sample has the image field or the label field, a label is not an integer, all are the same, or
            there are too few samples to hold some out.
    """
    from wds_datapipes import ShardList

    training, held_out = list(ShardList(shards)), list(ShardList(held_out_shards)) if held_out_shards else []
    if not held_out and len(training) > 1:
        held_out = [training.pop()]
    seen = read_labels(training, image_field, label_field)
    if held_out:
        checked = read_labels(held_out, image_field, label_field)
        parts = Part(training, len(seen)), Part(held_out, len(checked))
    else:
        checked = seen
        parts = split(training, [key for key, _ in seen])
    labels = sorted({label for _, label in seen + checked})
    if len(labels) < 2:
        raise WrongUse(f"All samples of {training} have the label {labels[0]}: training needs two classes or more")
    return Dataset(*parts, image_field, label_field, labels)


def split(shards: list[str], keys: list[str]) -> tuple[Part, Part]:
    """Hold out every fifth sample of a single shard."""
    held_out = frozenset(keys[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    if not held_out:
        raise WrongUse(
            f"{shards[0]} has {len(keys)} samples, and one of {HELD_OUT_EVERY} would be held out. "
            f"Name more shards, or others to hold out"
        )
    rest = frozenset(keys) - held_out
    return Part(shards, len(rest), rest), Part(shards, len(held_out), held_out)


def read_labels(shards: list[str], image_field: str, label_field: str) -> list[tuple[str, int]]:
    """Return the key and the label of every sample; no image is read, only its name."""
    from wds_datapipes import ShardList

    names = FieldNames(label_field)
    samples = ShardList(shards).load_wds_shards(select_files=names.select).group_samples()
    labels = [label_of(sample, label_field) for sample in samples.wds_decode(only=[label_field])]
    for option, fields in ("--image-field", image_field.split(";")), ("--label-field", [label_field]):
        if not any(names.found[field] for field in fields):
            raise WrongUse(
                f"No sample of {', '.join(shards[:3])}{', ...' if len(shards) > 3 else ''} has the field "
                f"{' or '.join(map(repr, fields))}. The fields found are: {names}. Name another with {option}"
            )
    return labels


def label_of(sample: dict[str, Any], field: str) -> tuple[str, int]:
    """Return the key and the label of a sample."""
    try:
        return sample["__key__"], as_integer(sample[field])
    except (TypeError, ValueError):
        raise WrongUse(
            f"Labels are integers, and the field {field!r} of the sample {sample['__key__']!r} of {sample['__url__']} "
            f"holds {reprlib.repr(sample[field])}. Name another field with --label-field"
        ) from None


def as_integer(value: Any) -> int:
    """Return a label that is an integer, or the text of one."""
    return int(value) if isinstance(value, str | bytes) else operator.index(value)


class FieldNames:
    """Lets only the label field through, and counts the fields of all members that come by."""

    def __init__(self, label_field: str) -> None:
        self.label_field = label_field
        self.found: Counter[str] = Counter()

    def select(self, name: str) -> bool:
        """Whether to read the member of this name."""
        parts = first_dot(name)
        field = parts[1].lower() if parts else ""
        self.found[field] += bool(parts)
        return field == self.label_field

    def __str__(self) -> str:
        return ", ".join(sorted(field for field, count in self.found.items() if count)[:20]) or "none"
