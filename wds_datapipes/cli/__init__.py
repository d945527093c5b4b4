"""The command line, ``wds-datapipes``: one file a command.

To add a command, write a module here with a function of the same name, and put the name into `COMMANDS`. Modules here
import torch, and whatever else takes long, in the functions that need it, so that ``--help`` and completion are quick.
"""

import gc
import signal
import sys

from wds_datapipes.cli._output import OutputError, guarded_output
from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.extras import require

__all__ = ["COMMANDS", "main"]

#: The commands, in the order of the help page. Each is the function of this name in the module of this name.
COMMANDS = (
    "demo",
    "create",
    "ls",
    "show",
    "cat",
    "verify",
    "index",
    "stats",
    "split",
    "shuffle",
    "sort",
    "map",
    "cache",
)


def main() -> None:
    """Run the command that the program's arguments name, and exit with its code.

    Exit codes: 0, fine; 1, a fault in the data was found, or the output cannot be written; 2, wrong use, or a package
    that is not installed; 130, Ctrl-C; 141, the reader of the output has gone.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while the package was imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with guarded_output():
            run()
    except OutputError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201  as the one below
        sys.exit(1)
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)  # noqa: T201  as the one below
        sys.exit(130)


def run() -> None:
    """Run a command, in a process whose output is ready."""
    try:
        for package in ("typer", "rich"):
            require(package, extra="cli", purpose="run the command line")
    except MissingDependencyError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201  nothing better to print with is installed
        sys.exit(2)
    from wds_datapipes.cli._app import build_program

    program = build_program(COMMANDS)
    gc.freeze()  # what is imported stays; Python would look through all of it at the end, which takes a second
    program(prog_name="wds-datapipes")
