"""The command line ``wds-datapipes``: a function for each command, whose docstring describes its options.

To add a command, write a function in a module of its name and add the name to `COMMANDS` in `app`. Importing the
package imports torch, so every command takes at least as long to start as torch.
"""

import sys

from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.extras import require


def main() -> None:
    """Run the command named by the arguments and exit with its code."""
    try:
        require("cyclopts", extra="cli", purpose="run commands")
    except MissingDependencyError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201  of the program
        sys.exit(2)
    from wds_datapipes.tools.cli.program import main as run

    run()
