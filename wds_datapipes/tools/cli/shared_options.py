"""Options shared by several commands, with parsers of their values."""

from __future__ import annotations

import json
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.errors import WdsError
from wds_datapipes.hints import Message
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot
from wds_datapipes.shards.patterns import expand_urls
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tools.cli.docstring_options import Natural
from wds_datapipes.tools.cli.program import WrongUse

#: Suffixes of a number of bytes with their factors.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: Selects the basic decoders alone.
BASIC = "basic"


@dataclass(frozen=True, kw_only=True)
class StoreArguments:
    """Options of commands that read from stores.

    Stores:
        --storage-options JSON: Options for fsspec, such as '{"anon": true}', or @FILE.
        --timeout SECONDS: The timeout for a silent store; 30 by default for web servers.
        --retries NUMBER: The number of retries of a request to a store; 10 by default.
    """

    storage_options: str = ""
    timeout: float | None = None
    retries: Natural | None = None

    @cached_property
    def store(self) -> dict[str, Any] | None:
        """The storage options, parsed, with ``--timeout`` and ``--retries``.

        >>> StoreArguments(storage_options='{"anon": true}', timeout=5).store
        {'anon': True, 'timeout_s': 5}
        """
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise WrongUse(f"--timeout must be a positive number of seconds, not {self.timeout:g}")
        waiting = {"timeout_s": self.timeout, "retries": self.retries}
        options = {name: value for name, value in waiting.items() if value is not None}
        return {**_parse_json_options(self.storage_options), **options} or None

    def list_shards(self, patterns: Sequence[str]) -> list[str]:
        """Expand patterns to the URLs of shards, in order."""
        named = [f"{each}/" if os.path.isdir(each) and not each.endswith("/") else each for each in patterns]  # noqa: PTH112  as typed
        return expand_urls(named, variables=os.environ, storage_options=self.store)


@dataclass(frozen=True, kw_only=True)
class SampleArguments(StoreArguments):
    """Options of commands that handle samples.

    Options:
        SHARDS: Paths, URLs or patterns, such as 'train-{000..099}.tar' or 's3://bucket/train-*.tar'; - is standard
            input.
        --num-workers NUMBER: The number of processes, by default one per CPU; 0 uses this process.
        --json: Print the result as JSON.
        --key-rule: The dot of a file name at which the key ends.
        --limit NAME=VALUE: A limit for reading, such as member_bytes=20GiB or expansion=none; may be repeated.
    """

    json: bool = False
    key_rule: Literal["first-dot", "last-dot"] = "first-dot"
    limit: list[str] | None = None

    @property
    def rule(self) -> KeyRule:
        """The key rule."""
        return first_dot if self.key_rule == "first-dot" else last_dot

    @property
    def limits(self) -> ReadLimits:
        """The limits.

        >>> SampleArguments(limit=["member_bytes=20GB", "expansion=none"]).limits.member_bytes
        20000000000
        """
        names = [field.name for field in fields(ReadLimits)]
        found: dict[str, Any] = {}
        for text in self.limit or ():
            name, _, value = text.partition("=")
            if name not in names or not value:
                raise WrongUse(f"--limit must be NAME=VALUE with one of the names {', '.join(names)}, not {text!r}")
            number = None if value.lower() == "none" else parse_bytes(value, f"--limit {name}")
            found[name] = number if number is None or name == "expansion" else int(number)
        with wrong_use("--limit: "):
            return ReadLimits(**found)


@dataclass(frozen=True, kw_only=True)
class ReadArguments(SampleArguments):
    """Options of commands that read shards.

    Options:
        --end-marker: Whether a shard must have an end marker; final ignores data that follow it.
    """

    end_marker: EndMarker = "required"

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments for functions that read samples."""
        options = {"key_rule": self.rule, "end_marker": self.end_marker, "storage_options": self.store}
        return {**options, "limits": self.limits}


@contextmanager
def wrong_use(prefix: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """Raise `WrongUse` in place of a ValueError that is not of this package, or of an error of these kinds."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ValueError, *kinds)) or (isinstance(error, WdsError) and type(error) not in kinds):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise WrongUse(Message(prefix, reason)) from None  # not the name of a file


def _parse_json_options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    with wrong_use("--storage-options: ", OSError, RecursionError):
        options = json.loads(Path(text[1:]).read_text(encoding="utf-8-sig") if text.startswith("@") else text)
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
    if not 0 < size < math.inf:
        raise WrongUse(f"{option} must be a positive number of bytes, not {text!r}")
    return size


def parse_pairs(texts: Sequence[str], pattern: str, rule: str) -> dict[str, str]:
    """Parse values such as NAME=VALUE, each name once.

    >>> parse_pairs(["train=9", "val=1"], "[^=]+", "--part must be NAME=SHARE")
    {'train': '9', 'val': '1'}

    Args:
        texts: the values of the option.
        pattern: matches a name.
        rule: what they must be, for the message.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not re.fullmatch(pattern, name) or not value or name in pairs:
            raise WrongUse(f"{rule}, not {text!r}")
        pairs[name] = value
    return pairs


def load_function(reference: str, option: str = "--function") -> Callable[..., Any]:
    """Import a function; its module may be in the current folder.

    Errors in the module itself keep their traceback.

    >>> load_function("os.path:basename")("a/b")
    'b'

    Args:
        reference: ``module:function``, or ``package.module:Class.method``.
        option: the option that names it, for messages.

    Raises:
        WrongUse: the module or function does not exist.
    """
    module, _, path = reference.partition(":")
    if not path:
        raise WrongUse(f"{option} must be MODULE:FUNCTION, as in convert:smaller, not {reference!r}")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)  # as python -m does
    try:
        found: Any = pkgutil.resolve_name(reference)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise WrongUse(f"No module named {error.name!r}, neither installed nor in {folder}") from None
    except (AttributeError, ValueError) as error:
        raise WrongUse(f"There is no {reference!r}: {error}") from None
    if not callable(found):
        raise WrongUse(f"{reference!r} is not a function, but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def parse_decoders(words: list[str] | None) -> list[str] | None:
    """Parse --decode into the names of decoders; an empty list means the basic decoders alone.

    Raises:
        WrongUse: a decoder does not exist.
    """
    if words is None:
        return None
    names = [word for word in words if word != BASIC]
    with wrong_use("--decode: "):
        DecoderChain(names, {})
    return names
