"""The command ``sort``: write all samples in the order of a field or of their keys."""

from __future__ import annotations

from typing import Annotated

from wds_datapipes.tools.cli.copying import reorder
from wds_datapipes.tools.cli.options.read import Shards
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar, wrong_use
from wds_datapipes.tools.cli.options.write import COPY, CopyArguments, Rekey
from wds_datapipes.tools.prepare.reorder import FieldSortKey


def sort(
    *shards: Shards,
    output: Annotated[FileOrUrl, metavar("TARGET", alias="-o")] = "sort-%06d.tar",
    by: Annotated[str, metavar("FIELD")] = "key",
    numeric: bool = False,
    reverse: bool = False,
    rekey: Rekey = "",
    options: CopyArguments = COPY,
) -> None:
    """Sort all samples of a dataset by key or by a field.

    Keeps the offsets of all samples in memory, and reads each sample by its offset, so shards must be uncompressed and
    support random access. The sort is stable, text is compared by code points, and data are copied unchanged.

    Args:
        output: The output: shards with a placeholder for the number, or one archive, as for cat.
        by: A field, or key for the key.
        numeric: Compare text as numbers.
        reverse: Sort in descending order, stably.
    """
    with wrong_use("--by: "):
        key = FieldSortKey(by, numeric=numeric, reverse=reverse)
    reorder(shards, lambda entries: entries.sort(key), output, rekey, options)
