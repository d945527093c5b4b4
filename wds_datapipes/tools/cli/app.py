"""The commands as an app of cyclopts, which reads their signatures and docstrings; and its help pages."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter
from cyclopts.argument import ArgumentCollection

import wds_datapipes
from wds_datapipes.tools.cli.errors import WrongUse, available_options

PROGRAM = "wds-datapipes"
#: The commands in the order of the help page, each in a module of its name.
COMMANDS = (
    *("demo", "create images", "create imagenet", "create recipe", "ls", "show", "cat", "verify", "index", "stats"),
    *("bench", "plan", "steps", "split", "shuffle", "sort", "map", "cache ls", "cache warm", "cache clear"),
)
#: Commands of several words, by their first word.
GROUPS = {
    "create": "Create shards from images, from ImageNet or from a recipe.",
    "cache": "Manage the local copies of shards.",
}
#: The column where the descriptions of options begin.
COLUMN = 24


class HelpPage:
    """Prints the parts of a help page as plain text, whose words are never broken, so that examples can be copied."""

    def render_usage(self, console: Any, _: object, usage: object) -> None:
        """Print the first line."""
        console.file.write(f"usage: {usage}".rstrip() + "\n")

    def render_description(self, console: Any, _: object, description: Any) -> None:
        """Print the paragraphs of the docstring."""
        for paragraph in plain(description).split("\n\n"):
            console.file.write("\n" + "".join(f"{line}\n" for line in wrapped(paragraph, console.width)))

    def __call__(self, console: Any, options: Any, panel: Any) -> None:  # noqa: ARG002  of all formatters
        """Print a group of commands or options."""
        if panel.entries:
            console.file.write(f"\n{panel.title}:\n")
        for names, described in map(self.row_of, panel.entries):
            lines = wrapped(described, console.width - COLUMN)
            if len(names) > COLUMN - 4:
                console.file.write(f"  {names}\n")
                names = ""
            for line in lines or [""]:
                console.file.write(f"  {names:{COLUMN - 4}}  {line}".rstrip() + "\n")
                names = ""

    @staticmethod
    def row_of(entry: Any) -> tuple[str, str]:
        """Return the names of an entry with its value, and its description with choices and default."""
        names = [*entry.names, *entry.shorts]
        names = getattr(entry, "display_labels_with_metavar", None) or names or [entry.positional_label]
        facts = [f"one of {', '.join(entry.choices)}"] if entry.choices else []
        facts += [f"default: {entry.default}"] if entry.default not in (None, "", '""', "True", "False") else []
        more = f" ({'; '.join(facts)})" if facts else ""
        return ", ".join(names), plain(entry.description) + more


def plain(text: Any) -> str:
    """Return the text of something that cyclopts would print."""
    return str(getattr(getattr(text, "primary_renderable", text), "plain", text)).strip()


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class StandardStream(str):
    """The argument ``-``, which is a value and no option."""

    def startswith(self, *_: object) -> bool:
        """Deny that an option begins, which cyclopts asks."""
        return False


@cache
def build_app() -> App:
    """Return the app, whose commands are imported when they are used."""
    options = Group("Options", sort_key=5)
    app = App(
        name=PROGRAM,
        help="Train from WebDataset tar shards with PyTorch DataPipes.\n\n"
        "COMMAND --help describes the options of a command.",
        version=lambda: f"{PROGRAM} {wds_datapipes.__version__}",
        version_flags=("--version", "-V"),
        help_format="plaintext",
        help_formatter=HelpPage(),
        default_parameter=Parameter(negative=(), allow_repeating=True),
        group_arguments=Group("Arguments", sort_key=0),
        group_parameters=options,
    )
    app.register_install_completion_command(help="Let the shell complete commands, options and files.")
    for number, name in enumerate(COMMANDS):
        *above, word = name.split()
        if above and above[0] not in app:
            app.command(App(help=GROUPS[above[0]], sort_key=number), name=above[0])
        module = f"wds_datapipes.tools.cli.{name.replace(' ', '.')}"
        (app[above[0]] if above else app).command(f"{module}:{word}", name=word, sort_key=number)
    for flag in ("--help", "--version", "--install-completion"):
        app[flag].group = (options,)
    return app


def find_command(name: str) -> App:
    """Import a command.

    >>> find_command("cache ls").name
    ('ls',)
    """
    app = build_app()
    for word in name.split():
        app = app[word]
    return app


def options_of(command: App) -> set[str]:
    """Return the names of the options of a command.

    >>> sorted(options_of(find_command("demo")))
    ['--output-dir']
    """
    return {name for each in arguments_of(command) for name in each.names if name.startswith("-")}


def arguments_of(command: App) -> ArgumentCollection:
    """Return the options and arguments of a command, except for the dataclasses that have them as fields."""
    return command.assemble_argument_collection(parse_docstring=True).filter_by(show=True)


def parse(arguments: Sequence[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Return the function that the arguments name, and what to call it with.

    Raises:
        WrongUse: there is no such command, or an argument is wrong.
    """
    app = build_app()
    words = [StandardStream(word) if word == "-" else word for word in arguments]
    names, commands, _ = app.parse_commands(words)
    try:
        command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False, verbose=False)
    except (CycloptsError, ValueError) as error:  # a ValueError is of a dataclass that checks its fields
        said = str(error)
        if isinstance(error, MissingArgumentError) and error.argument and not (error.argument.tokens or error.keyword):
            said = f"{error.argument.name} is required"
        said += "" if said.endswith((".", "?")) else "."
        raise WrongUse(f"{said} See {' '.join((PROGRAM, *names))} --help") from None
    available_options.clear()
    if command is commands[-1].default_command:
        available_options.update(options_of(commands[-1]))
    shown = " ".join(word for word in names if not word.startswith("-"))
    if command.__name__ == "help_print" and shown not in COMMANDS:  # a list, with the first lines of their docstrings
        for name in COMMANDS:
            find_command(name)
    return command, bound
