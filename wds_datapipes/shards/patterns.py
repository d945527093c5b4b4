"""Shard patterns: expands variables, braces and globs to the URLs of shards."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from braceexpand import braceexpand

from wds_datapipes.errors import SpecError, UnsafeInputError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.urls import check_url
from wds_datapipes.redaction.storage_options import raise_alone
from wds_datapipes.shards.listing import GLOB_MARKS, list_urls
from wds_datapipes.shards.url_rewriting import Rewrite, Rules, compile_rules, rewrite_url

Patterns: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""A pattern, or an iterable of patterns in the order of their shards."""

#: How deeply variables may refer to other variables.
MAX_ROUNDS = 10

#: The maximum number of shards in one pattern, and the maximum total length of their names in characters.
MAX_SHARDS, MAX_CHARACTERS = 10_000_000, 1 << 31

#: A numeric range between braces.
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
VARIABLE = re.compile(r"\$\{(\w+)\}")


def expand_urls(
    urls: Patterns,
    *,
    variables: Mapping[str, str],
    storage_options: Mapping[str, Any] | None = None,
    rewrite: Rewrite | None = None,
    allow_local_files: bool = True,
) -> list[str]:
    r"""List the shards of one or more patterns, in order.

    A pattern is expanded in these steps:

    1. ``::`` separates patterns.
    2. ``${NAME}`` becomes the value of the variable ``WDS_NAME``, which may contain any of the following.
    3. Braces: ``{000..146}`` counts with leading zeros, ``{0..8..2}`` in steps, ``{9..0}`` down, ``{train,val}`` lists.
       They nest. In a pattern with braces, a backslash escapes the next character.
    4. The first rule of `compile_rules` that changes the URL is applied.
    5. A local path with ``*``, ``?``, ``[...]`` or ``**`` becomes the files that match it, sorted, unless a file of
       exactly that name exists. In a URL of a remote file system, only ``*`` is a wildcard.
    6. A directory, which ends in ``/``, becomes its shards, sorted: files that end in ``.tar``, ``.tgz`` and so on.

    Steps 5 and 6 do not apply to ``-``, ``pipe:`` and the schemes of `register_opener`.

    >>> expand_urls("s3://bucket/{train-{08..10},val-0}.tar", variables={})
    ['s3://bucket/train-08.tar', 's3://bucket/train-09.tar', 's3://bucket/train-10.tar', 's3://bucket/val-0.tar']
    >>> expand_urls(["${DATA}/0.tar", "pipe:cat 1.tar"], variables={"WDS_DATA": "/data"})
    ['/data/0.tar', 'pipe:cat 1.tar']

    Args:
        urls: a string, a path, or an iterable of these.
        variables: the values for step 2, usually ``os.environ``.
        storage_options: passed to the remote file systems that are listed.
        rewrite: the rules for step 4, see `compile_rules`.
        allow_local_files: False allows only URLs of files on a network, and no variables.

    Raises:
        SpecError: a pattern is invalid, or nothing matches it.
        UnknownSchemeError: the remote file system to list is unknown.
        MissingDependencyError: the package of the remote file system to list is not installed.
        UnsafeInputError: a pattern has a variable, or a URL is not that of a file on a network, and
            ``allow_local_files`` is False.
    """
    options = storage_options or {}
    rules = compile_rules(rewrite, variables)
    expanded: list[str] = []
    for text in pattern_texts(urls, allow_local_files):
        for pattern in split_patterns(text):
            if not allow_local_files and (found := VARIABLE.search(pattern)):
                raise UnsafeInputError(
                    f"The shard pattern {redact(pattern)!r} was refused: with allow_local_files=False, environment "
                    f"variables such as {found[0]} are not substituted"
                )
            expanded += expand_pattern(substitute(pattern, variables), options, rules, allow_local_files)
    if not expanded:
        raise SpecError(f"There are no shards in {urls!r}. Name at least one")
    return expanded


def pattern_texts(urls: Patterns, allow_local_files: bool = True) -> Iterator[str]:
    """Return the patterns as strings; ``allow_local_files`` also checks for directories."""
    if isinstance(urls, (str, os.PathLike)):
        yield pattern_text(urls, allow_local_files=allow_local_files)
        return
    if isinstance(urls, (set, frozenset)):
        raise SpecError("Shards cannot be given as a set: its order differs between processes. Use sorted(...)")
    if isinstance(urls, (bytes, bytearray, Mapping)) or not isinstance(urls, Iterable):
        raise SpecError(f"Shards must be given as a string, a path or a list of these, not as {type(urls).__name__}")
    for position, item in enumerate(urls):
        yield pattern_text(item, f" at position {position}", allow_local_files=allow_local_files)


def pattern_text(item: object, where: str = "", *, allow_local_files: bool = True) -> str:
    """Return a pattern as a string; a directory gets the trailing slash that a path object lacks."""
    text = os.fspath(item) if isinstance(item, os.PathLike) else item
    if not isinstance(text, str):
        raise SpecError(f"A shard pattern must be a string or a path, but {item!r}{where} is {type(item).__name__}")
    return f"{text}/" if isinstance(item, os.PathLike) and allow_local_files and Path(text).is_dir() else text


def split_patterns(text: str) -> Iterator[str]:
    """Split at ``::``, but not within brackets, as in ``http://[::1]/``."""
    parts: list[str] = []
    for piece in text.split("::"):
        if parts and parts[-1].rfind("[") > parts[-1].rfind("]") and "]" in piece:
            parts[-1] += f"::{piece}"
        else:
            parts.append(piece)
    for part in parts:
        if not part:
            raise SpecError(f"The shard pattern {redact(text)!r} {'has an empty part' if text else 'is empty'}")
        yield part


def substitute(pattern: str, variables: Mapping[str, str]) -> str:
    """Substitute variables, recursively."""

    def value(match: re.Match[str]) -> str:
        name = f"WDS_{match[1]}"
        if name not in variables:
            raise SpecError(
                f"The shard pattern {redact(pattern)!r} needs {match[0]}, but the environment variable {name} is not "
                "set. Set it, or write the value into the pattern"
            )
        return variables[name]

    text = pattern
    for _ in range(MAX_ROUNDS):
        text, changes = VARIABLE.subn(value, text)
        if not changes:
            return text
    if VARIABLE.search(text):
        raise SpecError(
            f"The variables in the shard pattern {redact(pattern)!r} are nested more than {MAX_ROUNDS} deep. One of "
            "them may refer to itself"
        )
    return text


def expand_pattern(
    pattern: str, storage_options: Mapping[str, Any], rules: Rules, allow_local_files: bool = True
) -> list[str]:
    """Expand a pattern without variables; if local files are refused, check URLs before and after listing."""
    urls = expand_braces(pattern)
    if not allow_local_files:
        return [shard for url in urls for shard in _list_safely(rewrite_url(url, rules), storage_options)]
    # A pattern of a million shards is not worth a check of each name.
    if not rules and GLOB_MARKS.isdisjoint(pattern) and not pattern.endswith(("/", "}")):
        return urls
    if "" in urls:
        raise SpecError(f"One of the shards of the pattern {redact(pattern)!r} has an empty name")
    return [shard for url in urls for shard in list_urls(rewrite_url(url, rules), storage_options)]


def _list_safely(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    check_url(url, allow_local_files=False)
    found = list_urls(url, storage_options)
    for each in found:
        check_url(each, allow_local_files=False)
    return found


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern."""
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    try:
        count, longest = _braces(pattern)
        if count > MAX_SHARDS or count * longest > MAX_CHARACTERS:
            raise SpecError(
                f"The braces in the shard pattern {redact(pattern)[:200]!r} expand to {count:,} shards; the limit is "
                f"{MAX_SHARDS:,}. Split the pattern"
            )
        # Unescaping costs more than the expansion itself.
        return list(braceexpand(pattern, escape="\\" in pattern))
    except SpecError:
        raise
    except (ValueError, RecursionError):
        raise_alone(
            SpecError(
                f"The braces in the shard pattern {redact(pattern)!r} are unbalanced. Write \\{{ or \\}} for a literal "
                "brace"
            )
        )


def _braces(pattern: str) -> tuple[int, int]:
    """Return an upper bound of the number of names that a pattern expands to, and their approximate length.

    >>> _braces("a-{00..99}-{b,c{1..3}}.tar")
    (400, 15)
    """
    outer: list[_PatternPart] = []
    part, start = _PatternPart(), 0
    characters = iter(enumerate(pattern))
    for at, character in characters:
        if character == "\\":
            next(characters, None)
            part.length += 2
        elif character == "{":
            outer.append(part)
            part, start = _PatternPart(), at + 1
        elif character == "," and outer:
            part.before.append((part.count, part.length))
            part.count, part.length = 1, 0
        elif character == "}" and outer:
            if match := RANGE.fullmatch(pattern, start, at):
                first, last, step = int(match[1]), int(match[2]), int(match[3] or 1) or 1
                part.count, part.length = abs(last - first) // step + 1, max(len(match[1]), len(match[2]))
            elif pattern[start + 1 : start + 3] == ".." and at - start >= 4:  # letters
                part.count, part.length = (
                    max(part.count, abs(ord(pattern[start]) - ord(pattern[start + 3])) + 1),
                    part.length,
                )
            inner, part = part, outer.pop()
            choices = [*inner.before, (inner.count, inner.length)]
            part.count *= sum(count for count, _ in choices)
            part.length += max(length for _, length in choices) + 2 * (not inner.before)
        else:
            part.length += 1
    # Unbalanced braces are literal.
    pieces = [piece for each in (*outer, part) for piece in (*each.before, (each.count, each.length + 1))]
    return math.prod(count for count, _ in pieces), sum(length + 1 for _, length in pieces) - 2


class _PatternPart:
    """The number of names, and their length, of the text between two braces or a brace and a comma."""

    def __init__(self) -> None:
        self.before: list[tuple[int, int]] = []
        self.count, self.length = 1, 0
