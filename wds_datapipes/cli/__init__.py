"""The command line ``wds-datapipes``: each command is a function, whose docstring is its help.

To add a command, write a function of the same name, as `_declaration` describes, and add it to `COMMANDS`. As importing
the package imports torch, every command, and completion, takes as long to start as torch does.
"""

import gc
import os
import shutil
import signal
import sys

from wds_datapipes.cli._output import OutputError, guarded_output
from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.extras import require

__all__ = ["COMMANDS", "main"]

#: Help is not made narrower than this number of columns, since it would lack parts of the names of options.
NARROWEST = 80
#: The commands in the order of the help page, and the modules of their functions.
COMMANDS = {
    "demo": "demo",
    "create": "create",
    "ls": "ls",
    "show": "show",
    "cat": "copy",
    "verify": "verify",
    "index": "index",
    "stats": "stats",
    "bench": "bench",
    "split": "copy",
    "shuffle": "reorder",
    "sort": "reorder",
    "map": "map",
    "cache": "cache",
}


def main() -> None:
    """Run the command named by the arguments, and exit with its code.

    Exit codes: 0 for success; 1 for faults in the data, or if the output cannot be written; 2 for a wrong command line
    or a package that is not installed; 130 for Ctrl-C; 141 for a closed output pipe.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # Ctrl-C during the import
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


def _end_unread(_console: object) -> None:
    """Exit with code 141 after the reader of the output has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not flush the rest at exit
    sys.exit(141)


def run() -> None:
    """Run a command with standard output guarded."""
    try:
        for package in ("typer", "rich"):
            require(package, extra="cli", purpose="run the command line")
    except MissingDependencyError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201  nothing better to print with is installed
        sys.exit(2)
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ.setdefault("TERMINAL_WIDTH", str(NARROWEST))  # read by typer
    from rich.console import Console

    from wds_datapipes.cli._app import build_program

    Console.on_broken_pipe = _end_unread  # type: ignore[assignment, method-assign, unused-ignore]  # ends with 1 otherwise
    program = build_program(COMMANDS)
    gc.freeze()  # saves the garbage collection of all modules at exit, about a second
    program(prog_name="wds-datapipes")
