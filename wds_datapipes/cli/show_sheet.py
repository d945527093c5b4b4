"""The contents of a contact sheet: samples with their pictures or texts, classes, and a histogram of sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from wds_datapipes.cli._meter import size_of_shards
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.dataset_contents import RandomSamples
from wds_datapipes.prepare.preview import Preview, preview_field
from wds_datapipes.types import Sample

__all__ = ["Bar", "Card", "Sheet", "make_sheet", "size_bars"]

#: The longest side of a picture in pixels, and the longest text in characters.
PIXELS, CHARACTERS = 256, 600
#: Fields that may hold the class; the first one found is used.
LABELS = ("cls", "class", "label", "cls2", "label.txt")
#: The most bars and classes shown.
BARS, CLASSES = 32, 12


class Card(NamedTuple):
    """A sample on the sheet.

    Attributes:
        key: the key of the sample.
        shard: the URL of its shard, without credentials.
        size: the size of all fields in bytes.
        label: the class, or "".
        fields: the previews of the fields, with at most one picture.
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
        """The text shown instead of a picture, or as its caption."""
        lines = [f"{field.field}: {field.kind}" for field in self.fields if "audio" in field.kind]
        shown = [field for field in self.fields if field.text and " ".join(field.text.split()) != self.label]
        if shown:
            lines.append(max(shown, key=lambda field: (field.kind.startswith("text"), len(field.text))).text)
        if not lines and self.picture is None:
            lines = [f"{field.field}: {field.error or field.kind}" for field in self.fields]
        return "\n".join(lines)

    @property
    def failed(self) -> bool:
        """Whether a field cannot be decoded."""
        return any(field.error for field in self.fields)


class Bar(NamedTuple):
    """The number of samples with sizes from ``low`` up to ``high``, exclusive except in the last bar."""

    low: float
    high: float
    samples: int


class Sheet(NamedTuple):
    """The contents of a contact sheet.

    Attributes:
        title: the title of the sheet.
        facts: facts about the dataset, as (name, value).
        cards: the samples.
        bars: the histogram of the sizes of all samples, in ascending order.
        logarithmic: whether the bars are on a logarithmic scale.
        classes: the most frequent classes of the cards, with their counts.
        others: the number of cards of other classes.
    """

    title: str
    facts: list[tuple[str, str]]
    cards: list[Card]
    bars: list[Bar]
    logarithmic: bool
    classes: list[tuple[str, int]]
    others: int


def make_sheet(random: RandomSamples, title: str, *, label_fields: Sequence[str] = LABELS) -> Sheet:
    """Make a contact sheet of samples. Their contents are never run, and cannot break the sheet.

    Args:
        random: the samples, and the sizes of all samples.
        title: the title of the sheet.
        label_fields: fields that may hold the class; the first one found is used.
    """
    cards = [_card(sample, label_fields) for sample in random.samples]
    classes = Counter(card.label for card in cards if card.label).most_common()
    bars, logarithmic = size_bars(random.sizes)
    total = len(random.sizes)
    facts = [
        ("samples", f"{total:,}"),
        ("shards", f"{random.shards:,}"),
        ("bytes of shards", size_of_shards(random.bytes, random.shards, random.unread_shards)),
    ]
    if total:
        facts.append(("median sample", human_bytes(float(np.median(random.sizes)))))
        facts.append(("shown here", f"{len(cards):,}"))
    return Sheet(title, facts, cards, bars, logarithmic, classes[:CLASSES], sum(n for _, n in classes[CLASSES:]))


def _card(sample: Sample, label_fields: Sequence[str]) -> Card:
    fields = []
    pictured = False
    for name, data in sample.items():
        if name[:2] == "__":
            continue
        preview = preview_field(name, data, characters=CHARACTERS, pixels=PIXELS)
        fields.append(preview._replace(picture=None) if pictured else preview)
        pictured = pictured or preview.picture is not None
    label = next((preview.text for name in label_fields for preview in fields if preview.field == name), "")
    size = sum(field.size for field in fields)
    return Card(sample["__key__"], redact(sample["__url__"]), size, " ".join(label.split())[:60], tuple(fields))


def size_bars(sizes: npt.NDArray[np.int64]) -> tuple[list[Bar], bool]:
    """Return a histogram of sizes, on a logarithmic scale if they span a wide range.

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
