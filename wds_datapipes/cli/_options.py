"""What several commands take: shards, how they are read, how many processes work."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot
from wds_datapipes.shards.patterns import expand_urls

__all__ = [
    "AsJson",
    "EndMarkerOption",
    "KeyRuleOption",
    "KeyRuleWord",
    "Limits",
    "Presence",
    "Retries",
    "Shards",
    "StorageOptions",
    "Timeout",
    "Workers",
    "key_rule_of",
    "limits_of",
    "list_shards",
    "options_of",
    "parse_bytes",
]

#: What stands behind a number of bytes, and what it is worth.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class KeyRuleWord(str, Enum):
    """The key rules, for the command line."""

    first_dot = "first-dot"
    last_dot = "last-dot"


class Presence(str, Enum):
    """Whether archives have to have their end marker."""

    required = "required"
    optional = "optional"


Shards: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="SHARDS",
        help="Paths, URLs or patterns, such as 'train-{000..099}.tar' or 's3://bucket/\\*.tar'; - is standard input.",
        show_default=False,
    ),
]
KeyRuleOption: TypeAlias = Annotated[
    KeyRuleWord, typer.Option("--key-rule", help="Where the key of a sample ends in the name of a file.")
]
EndMarkerOption: TypeAlias = Annotated[
    Presence, typer.Option("--end-marker", help="Whether a shard without its end marker is faulty.")
]
StorageOptions: TypeAlias = Annotated[
    str,
    typer.Option("--storage-options", metavar="JSON", help="For fsspec, such as '{\"anon\": true}'; @FILE reads it."),
]
Timeout: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="How long a store may send nothing; 30 by default for web servers.",
        show_default=False,
    ),
]
Retries: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--retries",
        min=0,
        metavar="NUMBER",
        help="How often a store is asked again for a shard; 10 by default.",
        show_default=False,
    ),
]
Limits: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="What a shard may ask for, such as member_bytes=20GiB or expansion=none; repeat it.",
        show_default=False,
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="How many processes; one for each processor by default.", show_default=False),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]


def list_shards(patterns: Sequence[str], storage_options: dict[str, Any] | None) -> list[str]:
    """Return the shards that patterns stand for, in their order."""
    return expand_urls(list(patterns), variables=os.environ, storage_options=storage_options)


def key_rule_of(word: KeyRuleWord) -> KeyRule:
    """Return the key rule of a word."""
    return {KeyRuleWord.first_dot: first_dot, KeyRuleWord.last_dot: last_dot}[word]


def limits_of(texts: Sequence[str] | None) -> ReadLimits:
    """Return the limits of shards that are read.

    >>> limits_of(["member_bytes=20GB", "expansion=none"]).member_bytes
    20000000000
    """
    names = [field.name for field in fields(ReadLimits)]
    found: dict[str, Any] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if name not in names or not value:
            raise WrongUse(f"--limit is NAME=VALUE, with one of the names {', '.join(names)}, not {text!r}")
        if value == "none":
            found[name] = None
        else:
            number = parse_bytes(value, f"--limit {name}")
            found[name] = number if name == "expansion" else int(number)
    try:
        return ReadLimits(**found)
    except ValueError as error:
        raise WrongUse(f"--limit: {error}") from None


def options_of(text: str, timeout: float | None = None, retries: int | None = None) -> dict[str, Any] | None:
    """Return storage options from JSON, or from a file of it, with what ``--timeout`` and ``--retries`` say.

    >>> options_of('{"anon": true}', timeout=5)
    {'anon': True, 'timeout_s': 5}
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise WrongUse(f"--timeout is a number of seconds above 0, not {timeout:g}")
    waiting = {name: value for name, value in (("timeout_s", timeout), ("retries", retries)) if value is not None}
    options = {**_parsed_options(text), **waiting}
    return options or None


def _parsed_options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        options = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise WrongUse(f"--storage-options cannot be read from {text[1:]}: {error.strerror}") from None
    except ValueError as error:
        raise WrongUse(f"--storage-options is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise WrongUse("--storage-options is a JSON object, as in '{\"anon\": true}'")
    return options


def parse_bytes(text: str, option: str) -> float:
    """Return a number of bytes.

    >>> parse_bytes("500MB", "--maxsize"), parse_bytes("2 GiB", "--maxsize"), parse_bytes("1e9", "--maxsize")
    (500000000.0, 2147483648.0, 1000000000.0)
    """
    word = text.strip().lower().removesuffix("b")
    number = word.rstrip("kmgti ")
    try:
        size = float(number) * UNITS[word[len(number) :].strip()]
    except (KeyError, ValueError):
        raise WrongUse(f"{option} is a number of bytes, such as 500MB, 2GiB or 1e9, not {text!r}") from None
    if not 0 < size < float("inf"):
        raise WrongUse(f"{option} is a number of bytes above 0, not {text!r}")
    return size
