"""The program that runs the commands, with their exit codes, on its standard streams."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from wds_datapipes.errors import WdsError
from wds_datapipes.redaction import redact
from wds_datapipes.tools.cli.app import parse
from wds_datapipes.tools.cli.errors import (
    FAULT_FOUND,
    INTERRUPTED,
    UNREAD,
    WrongUse,
    exit_code_of,
    message_of,
    on_one_line,
    print_line,
    show_warning,
    spelled,
)

#: Errors of standard output: its reader has ended, its device is full, or it is closed. Those of files are `WdsError`.
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main() -> None:
    """Run the command named by the arguments and exit with its code.

    Exit codes: 0 for success; 1 for faults in the data or output that cannot be written; 2 for an invalid command line
    or a missing package; 130 for Ctrl-C; 141 for a closed output pipe.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # Ctrl-C during the import
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # saves the garbage collection of all modules at exit, about a second
    try:
        open_standard_streams()
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        print_line("Interrupted")
        sys.exit(INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Expected errors are those of this package, and those of standard output, such as a pipe that ``| head`` has closed.
    All other exceptions are bugs and keep their traceback.
    """
    code = 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            try:
                command, bound = parse(arguments)
                command(*bound.args, **bound.kwargs)
            except SystemExit as end:  # of the help, of a command that found faults, or of rich if the pipe is closed
                code = UNREAD if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)
        sys.stdout.flush()
    except (WdsError, WrongUse) as error:
        message = spelled(message_of(error))
        for word in arguments:
            message = message.replace(word, redact(word))
        print_line(f"Error: {on_one_line(message)}")
        return exit_code_of(error)
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        # Python must not flush the rest of the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return UNREAD
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        print_line(f"Error: Standard output cannot be written: {reason}")
        return FAULT_FOUND
    return code


def open_standard_streams() -> None:
    """Let standard output escape characters that its encoding lacks, and open streams that are closed at the start.

    Otherwise, the next file to be opened would get the number of such a stream and receive its output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  three
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115  the same
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
