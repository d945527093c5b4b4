"""The program that runs the commands: help, version, error messages and exit codes."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, ParamSpec, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import OptionInfo

import wds_datapipes
from wds_datapipes.errors import (
    MissingDependencyError,
    ShardOpenError,
    SpecError,
    UnknownSchemeError,
    UnsafeInputError,
    WdsError,
)
from wds_datapipes.redaction import redact, redact_text

__all__ = [
    "FAULT_FOUND",
    "WRONG_USE",
    "WrongUse",
    "build_program",
    "expand_options",
    "has_options",
    "message_of",
    "on_one_line",
    "printable",
    "say_nothing_found",
    "without_controls",
]

P = ParamSpec("P")

#: Exit codes other than 0; the last two stand for Ctrl-C and a closed output pipe.
FAULT_FOUND, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: Maps advice for Python callers in messages to the command line; an empty text removes it.
WORDS = {
    'pass end_marker="optional"': "use --end-marker optional",
    "pass ignore_zeros=True to read them all": "read them in Python, with .load_wds_shards(ignore_zeros=True)",
    "pass limits=ReadLimits(": "use --limit ",
    "=...) with more, or with None for no limit": "=... with more, or with none for no limit",
    ' on_error="warn" or "skip" skips such samples': "",
    ", or pass key_rule=None if that is intended": "",
    ', or pass on_duplicate="first" or "last"': "",
    "Pass another directory for indexes, index_dir=": ("Use --folder with another directory for indexes"),
    "If all readers trust the shard, allow it with allow_pickle=True; otherwise choose": "Choose",
    ", or pass keys=False, which supports sequential reading only": "",
    "Call build_indexes(columns=...) with it": "Use --columns with it",
    ", or use new keys": ", or use --rekey '{number:08d}'",
    ", or keep the sample without it": ", or use --missing keep",
    "if the folders are not classes, pass has_classes=False": "if the folders are not classes, use --no-classes",
    "or pass the extensions of its files": "or name the extensions of its files with --ending",
    ", or name a file with their labels": ", or name a file with --labels",
    'pass missing="first" or "last"': "use --missing first, or --missing last",
    "or pass remove_old=True": "or use --remove-old",
    "Use a text field for the column, as in txt=": "Use a text field for the column, as in --field txt=",
    "Pass a column of file names as files=; use a text field for a column of text, as in txt=": (
        "Name a column of file names with --file; use a text field for a column of text, as in --field txt="
    ),
    "pass key_rule=last_dot, and read the shard with it; or key_rule=None, to skip the check": (
        "use --key-rule last-dot"
    ),
}
#: Characters that would affect the terminal or the line: control characters, and bytes that are not text.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
#: Characters that change the direction of text, so that a name could be disguised.
DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


#: An option in a message.
OPTION = re.compile(r"--[a-z][a-z-]+")
#: The options of the running command, used to filter advice in messages; ``None`` if no command runs.
_available: frozenset[str] | None = None


class WrongUse(Exception):
    """The command line is invalid; the message explains why, and how to fix it."""


#: What typer raises for an invalid command line, of the copy of click that it uses.
UsageError: Any = typer.BadParameter.__base__


#: Errors that are fixed by changing the command line, not the data.
USER_ERRORS = (MissingDependencyError, SpecError, ShardOpenError, UnknownSchemeError, UnsafeInputError, WrongUse)


def build_program(commands: Sequence[str]) -> typer.Typer:
    """Build the program from the named commands."""

    class InOrder(Program):
        def list_commands(self, _context: object) -> list[str]:
            return list(commands)  # typer lists groups last

    program = typer.Typer(
        cls=InOrder,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.callback()(describe)
    for name in commands:
        command = getattr(import_module(f"wds_datapipes.cli.{name}"), name)
        if isinstance(command, Mapping):
            below = typer.Typer(
                no_args_is_help=True, help=sys.modules[f"wds_datapipes.cli.{name}"].HELP, cls=CommandGroup
            )
            for word, each in command.items():
                below.command(word, cls=ProgramCommand)(report_errors(expand_options(each)))
            program.add_typer(below, name=name)
        else:
            program.command(name, cls=ProgramCommand)(report_errors(expand_options(command)))
    return program


class ProgramCommand(TyperCommand):
    """A command whose help shows values in the users' words, without the types of Python."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as the help shows them."""
        return in_words(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A group of commands, with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as the help shows them."""
        return in_words(super().get_params(ctx))


class Program(CommandGroup):
    """The whole program, which reports wrong use in one line, like all other errors."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command, and exit with its code."""
        if not options.get("standalone_mode", True):
            return super().main(*arguments, **options)
        try:
            code = super().main(*arguments, **{**options, "standalone_mode": False})
        except UsageError as error:
            context = getattr(error, "ctx", None)
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                command = context.command_path if context is not None else "wds-datapipes"
                message = error.format_message().rstrip(".").replace("Value error, ", "")
                for word in options.get("args") or sys.argv[1:]:
                    message = message.replace(word, redact(word))
                message = on_one_line(message)
                typer.echo(f"Error: {message}{'' if message.endswith('?') else '.'} See {command} --help", err=True)
            sys.exit(WRONG_USE)
        except typer.Abort:
            typer.echo("Interrupted", err=True)
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def in_words(params: list[Any]) -> list[Any]:
    """Give parameters their names in the help: a flag has no value, and an argument is its name alone."""
    for each in params:
        if isinstance(each, TyperArgument):
            name = f"{each.metavar or each.name.upper()}{'...' if each.nargs != 1 else ''}"
            shown = name if each.required else f"[{name}]"
            each.get_usage_pieces = functools.partial(_pieces, shown)  # type: ignore[method-assign]
            each.display_type_rich = _nothing  # type: ignore[attr-defined,method-assign,unused-ignore]  # of new releases
        elif getattr(each, "is_flag", False):
            each.metavar = ""
    return params


def _pieces(name: str, _context: object) -> list[str]:
    return [name]


def _nothing(ctx: object = None) -> str:  # noqa: ARG001  as typer calls it
    return ""


def show_version(requested: bool) -> None:
    """Print the version of the package and end the program."""
    if requested:
        typer.echo(f"wds-datapipes {wds_datapipes.__version__}")
        raise typer.Exit


def describe(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train from WebDataset tar shards with torchdata DataPipes."""


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the dataclass parameter ``options`` of a command by the fields of its class, as typer requires."""
    hints = get_type_hints(command, include_extras=True)
    if "options" not in hints:
        return command
    kind = hints.pop("options")
    shared = get_type_hints(kind, include_extras=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = kind(**{name: given.pop(name) for name in shared})
        command(options=options, **given)

    fields = inspect.signature(kind).parameters
    names = [name for each in kind.__mro__ for name in vars(each).get("__annotations__", ()) if name in fields]
    own = (each for each in inspect.signature(command).parameters.values() if each.name != "options")
    keywords = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=(hints | shared)[each.name])
        for each in (*own, *(fields[name] for name in names))
    ]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # read by inspect.signature
    run.__annotations__ = hints | shared
    return run


def report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Replace the tracebacks of expected errors by a one-line message and an exit code.

    Expected are the errors of this package, Ctrl-C, and a closed output pipe, as with ``| head``. All other exceptions
    are bugs and keep their traceback.
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
            # Python must not flush the rest of the buffer at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNREAD) from None

    return run


def options_of_command(command: Callable[..., object]) -> frozenset[str]:
    """Return the names of the options of a command."""
    names: set[str] = set()
    for name, kind in get_type_hints(command, include_extras=True).items():
        for option in getattr(kind, "__metadata__", ()):
            if isinstance(option, OptionInfo):
                given = (option.default, *(option.param_decls or ()))  # typer stores the first name as the default
                words = [word for word in given if isinstance(word, str) and word.startswith("-")]
                names.update(words or [f"--{name.replace('_', '-')}"])
    return frozenset(names)


def has_options(text: str) -> bool:
    """Whether the running command has all options named in a text."""
    return _available is None or _available.issuperset(OPTION.findall(text))


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as one line, without its location in the code."""
    typer.echo(f"Warning: {on_one_line(str(message))}", err=True)


def say_nothing_found(shards: int, what: str = "sample") -> None:
    """Print a note to standard error that the shards have nothing to show."""
    typer.echo(f"Note: there is no {what} in {shards:,} shard{'' if shards == 1 else 's'}", err=True)


def printable(text: str) -> str:
    r"""Escape a name from an archive so that it can be printed on a line of a terminal.

    >>> printable("a\x1b[31m\n"), printable("Bär"), printable("a\u202eb")
    ('a\\x1b[31m\\x0a', 'Bär', 'a\\u202eb')
    """
    return DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", without_controls(text))


def without_controls(text: str) -> str:
    """Escape the control characters in a text."""
    return UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def on_one_line(message: str) -> str:
    """Format a message for the command line: replace its advice by an option, or remove it if there is none.

    >>> on_one_line('It has no end marker. If it was written so, pass end_marker="optional"')
    'It has no end marker. If it was written so, use --end-marker optional'
    """
    for words, option in WORDS.items():
        if words in message:
            message = message.replace(words, option) if has_options(option) else _without(message, words)
    return printable(redact_text(message))


def _without(message: str, words: str) -> str:
    """Remove the clause that starts with the words, or the sentence that contains them."""
    at = message.index(words)
    end = message.find(". ", at)
    end = len(message) if end < 0 else end
    if words.startswith(","):
        return message[:at] + message[at + len(words) :]
    return f"{message[: max(message.rfind('. ', 0, at), 0)]}{message[end:]}" or message


def message_of(error: Exception) -> str:
    r"""Return the original message of an error.

    An error from a worker includes its traceback there, and torch appends the stage.

    >>> message_of(ValueError("Caught ValueError in worker process 0.\nOriginal Traceback:\nValueError: odd\nThis ..."))
    'odd'
    """
    text = str(error)
    raised = re.findall(rf"^(?:\w+\.)*{type(error).__name__}: (.+)$", text, flags=re.MULTILINE)
    return raised[-1] if raised else text.partition("\n")[0]
