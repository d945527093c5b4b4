"""The command ``shuffle``: write all samples in a random order."""

from __future__ import annotations

from typing import Annotated

from wds_datapipes.tools.cli.copying import reorder
from wds_datapipes.tools.cli.options.read import Shards
from wds_datapipes.tools.cli.options.values import FileOrUrl, Natural, metavar
from wds_datapipes.tools.cli.options.write import COPY, CopyArguments, Rekey


def shuffle(
    *shards: Shards,
    output: Annotated[FileOrUrl, metavar("TARGET", alias="-o")] = "shuffle-%06d.tar",
    seed: Natural = 0,
    rekey: Rekey = "",
    options: CopyArguments = COPY,
) -> None:
    """Shuffle all samples of a dataset uniformly.

    Keeps the offsets of all samples in memory, and reads each sample by its offset, so shards must be uncompressed and
    support random access. The order depends only on the seed and the order of the input. Data are copied unchanged.

    Args:
        output: The output: shards with a placeholder for the number, or one archive, as for cat.
        seed: The seed of the order.
    """
    reorder(shards, lambda entries: entries.shuffle(seed), output, rekey, options)
