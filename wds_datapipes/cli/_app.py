"""The program that runs the commands: help, version, error messages and exit codes."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

import wds_datapipes
from wds_datapipes.cli._declaration import declare_options, describe_command, options_of_command
from wds_datapipes.errors import (
    MissingDependencyError,
    ShardOpenError,
    SpecError,
    UnknownSchemeError,
    UnsafeInputError,
    WdsError,
)
from wds_datapipes.redaction import redact, redact_text

P = ParamSpec("P")

#: Exit codes other than 0; the last two stand for Ctrl-C and a closed output pipe.
FAULT_FOUND, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: Advice to pass an argument in Python, in the messages of the package.
ADVICE = re.compile(
    r"\b(?P<verb>[Pp]ass|[Uu]se|with) (?:limits=ReadLimits\((?P<limit>\w+=\.\.\.)\)|"
    r'(?P<name>\w+)=(?P<value>"[^"]*"|\w+(?:\.\w+)*))'
)
#: Characters that would affect the terminal or the line: control characters, bytes that are not text, and characters
#: that change the direction of text, so that a name could be disguised.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: The options of the running command, used to translate advice.
_available: frozenset[str] = frozenset()


class WrongUse(Exception):
    """The command line is invalid; the message explains why, and how to fix it."""


#: What typer raises for an invalid command line, of the copy of click that it uses.
UsageError: Any = typer.BadParameter.__base__
#: Errors that are fixed by changing the command line, not the data.
USER_ERRORS = (MissingDependencyError, SpecError, ShardOpenError, UnknownSchemeError, UnsafeInputError, WrongUse)


def build_program(commands: Mapping[str, str]) -> typer.Typer:
    """Build the program from the names of commands and of their modules."""

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
    for name, module in commands.items():
        command = getattr(import_module(f"wds_datapipes.cli.{module}"), name)
        if isinstance(command, Mapping):
            group = sys.modules[f"wds_datapipes.cli.{module}"].HELP
            below = typer.Typer(no_args_is_help=True, help=group, cls=CommandGroup)
            for word, each in command.items():
                add_command(below, word, each)
            program.add_typer(below, name=name)
        else:
            add_command(program, name, command)
    return program


def add_command(program: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command, which is a function as described in `declare_options`."""
    program.command(name, cls=ProgramCommand, help=describe_command(function))(report_errors(declare_options(function)))


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


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as one line, without its location in the code."""
    typer.echo(f"Warning: {on_one_line(str(message))}", err=True)


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
    """Format a message for the command line, with advice to pass an argument as the option of the same name.

    >>> on_one_line('It has no end marker. If it was written so, pass end_marker="optional"')
    'It has no end marker. If it was written so, in Python, pass end_marker="optional"'
    """
    return printable(redact_text(ADVICE.sub(_as_option, message)))


def _as_option(found: re.Match[str]) -> str:
    """Return advice as an option of the running command, or as advice for Python if the command has none."""
    name, value = ("limit", found["limit"]) if found["limit"] else (found["name"], found["value"].strip('"'))
    option = f"--{name.replace('_', '-')}"
    verb = found["verb"]
    if option not in _available or value in ("None", "False"):
        words = f"in Python, {verb.lower()}{found[0][len(verb) :]}"
        return words if verb.islower() else f"I{words[1:]}"
    verb = {"pass": "use", "Pass": "Use"}.get(verb, verb)
    if value == "True":
        return f"{verb} {option}"
    return f"{verb} {option} {value if found['limit'] else value.replace('_', '-')}"


def message_of(error: Exception) -> str:
    r"""Return the original message of an error.

    An error from a worker includes its traceback there, and torch appends the stage.

    >>> message_of(ValueError("Caught ValueError in worker process 0.\nOriginal Traceback:\nValueError: odd\nThis ..."))
    'odd'
    """
    text = str(error)
    raised = re.findall(rf"^(?:\w+\.)*{type(error).__name__}: (.+)$", text, flags=re.MULTILINE)
    return raised[-1] if raised else text.partition("\n")[0]
