"""Options of the commands that write shards.

Annotations are not postponed: cyclopts would look for their names in the module of a class that inherits a field.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter

from wds_datapipes.io.openers import redact
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.read import ReadArguments
from wds_datapipes.tools.cli.options.values import Positive, metavar, parse_bytes
from wds_datapipes.writing.shard_names import NUMBER

WRITING = Group("Writing", sort_key=8)
Rekey: TypeAlias = Annotated[
    str,
    metavar(
        "PATTERN",
        group=WRITING,
        help="The pattern of new keys, with {number}, {key}, {name} and {shard}, such as '{number:08d}'.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WriteArguments:
    """The options of all commands that write numbered shards.

    Args:
        maxcount: The maximum number of samples in a numbered shard, by default 100,000.
        maxsize: The maximum size of a numbered shard, such as 500MB or 2GiB, by default 3GB.
        compress: gz, bz2, xz or zst; by default, the file name decides.
        index: Write an index next to each shard, as the command index does.
        remove_old: Remove surplus shards of an earlier, larger run.
        on_error: Whether to stop at bad samples, or to skip and report them and the rest of bad shards.
    """

    maxcount: Annotated[Positive | None, Parameter(group=WRITING)] = None
    maxsize: Annotated[str, metavar("BYTES", group=WRITING)] = ""
    compress: Annotated[str | None, metavar("KIND", group=WRITING)] = None
    index: Annotated[bool, Parameter(group=WRITING)] = False
    remove_old: Annotated[bool, Parameter(group=WRITING)] = False
    on_error: Annotated[Literal["raise", "skip"], Parameter(group=WRITING)] = "raise"

    def limits_of(self, output: str) -> dict[str, Any]:
        """Return the limits of the shards of an output, after checking that options for numbered shards apply."""
        limits = {"maxcount": self.maxcount or 100_000, "maxsize": parse_bytes(self.maxsize or "3GB", "--maxsize")}
        given = {"--maxcount": self.maxcount, "--maxsize": self.maxsize, "--remove-old": self.remove_old}
        if (ignored := [name for name, value in given.items() if value]) and not NUMBER.search(output):
            raise WrongUse(
                f"{' and '.join(ignored)} cannot be used with one archive, which is what --output {redact(output)!r} "
                "names. Name numbered shards, as in --output out-%06d.tar"
            )
        return limits

    def skip_into(self, faults: list[Exception]) -> Callable[[Exception], bool]:
        """Return a handler that adds errors to a list if ``on_error`` is ``"skip"``, and raises them otherwise."""

        def skip(error: Exception) -> bool:
            if self.on_error == "raise":
                raise error
            faults.append(error)
            return True

        return skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CopyArguments(WriteArguments, ReadArguments):
    """The options of all commands that copy samples unchanged."""


#: What commands copy with if no option is given.
COPY = CopyArguments()
