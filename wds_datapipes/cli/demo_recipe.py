"""The lines of code that read what the demo has read, for the user to copy."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["digits_recipe", "images_recipe"]

# wds_datapipes is imported before torchdata, which would print a banner otherwise. Lines fit a terminal of 80 columns.
DIGITS = """\
from wds_datapipes import ShardList, ShardReadingService
from torchdata.dataloader2 import DataLoader2

shards = ShardList({shards}).shuffle()
samples = shards.sharding_filter().load_wds_shards().group_samples()
decoded = samples.shuffle_samples(1000).wds_decode("torchl8")
batches = decoded.to_tuple("png", "cls").batch(64).collate()
with DataLoader2(batches, reading_service=ShardReadingService(2)) as loader:
    for images, labels in loader:
        print(images.shape, labels.shape)
"""

IMAGES = """\
import numpy
from wds_datapipes import ImageDecoder, ShardList, ShardReadingService
from torchdata.dataloader2 import DataLoader2

def shrink(image):
    return numpy.array(image.resize(({size}, {size})))

shards = ShardList({shards}).shuffle()
samples = shards.sharding_filter().load_wds_shards().group_samples()
decoder = ImageDecoder("pilrgb", min_size={size})
decoded = samples.shuffle_samples(1000).wds_decode(decoder, only={only})
pairs = decoded.to_tuple({image}, {label}).map_tuple(shrink)
batches = pairs.batch(64).collate()
with DataLoader2(batches, reading_service=ShardReadingService(2)) as loader:
    for images, labels in loader:
        print(images.shape, len(labels))
"""


def digits_recipe(shards: str) -> str:
    """Return the nine lines for gray images of one size, in the shards of a pattern."""
    return DIGITS.format(shards=quote_literal(shards))


def images_recipe(shards: Sequence[str], *, image_field: str, label_field: str, size: int) -> str:
    """Return the lines for images of any size, in the shards of some patterns."""
    return IMAGES.format(
        shards=quote_literal(shards[0]) if len(shards) == 1 else f"[{', '.join(map(quote_literal, shards))}]",
        only=quote_literal(f"{image_field.replace(';', ' ')} {label_field}"),
        image=quote_literal(image_field),
        label=quote_literal(label_field),
        size=size,
    )


def quote_literal(text: str) -> str:
    r"""Return a literal in double quotes where it can be.

    >>> quote_literal("a.tar"), quote_literal('"a".tar')
    ('"a.tar"', '\'"a".tar\'')
    """
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)
