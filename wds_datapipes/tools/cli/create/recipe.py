"""The command ``create recipe``: create shards from a tarp recipe."""

from __future__ import annotations

from typing import Annotated

from wds_datapipes.tools.cli.create.files import INPUT, CreateArguments, create_from
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar
from wds_datapipes.tools.prepare.sources.listing import Recipe


def recipe(
    recipe: FileOrUrl, /, *, root_dir: Annotated[FileOrUrl, metavar("DIR", group=INPUT)] = "", options: CreateArguments
) -> None:
    """Create shards from a tarp recipe of files and commands.

    Each line has the name in the archive and a path, URL, text:STRING or pipe:COMMAND. Consecutive lines with the same
    key form a sample. Relative paths start from the current folder, or from --root-dir.

    Args:
        recipe: A recipe for tarp create: a local file, or -.
        root_dir: The folder for relative paths.
    """
    create_from(lambda _: Recipe(recipe, root=root_dir, key_rule=options.rule), options)
