"""Messages name no option that the command lacks."""

from __future__ import annotations

import ast
import re
import tarfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.cli import COMMANDS, _app
from wds_datapipes.testing import build_shard

FUNCTIONS = {
    f"{name} {below}".strip(): _app.expand_options(function)
    for name in COMMANDS
    for command in [getattr(import_module(f"wds_datapipes.cli.{name}"), name)]
    for below, function in (command.items() if isinstance(command, dict) else [("", command)])
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_messages_advise_only_options_of_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _app.options_of_command(FUNCTIONS[name])
    monkeypatch.setattr(_app, "_available", options)
    for words, option in _app.WORDS.items():
        line = _app.on_one_line(f"The first sentence. It is wrong; {words}. The last one.")
        assert set(_app.OPTION.findall(line)) <= options
        assert line.startswith("The first sentence")
        assert line.endswith("The last one.")
        assert (option in line) is (set(_app.OPTION.findall(option)) <= options)
        if option not in line:
            assert words not in line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("It is too large. If it has to be, pass limits=ReadLimits(member_bytes=...) with more", "It is too large"),
        ("The key comes twice, or use new keys", "The key comes twice"),
        ("pass limits=ReadLimits(x)", "pass limits=ReadLimits(x)"),
    ],
)
def test_advice_without_an_option_is_left_out(message: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_app, "_available", frozenset({"--json"}))
    assert _app.on_one_line(message) == line


@pytest.mark.parametrize("name", COMMANDS)
def test_texts_of_a_command_name_its_options(name: str) -> None:
    module = import_module(f"wds_datapipes.cli.{name}")
    texts = [
        node.value
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {option for text in texts for option in _app.OPTION.findall(text)}
    options = {o for full, function in FUNCTIONS.items() if full.split()[0] == name for o in option_names(function)}
    assert named <= options | {"--help"}


def option_names(function: Any) -> frozenset[str]:
    return _app.options_of_command(function)


@pytest.mark.parametrize("command", ["ls", "split"])
def test_real_messages(command: str, program: Any) -> None:
    """`ls` has no --limit, and `split` no --rekey."""
    long: list[dict[str, Any]] = [{"__key__": "a" * 70_000, "txt": b"x"}]
    shards = [build_shard("long.tar", long, tar_format=tarfile.PAX_FORMAT)]
    if command == "split":
        shards = [build_shard(name, [{"__key__": "a", "txt": b"x"}]) for name in ("one.tar", "two.tar")]
    done = program(command, *shards, *(["-o", "x-%d.tar"] if command == "split" else []))
    assert done.code == 1
    assert done.err.startswith("Error: ")
    assert "--limit" not in done.err
    assert "--rekey" not in done.err


def test_no_advice_of_a_reader_or_an_encoder_is_left_in_terms_of_python() -> None:
    """Of the modules whose errors any command may print: an argument must become an option, or words."""
    root = Path(str(_app.__file__)).parents[1]
    modules = [path for name in ("tar", "io/compression", "codecs/encoding.py") for path in paths_below(root / name)]
    messages = [line for path in modules for line in texts_of(path).split("\n")]
    left = [line for text in messages for line in [_app.on_one_line(text)] if ADVICE.search(line)]
    assert len(messages) > 100
    assert left == []


#: An argument that a message advises to pass, unless it names the function to call.
ADVICE = re.compile(r"\bpass \w+=|\bwith \w+=")


def paths_below(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) or [path]


@pytest.mark.parametrize("words", _app.WORDS)
def test_translated_words_occur_in_messages_of_the_package(words: str) -> None:
    root = Path(str(_app.__file__)).parents[1]
    assert any(words in texts_of(path) for path in root.rglob("*.py") if path.name != "_app.py")


@cache
def texts_of(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return "\n".join(
        "".join(str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in nodes
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )
