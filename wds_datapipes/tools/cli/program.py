"""The program that runs the commands: help, version, error messages and exit codes."""

from __future__ import annotations

import difflib
import errno
import gc
import io
import os
import re
import signal
import sys
import textwrap
import warnings
from argparse import Action, ArgumentParser, HelpFormatter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import wds_datapipes
from wds_datapipes.errors import (
    MissingDependencyError,
    ShardOpenError,
    SpecError,
    UnknownSchemeError,
    UnsafeInputError,
    WdsError,
)
from wds_datapipes.hints import Message
from wds_datapipes.redaction import redact, redact_text
from wds_datapipes.tools.cli.docstring_options import declare_options, describe_command

PROGRAM = "wds-datapipes"
#: The commands in the order of the help page, with the modules and names of their functions.
COMMANDS = {
    "demo": "demo:demo",
    "create images": "create:create_images",
    "create imagenet": "create:create_imagenet",
    "create recipe": "create:create_recipe",
    "ls": "ls:ls",
    "show": "show:show",
    "cat": "copy:cat",
    "verify": "verify:verify",
    "index": "index:index",
    "stats": "stats:stats",
    "bench": "bench:bench",
    "plan": "plan:plan",
    "steps": "steps:steps",
    "split": "copy:split",
    "shuffle": "copy:shuffle",
    "sort": "copy:sort",
    "map": "map:map",
    "cache ls": "cache:show_copies",
    "cache warm": "cache:warm",
    "cache clear": "cache:clear",
}
#: Exit codes other than 0; the last two stand for Ctrl-C and a closed output pipe.
FAULT_FOUND, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: Errors of standard output: its reader has ended, its device is full, or it is closed. Those of files are `WdsError`.
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
#: Characters that would affect the terminal or the line: control characters, bytes that are not text, and characters
#: that change the direction of text, so that a name could be disguised.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: The options of the running command, used to translate advice.
_available: set[str] = set()


class WrongUse(Exception):
    """The command line is invalid; the message says why and how to fix it."""


#: Errors that are fixed by changing the command line, not the data.
USER_ERRORS = (MissingDependencyError, SpecError, ShardOpenError, UnknownSchemeError, UnsafeInputError, WrongUse)


class CommandHelp(HelpFormatter):
    """Wraps the paragraphs of a description, and never breaks a word, so that examples can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(CommandHelp, self)._fill_text(each, width, indent) for each in text.split("\n\n"))


class CommandParser(ArgumentParser):
    """Parses the arguments of a command; raises `WrongUse` if they are invalid."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, formatter_class=CommandHelp, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise WrongUse(f"{message}. See {self.prog} --help")


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
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            run_command(arguments)
        sys.stdout.flush()
    except SystemExit as end:  # of the help, or of a command that found faults
        return int(end.code or 0)
    except (WdsError, WrongUse) as error:
        message = spelled(message_of(error))
        for word in arguments:
            message = message.replace(word, redact(word))
        print_line(f"Error: {on_one_line(message)}")
        return WRONG_USE if isinstance(error, USER_ERRORS) else FAULT_FOUND
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
    return 0


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


def run_command(arguments: Sequence[str]) -> None:
    """Parse the arguments and run the command that they name."""
    words = next((count for count in (2, 1) if " ".join(arguments[:count]) in COMMANDS), 0)
    if words:
        parser, _, command = build_parser(" ".join(arguments[:words]))
        command(vars(parser.parse_intermixed_args(arguments[words:])))
    elif {"-V", "--version"} & set(arguments[:1]):
        sys.stdout.write(f"{PROGRAM} {wds_datapipes.__version__}\n")
    elif not arguments or {"-h", "--help"} & set(arguments[:2]):
        print_commands(arguments[0] if arguments and arguments[0][0] != "-" else "")
    else:
        below = [name for name in COMMANDS if name.split()[0] == arguments[0]]
        meant = below or difflib.get_close_matches(arguments[0], COMMANDS)
        advice = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
        raise WrongUse(f"There is no command {arguments[0]!r}.{advice} See {PROGRAM} --help")


def build_parser(name: str) -> tuple[CommandParser, list[Action], Callable[[dict[str, Any]], None]]:
    """Return the parser of a command, its options, and a function that runs the command with the parsed values."""
    global _available
    command = load_command(name)
    parser = CommandParser(f"{PROGRAM} {name}", description=describe_command(command))
    actions, runner = declare_options(parser, command)
    shown = [f"{each.metavar}{'...' if each.nargs else ''}" for each in actions if not each.option_strings]
    parser.usage = f"%(prog)s [OPTIONS] {' '.join(shown)}"
    _available = {word for each in actions for word in each.option_strings}
    return parser, actions, runner


def load_command(name: str) -> Callable[..., None]:
    """Import the function of a command."""
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[..., None] = getattr(import_module(f"wds_datapipes.tools.cli.{module}"), function)
    return command


def print_commands(first_word: str) -> None:
    """Print the commands, or those of a group, each with the first line of its help."""
    parser = CommandParser(
        PROGRAM,
        usage="%(prog)s COMMAND ...",
        description="Train from WebDataset tar shards with PyTorch DataPipes.",
        epilog="COMMAND --help describes the options of a command, and -V prints the version.",
        add_help=False,
    )
    group = parser.add_argument_group("commands")
    for name in COMMANDS:
        if name.split()[0] == first_word or not first_word:
            group.add_argument(name, help=describe_command(load_command(name)).partition("\n")[0])
    sys.stdout.write(parser.format_help())


def print_line(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr)  # noqa: T201  of a command


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as one line, without its location in the code."""
    print_line(f"Warning: {on_one_line(str(message))}")


def printable(text: str) -> str:
    r"""Escape a name from an archive so that it can be printed on a line of a terminal.

    >>> printable("a\x1b[31m\n"), printable("Bär"), printable("a\u202eb")
    ('a\\x1b[31m\\x0a', 'Bär', 'a\\u202eb')
    """
    return UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def on_one_line(message: str) -> str:
    """Format a message for the command line, with hints as options of the running command.

    >>> from wds_datapipes.hints import END_MARKER
    >>> on_one_line(Message("It has no end marker. If it was written so, ", END_MARKER))
    'It has no end marker. If it was written so, in Python, pass end_marker="optional"'
    """
    return printable(redact_text(spelled(message)))


def spelled(message: str) -> str:
    """Return a message with its hints as options of the running command, or for Python if the command has none."""
    return message.spell(lambda hint: hint.as_option(_available)) if isinstance(message, Message) else message


def message_of(error: Exception) -> str:
    r"""Return the original message of an error.

    An error from a worker includes its traceback there, and torch appends the stage.

    >>> message_of(ValueError("Caught ValueError in worker process 0.\nOriginal Traceback:\nValueError: odd\nThis ..."))
    'odd'
    """
    text = str(error)
    if isinstance(text, Message):
        return text
    raised = re.findall(rf"^(?:\w+\.)*{type(error).__name__}: (.+)$", text, flags=re.MULTILINE)
    return raised[-1] if raised else text.partition("\n")[0]
