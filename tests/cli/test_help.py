"""The help of the commands, and messages in terms of their options."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import wds_datapipes
from wds_datapipes.cli import COMMANDS, _app
from wds_datapipes.cli._declaration import declare_options


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """All commands below one, with their names."""
    below = getattr(command, "commands", {})
    found = [each for name, other in below.items() for each in commands(other, (*path, name))]
    return [(path, command), *found]


ALL = dict(commands(typer.main.get_command(_app.build_program(COMMANDS))))
#: An option in a text.
OPTION = re.compile(r"--[a-z][a-z-]+")


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_the_help_has_no_types_of_python(program: Any, words: tuple[str, ...]) -> None:
    for option in ("-h", "--help"):
        done = program(*words, option)
        assert done.code == 0
        for word in ("<bool>", "<str>", "<int", "<float", "<list", "list[", "<path>", "TEXT", "INTEGER", "{SHARDS}"):
            assert word not in done.out, (word, done.out)


def test_the_help_lists_every_command_and_describes_every_option(program: Any) -> None:
    listed = re.findall(r"^. ([a-z]+)  +\S", program("--help").out.partition("Commands")[2], flags=re.MULTILINE)
    assert listed == list(COMMANDS)
    assert [(words, each.name) for words, command in ALL.items() for each in command.params if not each.help] == []
    assert all(command.help for command in ALL.values())


def test_a_short_option_has_one_meaning() -> None:
    meanings: dict[str, set[str]] = {}
    for command in ALL.values():
        for each in command.params:
            for short in (name for name in each.opts if len(name) == 2 and name.startswith("-")):
                meanings.setdefault(short, set()).add(each.opts[0])
    assert {short: names for short, names in meanings.items() if len(names) > 1} == {}
    assert {"-f", "-o", "-n", "-V"} <= set(meanings)


def test_commands_that_read_stores_have_all_options_for_them() -> None:
    shared = {"storage_options", "timeout", "retries"}
    for words, command in ALL.items():
        assert len(shared & {each.name for each in command.params}) in (0, 3), words
    assert sum("timeout" in {each.name for each in command.params} for command in ALL.values()) > 12


def test_the_version_is_that_of_the_package(program: Any) -> None:
    assert program("-V").lines == program("--version").lines == [f"wds-datapipes {wds_datapipes.__version__}"]


def test_the_shell_completes_commands() -> None:
    code = "import sys; sys.argv[0] = 'wds-datapipes'; from wds_datapipes.cli import main; main()"
    asked = {"_WDS_DATAPIPES_COMPLETE": "complete_bash", "COMP_WORDS": "wds-datapipes sh", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["show", "shuffle"])


@pytest.mark.parametrize("path", sorted(Path(str(_app.__file__)).parent.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_texts_of_a_command_name_its_options(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    known = {name for command in ALL.values() for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {option for text in texts for option in OPTION.findall(text)} <= known | {"--help"}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ('if it was written so, pass end_marker="optional"', "if it was written so, use --end-marker optional"),
        ("Pass remove_old=True, or rename them", "Use --remove-old, or rename them"),
        ("pass key_rule=last_dot, and read", "use --key-rule last-dot, and read"),
        ("pass key_rule=None if so", "in Python, pass key_rule=None if so"),
        ("Pass ignore_zeros=True to read", "In Python, pass ignore_zeros=True to read"),
        ("allow it with allow_pickle=True", "allow it in Python, with allow_pickle=True"),
        ("pass limits=ReadLimits(tail_bytes=...) with more", "use --limit tail_bytes=... with more"),
        ('pass rekey="{number:08d}" for new keys', "use --rekey {number:08d} for new keys"),
        ("a key: 'pass=1' \x1b[31m\u202e", r"a key: 'pass=1' \x1b[31m\u202e"),
    ],
)
def test_advice_to_pass_an_argument_names_the_option(message: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    available = frozenset({"--end-marker", "--remove-old", "--key-rule", "--limit", "--rekey"})
    monkeypatch.setattr(_app, "_available", available)
    assert _app.on_one_line(message) == line


def test_a_command_that_does_not_describe_an_option_cannot_be_declared() -> None:
    def copy(source: str, quickly: bool = False) -> None:
        """Copy.

        Options:
            SOURCE: The source.
        """

    with pytest.raises(AssertionError, match=r"copy does not describe \{'quickly'\}"):
        declare_options(copy)
