"""The arguments of all ``cache`` commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Parameter

from wds_datapipes.tools.cli.errors import FAULT_FOUND, WrongUse
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar
from wds_datapipes.tools.cli.printing import print_error, print_json

MaxBytes: TypeAlias = Annotated[str, metavar("BYTES", help="The limit for all copies together, such as 500GB.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CacheArguments:
    """The options of all ``cache`` commands.

    Args:
        cache_dir: The cache folder.
        json: Print the facts as JSON.
    """

    cache_dir: Annotated[FileOrUrl, metavar("DIR")]
    json: bool = False

    @property
    def path(self) -> Path:
        """The path of the folder, which must exist."""
        path = Path(self.cache_dir)
        if not path.is_dir():
            raise WrongUse(f"There is no folder {self.cache_dir!r}. Name the folder passed to .cache_wds_shards()")
        return path

    def report(self, facts: Mapping[str, object], text: str, faults: Sequence[str] = ()) -> None:
        """Print the facts as JSON or text, then the faults; end with an error code if there are any."""
        if self.json:
            print_json(facts, indent=None)
        else:
            sys.stdout.write(f"{text}\n")
        for fault in faults:
            print_error(fault)
        if faults:
            raise SystemExit(FAULT_FOUND)
