"""The program around the commands: its help page, its version, and how it ends when a command fails."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Annotated, ParamSpec, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

from wds_datapipes.errors import (
    MissingDependencyError,
    PatternError,
    ShardOpenError,
    UnknownSchemeError,
    UnsafeCodecError,
    WdsError,
)

__all__ = [
    "FAULT_FOUND",
    "WRONG_USE",
    "WrongUse",
    "build_program",
    "has_options",
    "message_of",
    "on_one_line",
    "printable",
    "say_nothing_found",
    "without_controls",
]

P = ParamSpec("P")

#: Exit codes beside 0; the last two are those of a program that Ctrl-C, or the end of its reader, has ended.
FAULT_FOUND, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: What messages say to who calls functions, and what that is on the command line.
WORDS = {
    'pass end_marker="optional"': "use --end-marker optional",
    "pass limits=ReadLimits(": "use --limit ",
    "=...) with more, or with None for no limit": "=... with more, or with none for no limit",
    ' on_error="warn" or "skip" skips such samples': "",
    ", or pass key_rule=None if that is meant": "",
    ', or pass on_duplicate="first" or "last"': "",
    ", or make new keys": ", or use --rekey '{number:08d}'",
    ", or keep the sample without it": ", or use --missing keep",
    "if the folders are no classes, say so": "if the folders are no classes, use --no-classes",
    "or say which ends the names of its files have": "or tell the ends of its files with --ending",
    ", or name a file with their labels": ", or name a file with --labels",
    'pass missing="first" or "last"': "use --missing first, or --missing last",
    "Choose a folder with more room": "Name a folder with more room with --tmp",
    "Choose a folder on another disk": "Name a folder on another disk with --tmp, or with --output",
    "or pass remove_old=True": "or use --remove-old",
    "Give the column a field for text, as in txt=": "Give the column a field for text, as in --field txt=",
    "Give a column of file names to files=; give a column of text a field for text, as in txt=": (
        "Name a column of file names with --file; give a column of text a field for text, as in --field txt="
    ),
    "pass key_rule=last_dot, and read the shard with it; or key_rule=None, which checks nothing": (
        "use --key-rule last-dot"
    ),
}
#: What would change the terminal, or a line: control characters, and bytes that were no text.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
#: What turns the direction of text, so that a line shows another name than it has.
DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


#: An option in a message.
OPTION = re.compile(r"--[a-z][a-z-]+")
#: The options of the command that runs, for what messages advise; all of them where none runs.
_available: frozenset[str] | None = None


class WrongUse(Exception):
    """What was asked for cannot be done; the message says why, and what can."""


#: The errors that another command line cures, and no change of the data.
USER_ERRORS = (MissingDependencyError, PatternError, ShardOpenError, UnknownSchemeError, UnsafeCodecError, WrongUse)


def build_program(commands: Sequence[str]) -> typer.Typer:
    """Make the program of the named commands."""

    class InOrder(TyperGroup):
        def list_commands(self, _context: object) -> list[str]:
            return list(commands)  # typer has those with commands below them last

    program = typer.Typer(
        cls=InOrder,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    program.callback()(describe)
    for name in commands:
        command = getattr(import_module(f"wds_datapipes.cli.{name}"), name)
        if isinstance(command, Mapping):
            below = typer.Typer(no_args_is_help=True, help=sys.modules[f"wds_datapipes.cli.{name}"].HELP)
            for word, each in command.items():
                below.command(word)(report_errors(each))
            program.add_typer(below, name=name)
        else:
            program.command(name)(report_errors(command))
    return program


def show_version(wanted: bool) -> None:
    """Print the version of the package and end the program."""
    if wanted:
        typer.echo(f"wds-datapipes {metadata.version('wds-datapipes')}")
        raise typer.Exit


def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train from WebDataset tar shards on torchdata DataPipes."""


def report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command end with one line and an exit code where it would end with a traceback.

    This is for the errors that the package raises on purpose, for Ctrl-C, and for a reader of the output that has gone,
    as ``| head`` does. All others are bugs, and keep their traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        global _available
        _available = options_of_command(command)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning
                command(*args, **kwargs)
            sys.stdout.flush()
        except (WdsError, WrongUse) as error:
            typer.echo(f"Error: {on_one_line(message_of(error))}", err=True)
            raise typer.Exit(WRONG_USE if isinstance(error, USER_ERRORS) else FAULT_FOUND) from None
        except KeyboardInterrupt:
            typer.echo("Interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # What is still in the buffer shall not be written when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNREAD) from None

    return run


def options_of_command(command: Callable[..., object]) -> frozenset[str]:
    """Return the names of the options that a command has."""
    names: set[str] = set()
    for name, kind in get_type_hints(command, include_extras=True).items():
        for option in getattr(kind, "__metadata__", ()):
            if isinstance(option, OptionInfo):
                given = (option.default, *(option.param_decls or ()))  # typer has the first name in place of a default
                words = [word for word in given if isinstance(word, str) and word.startswith("-")]
                names.update(words or [f"--{name.replace('_', '-')}"])
    return frozenset(names)


def has_options(text: str) -> bool:
    """Whether the command that runs has all the options that a text names."""
    return _available is None or _available.issuperset(OPTION.findall(text))


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as one line, without the place in the code that it comes from."""
    typer.echo(f"Warning: {on_one_line(str(message))}", err=True)


def say_nothing_found(shards: int, what: str = "sample") -> None:
    """Say on standard error that shards have nothing to show, which standard output would leave open."""
    typer.echo(f"Note: there is no {what} in {shards:,} shard{'' if shards == 1 else 's'}", err=True)


def printable(text: str) -> str:
    r"""Return a name from an archive as it may be printed in a line of a terminal.

    >>> printable("a\x1b[31m\n"), printable("Bär"), printable("a\u202eb")
    ('a\\x1b[31m\\x0a', 'Bär', 'a\\u202eb')
    """
    return DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", without_controls(text))


def without_controls(text: str) -> str:
    """Return a text with escapes in place of control characters, for a page or a picture."""
    return UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def on_one_line(message: str) -> str:
    """Return a message as the command line prints it: what it advises is an option here, or left out if there is none.

    >>> on_one_line('It has no end marker. If it was written so, pass end_marker="optional"')
    'It has no end marker. If it was written so, use --end-marker optional'
    """
    for words, option in WORDS.items():
        if words in message:
            message = message.replace(words, option) if has_options(option) else _without(message, words)
    return printable(message)


def _without(message: str, words: str) -> str:
    """Leave out the clause that begins with some words, or the sentence that they are in."""
    at = message.index(words)
    end = message.find(". ", at)
    end = len(message) if end < 0 else end
    if words.startswith(","):
        return message[:at] + message[at + len(words) :]
    return f"{message[: max(message.rfind('. ', 0, at), 0)]}{message[end:]}" or message


def message_of(error: Exception) -> str:
    r"""Return the message that an error was raised with.

    One that comes from a worker carries the traceback there, with the message at its end, and torch appends the stage.

    >>> message_of(ValueError("Caught ValueError in worker process 0.\nOriginal Traceback:\nValueError: odd\nThis ..."))
    'odd'
    """
    text = str(error)
    raised = re.findall(rf"^(?:\w+\.)*{type(error).__name__}: (.+)$", text, flags=re.MULTILINE)
    return raised[-1] if raised else text.partition("\n")[0]
