"""Options shared by several commands."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.redaction import redact
from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot
from wds_datapipes.shards.patterns import expand_urls

__all__ = [
    "AsJson",
    "LimitedOptions",
    "Limits",
    "ReadingOptions",
    "SampleOptions",
    "Shards",
    "StoreOptions",
    "Workers",
    "parse_bytes",
    "parse_limits",
]

#: Suffixes of a number of bytes, and their factors.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class KeyRuleWord(str, Enum):
    """The key rules on the command line."""

    first_dot = "first-dot"
    last_dot = "last-dot"


class Presence(str, Enum):
    """Whether archives must have an end marker."""

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
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="NUMBER",
        help="The number of processes; by default one per CPU.",
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]
Limits: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="A limit for reading, such as member_bytes=20GiB or expansion=none; may be repeated.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of commands that read from stores."""

    storage_options: Annotated[
        str,
        typer.Option(
            "--storage-options", metavar="JSON", help="Options for fsspec, such as '{\"anon\": true}', or @FILE."
        ),
    ] = ""
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="The timeout for a silent store; 30 by default for web servers.",
            show_default=False,
        ),
    ] = None
    retries: Annotated[
        int | None,
        typer.Option(
            "--retries",
            min=0,
            metavar="NUMBER",
            help="The number of retries of a request to a store; 10 by default.",
            show_default=False,
        ),
    ] = None

    @cached_property
    def store(self) -> dict[str, Any] | None:
        """The storage options, parsed."""
        return parse_storage_options(self.storage_options, self.timeout, self.retries)

    def list_shards(self, patterns: Sequence[str]) -> list[str]:
        """Expand patterns to the URLs of shards, in order."""
        named = [f"{each}/" if os.path.isdir(each) and not each.endswith("/") else each for each in patterns]  # noqa: PTH112  as typed
        return expand_urls(named, variables=os.environ, storage_options=self.store)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(StoreOptions):
    """Options of commands that handle samples."""

    as_json: AsJson = False
    key_rule: Annotated[KeyRuleWord, typer.Option("--key-rule", help="Where the key ends in a file name.")] = (
        KeyRuleWord.first_dot
    )

    @property
    def rule(self) -> KeyRule:
        """The key rule."""
        return {KeyRuleWord.first_dot: first_dot, KeyRuleWord.last_dot: last_dot}[self.key_rule]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(SampleOptions):
    """Options of commands that read shards."""

    end_marker: Annotated[Presence, typer.Option("--end-marker", help="Whether a shard must have an end marker.")] = (
        Presence.required
    )

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments for functions that read samples."""
        return {"key_rule": self.rule, "end_marker": self.end_marker.value, "storage_options": self.store}


@dataclass(frozen=True, kw_only=True)
class LimitedOptions(ReadingOptions):
    """Options of commands that read shards with limits."""

    limits: Limits = None

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments for functions that read samples."""
        return {**super().reading, "limits": parse_limits(self.limits)}


def parse_limits(texts: Sequence[str] | None) -> ReadLimits:
    """Parse --limit into read limits.

    >>> parse_limits(["member_bytes=20GB", "expansion=none"]).member_bytes
    20000000000
    """
    names = [field.name for field in fields(ReadLimits)]
    found: dict[str, Any] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if name not in names or not value:
            raise WrongUse(f"--limit must be NAME=VALUE with one of the names {', '.join(names)}, not {text!r}")
        if value == "none":
            found[name] = None
        else:
            number = parse_bytes(value, f"--limit {name}")
            found[name] = number if name == "expansion" else int(number)
    try:
        return ReadLimits(**found)
    except ValueError as error:
        raise WrongUse(f"--limit: {error}") from None


def parse_storage_options(text: str, timeout: float | None = None, retries: int | None = None) -> dict[str, Any] | None:
    """Parse storage options from JSON or a JSON file, and add ``--timeout`` and ``--retries``.

    >>> parse_storage_options('{"anon": true}', timeout=5)
    {'anon': True, 'timeout_s': 5}
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise WrongUse(f"--timeout must be a positive number of seconds, not {timeout:g}")
    waiting = {name: value for name, value in (("timeout_s", timeout), ("retries", retries)) if value is not None}
    options = {**_parse_json_options(text), **waiting}
    return options or None


def _parse_json_options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        options = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise WrongUse(f"--storage-options cannot be read from {redact(text[1:])}: {error.strerror}") from None
    except ValueError as error:
        raise WrongUse(f"--storage-options is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise WrongUse("--storage-options must be a JSON object, as in '{\"anon\": true}'")
    return options


def parse_bytes(text: str, option: str) -> float:
    """Parse a number of bytes.

    >>> parse_bytes("500MB", "--maxsize"), parse_bytes("2 GiB", "--maxsize"), parse_bytes("1e9", "--maxsize")
    (500000000.0, 2147483648.0, 1000000000.0)
    """
    word = text.strip().lower().removesuffix("b")
    number = word.rstrip("kmgti ")
    try:
        size = float(number) * UNITS[word[len(number) :].strip()]
    except (KeyError, ValueError):
        raise WrongUse(f"{option} must be a number of bytes, such as 500MB, 2GiB or 1e9, not {text!r}") from None
    if not 0 < size < float("inf"):
        raise WrongUse(f"{option} must be a positive number of bytes, not {text!r}")
    return size
