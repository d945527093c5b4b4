"""The help of the commands, and messages in terms of their options."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import wds_datapipes
from wds_datapipes.hints import END_MARKER, IGNORE_ZEROS, LAST_DOT, LIMITS, REKEY, REMOVE_OLD, WRITE_NO_RULE, Message
from wds_datapipes.tools.cli import app, errors
from wds_datapipes.tools.cli.app import COMMANDS

#: The options and arguments of each command.
ALL = {name: list(app.arguments_of(app.find_command(name))) for name in COMMANDS}
#: An option in a text.
OPTION = re.compile(r"--[a-z][a-z-]+")


def test_every_command_is_listed_and_every_option_described(program: Any) -> None:
    pages: dict[str, str] = {}
    for group in ("", "create", "cache"):
        app.build_app.cache_clear()  # a program starts without the commands that ALL has imported
        pages[group] = program(*group.split(), "--help").out
    listed = {group: re.findall(r"^  ([a-z]+)  +\S", page, flags=re.MULTILINE) for group, page in pages.items()}
    assert listed[""] == [*dict.fromkeys(name.split()[0] for name in COMMANDS)]
    assert listed["create"] == ["images", "imagenet", "recipe"]
    assert listed["cache"] == ["ls", "warm", "clear"]
    app.build_app.cache_clear()
    assert program().out == pages[""]
    assert [(name, each.name) for name, found in ALL.items() for each in found if not each.parameter.help] == []
    for name in COMMANDS:
        done = program(*name.split(), "-h")
        assert (done.code, done.err) == (0, "")
        assert re.match(rf"usage: wds-datapipes {name} (--[a-z-]+ [A-Z|]+ )*\[OPTIONS\]", done.lines[0]), done.lines[0]
        described = re.findall(r"^  (?:(--[a-z-]+)|([A-Z]+) )", done.out, flags=re.MULTILINE)
        assert {option or argument for option, argument in described} == {each.name for each in ALL[name]}


def test_a_short_option_has_one_meaning() -> None:
    meanings: dict[str, set[str]] = {}
    for each in (each for found in ALL.values() for each in found):
        for short in (name for name in each.names if re.fullmatch("-[a-z]", name)):
            meanings.setdefault(short, set()).add(each.name)
    assert {short: names for short, names in meanings.items() if len(names) > 1} == {}
    assert {"-f", "-o", "-n"} <= set(meanings)


def test_commands_that_read_stores_have_all_options_for_them() -> None:
    counts = [len({"--storage-options", "--timeout", "--retries"} & options_of(name)) for name in COMMANDS]
    assert set(counts) == {0, 3}
    assert counts.count(3) > 12


def test_commands_that_read_the_data_of_shards_have_limits() -> None:
    names = [name for name in COMMANDS if reads_shards(name) and name != "cache warm"]
    assert len(names) == 11
    assert all("--limit" in options_of(name) for name in names)


def test_the_version_is_that_of_the_package(program: Any) -> None:
    assert program("-V").lines == program("--version").lines == [f"wds-datapipes {wds_datapipes.__version__}"]


def test_options_and_shards_may_be_in_any_order(program: Any, shards: list[str]) -> None:
    lines = program("ls", shards[0], "-n", "1", shards[1]).lines
    assert lines == ["a-0.tar:", "00  1  jpg 0  cls 1", "", "a-1.tar:", "10  2  jpg 1  cls 1"]


ROOT = Path(__file__).parents[3]
REFERENCE = (ROOT / "docs/reference/command-line.md").read_text("utf-8")
#: The reference of each command, by the heading of its section; "" is what all have in common.
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", REFERENCE, flags=re.MULTILINE)[1:]}
#: Options that a section names although they belong to another command, which it names as well.
OF_OTHERS = {"plan": {"--manifest"}, "steps": {"--html"}}
#: A call of the program in a page or a program: everything up to the end of the command.
CALL = re.compile(r"wds-datapipes ((?:(?!\.$)[^`\n|;&])*)", re.MULTILINE)
PAGES = [
    ROOT / "README.md",
    *(each for kind in ("md", "sh", "py") for each in sorted((ROOT / "docs").rglob(f"*.{kind}"))),
]


def options_of(name: str) -> set[str]:
    return app.options_of(app.find_command(name)) | {"-h", "--help"}


def reads_shards(name: str) -> bool:
    return any(each.name == "SHARDS" for each in ALL[name])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_calls_on_a_page_have_options_of_their_command(page: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
    for words in CALL.findall(text):
        name = next(
            (each for each in sorted(COMMANDS, key=len, reverse=True) if f"{words} ".startswith(f"{each} ")), ""
        )
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", words)  # what is quoted belongs to other programs
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", bare) if name else ():
            short = option[:2] if option[1] != "-" else option  # -n5
            assert {option, short} & options_of(name), f"{name} has no {option}: {words}"


def test_every_command_has_a_row_and_a_section_that_names_its_own_options() -> None:
    common = REFERENCE.partition("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`.*?) \|", common, flags=re.MULTILINE))
    assert [name for name in COMMANDS if f"`{name}`" not in rows and f"`{name.split()[0]}`" not in rows] == []
    for name in COMMANDS:
        known = set().union(*(options_of(each) for each in COMMANDS if each.split()[0] == name.split()[0]))
        section = SECTIONS.get(name.split()[0], "")
        assert section or name == "demo"
        named = {option for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", section) for option in OPTION.findall(code)}
        assert named <= known | OF_OTHERS.get(name, set()), name


def test_options_that_the_reference_calls_common_are() -> None:
    reading = {name for name in COMMANDS if reads_shards(name)} - {"cache warm"}
    for option in ("--key-rule", "--end-marker", "--limit", "--storage-options", "--json"):
        assert [name for name in sorted(reading) if option not in options_of(name)] == [], option
    assert [name for name in COMMANDS if "--json" not in options_of(name)] == ["demo"]
    with_workers = {"verify", "index", "stats", "bench", "map", "create images", "create imagenet", "create recipe"}
    assert [name for name in sorted(with_workers) if "--num-workers" not in options_of(name)] == []


MODULES = sorted(Path(str(app.__file__)).parent.rglob("[a-z]*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_texts_of_a_command_name_its_options(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    known = set().union(*map(options_of, COMMANDS))
    assert {option for text in texts for option in OPTION.findall(text)} <= known | {
        "--help",
        "--version",
        "--install-completion",
    }


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (Message("if it was written so, ", END_MARKER), "if it was written so, use --end-marker optional"),
        (Message(REMOVE_OLD, ", or rename them"), "use --remove-old, or rename them"),
        (Message(LAST_DOT, ", and read"), "use --key-rule last-dot, and read"),
        (Message(WRITE_NO_RULE, " if so"), "in Python, pass options=WriteOptions(key_rule=None) if so"),
        (Message(IGNORE_ZEROS, " to read"), "in Python, pass ignore_zeros=True to read"),
        (Message(LIMITS["tail_bytes"], " with more"), "use --limit tail_bytes=... with more"),
        (Message(REKEY, " for new keys"), "use --rekey {number:08d} for new keys"),
        ("a key: 'pass on_error=1'", "a key: 'pass on_error=1'"),
        ("a key: 'pass=1' \x1b[31m\u202e", r"a key: 'pass=1' \x1b[31m\u202e"),
    ],
)
def test_advice_to_pass_an_argument_names_the_option(message: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    available = frozenset({"--end-marker", "--remove-old", "--key-rule", "--limit", "--rekey"})
    monkeypatch.setattr(errors, "available_options", available)
    assert errors.on_one_line(message) == line
