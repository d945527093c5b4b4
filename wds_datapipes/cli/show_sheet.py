"""A contact sheet: samples of a dataset with their pictures or texts, their classes, and how large samples are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from wds_datapipes.cli._meter import human_bytes
from wds_datapipes.io.openers import redact
from wds_datapipes.prepare.preview import Preview, glance
from wds_datapipes.prepare.random_samples import RandomSamples
from wds_datapipes.types import Sample

__all__ = ["Bar", "Card", "Sheet", "make_sheet", "size_bars"]

#: The longest side of the pictures, in pixels, and how much of a text is shown.
PIXELS, CHARACTERS = 256, 600
#: Fields that hold a class, the first one that a sample has.
LABELS = ("cls", "class", "label", "cls2", "label.txt")
#: How many bars there are at the most, and how many classes.
BARS, CLASSES = 32, 12


class Card(NamedTuple):
    """A sample on the sheet.

    Attributes:
        key: of the sample.
        shard: where it is, without credentials.
        size: the bytes of all its fields.
        label: its class, or "".
        fields: what a glance at each field has shown, with at most one picture.
    """

    key: str
    shard: str
    size: int
    label: str
    fields: tuple[Preview, ...]

    @property
    def picture(self) -> Image.Image | None:
        """The picture of the sample, if there is one."""
        return next((field.picture for field in self.fields if field.picture is not None), None)

    @property
    def text(self) -> str:
        """What is shown in the place of a picture, or as its caption."""
        told = [f"{field.field}: {field.kind}" for field in self.fields if "audio" in field.kind]
        shown = [field for field in self.fields if field.text and " ".join(field.text.split()) != self.label]
        if shown:
            told.append(max(shown, key=lambda field: (field.kind.startswith("text"), len(field.text))).text)
        if not told and self.picture is None:
            told = [f"{field.field}: {field.error or field.kind}" for field in self.fields]
        return "\n".join(told)

    @property
    def failed(self) -> bool:
        """Whether a field cannot be decoded."""
        return any(field.error for field in self.fields)


class Bar(NamedTuple):
    """How many samples have a size from ``low`` up to ``high``, which only the last one includes."""

    low: float
    high: float
    samples: int


class Sheet(NamedTuple):
    """What is to be drawn.

    Attributes:
        title: of the sheet.
        facts: what there is in all, as (name, value).
        cards: the samples.
        bars: the sizes of all samples, by rising size.
        logarithmic: whether each bar is so many times as wide as the one before.
        classes: the most frequent classes of the cards, with their numbers.
        others: how many cards have other classes.
    """

    title: str
    facts: list[tuple[str, str]]
    cards: list[Card]
    bars: list[Bar]
    logarithmic: bool
    classes: list[tuple[str, int]]
    others: int


def make_sheet(drawn: RandomSamples, title: str, *, label_fields: Sequence[str] = LABELS) -> Sheet:
    """Look at samples, and make a sheet of them. Nothing that they hold is run, and none can spoil it.

    Args:
        drawn: the samples, and the sizes of all.
        title: of the sheet.
        label_fields: which fields hold a class; the first one that a sample has.
    """
    cards = [_card(sample, label_fields) for sample in drawn.samples]
    classes = Counter(card.label for card in cards if card.label).most_common()
    bars, logarithmic = size_bars(drawn.sizes)
    total = len(drawn.sizes)
    facts = [
        ("samples", f"{total:,}"),
        ("shards", f"{drawn.shards:,}"),
        ("bytes of shards", human_bytes(drawn.bytes)),
    ]
    if total:
        facts.append(("median sample", human_bytes(float(np.median(drawn.sizes)))))
        facts.append(("shown here", f"{len(cards):,}"))
    return Sheet(title, facts, cards, bars, logarithmic, classes[:CLASSES], sum(n for _, n in classes[CLASSES:]))


def _card(sample: Sample, label_fields: Sequence[str]) -> Card:
    fields = []
    pictured = False
    for name, data in sample.items():
        if name[:2] == "__":
            continue
        seen = glance(name, data, characters=CHARACTERS, pixels=PIXELS)
        fields.append(seen._replace(picture=None) if pictured else seen)
        pictured = pictured or seen.picture is not None
    label = next((seen.text for name in label_fields for seen in fields if seen.field == name), "")
    size = sum(field.size for field in fields)
    return Card(sample["__key__"], redact(sample["__url__"]), size, " ".join(label.split())[:60], tuple(fields))


def size_bars(sizes: npt.NDArray[np.int64]) -> tuple[list[Bar], bool]:
    """Count sizes in bars of one width, or of widths that grow by one factor, where sizes differ much.

    >>> size_bars(np.array([10, 11, 12, 19]))
    ([Bar(low=10.0, high=14.5, samples=3), Bar(low=14.5, high=19.0, samples=1)], False)
    """
    if not len(sizes):
        return [], False
    low, high = float(sizes.min()), float(sizes.max())
    if low == high:
        return [Bar(low, high, len(sizes))], False
    number = int(min(BARS, high - low, max(2, math.ceil(2 * math.sqrt(len(sizes)) - 2))))
    logarithmic = high > 20 * max(low, 1)
    edges = np.geomspace(max(low, 1), high, number + 1) if logarithmic else np.linspace(low, high, number + 1)
    edges[0] = low
    counts, _ = np.histogram(sizes, edges)
    return [
        Bar(float(edges[at]), float(edges[at + 1]), int(count)) for at, count in enumerate(counts.tolist())
    ], logarithmic
