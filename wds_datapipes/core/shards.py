"""From a pattern to the URLs of its shards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from braceexpand import braceexpand

from wds_datapipes.core.listing import GLOB_MARKS, listed
from wds_datapipes.core.openers import redact
from wds_datapipes.core.rewriting import Rewrite, Rules, rewritten, rules_of
from wds_datapipes.errors import PatternError

__all__ = ["Patterns", "expand_urls"]

Patterns: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""A pattern, or an iterable of patterns in the order that their shards shall have."""

#: How deep the values of variables may refer to further variables.
MAX_ROUNDS = 10

VARIABLE = re.compile(r"\$\{(\w+)\}")


def expand_urls(
    urls: Patterns,
    *,
    variables: Mapping[str, str],
    storage_options: Mapping[str, Any] | None = None,
    rewrite: Rewrite | None = None,
) -> list[str]:
    r"""List the shards of a pattern, or of several, in order.

    A pattern is read in these steps:

    1. ``::`` separates patterns.
    2. ``${NAME}`` becomes the value of the variable ``WDS_NAME``, which may hold all of what follows.
    3. Braces: ``{000..146}`` counts with leading zeros, ``{0..8..2}`` in steps, ``{9..0}`` down, ``{train,val}`` lists.
       They nest. In a pattern with braces, a backslash takes the meaning from the character behind it.
    4. The first rule of `rules_of` that changes the URL does so.
    5. A local path with ``*``, ``?``, ``[...]`` or ``**``, unless there is a file of that very name, becomes the files
       that match it, sorted. In a URL of a remote file system only ``*`` does so.
    6. A directory, which ends in ``/``, becomes its shards, sorted: the files that end in ``.tar``, ``.tgz`` and so on.

    The steps 5 and 6 leave ``-``, ``pipe:`` and the schemes of `register_opener` alone.

    >>> expand_urls("s3://bucket/{train-{08..10},val-0}.tar", variables={})
    ['s3://bucket/train-08.tar', 's3://bucket/train-09.tar', 's3://bucket/train-10.tar', 's3://bucket/val-0.tar']
    >>> expand_urls(["${DATA}/0.tar", "pipe:cat 1.tar"], variables={"WDS_DATA": "/data"})
    ['/data/0.tar', 'pipe:cat 1.tar']

    Args:
        urls: a string, a path, or an iterable of these.
        variables: the values for step 2, usually ``os.environ``.
        storage_options: passed to the remote file systems that are listed.
        rewrite: the rules for step 4, see `rules_of`.

    Raises:
        PatternError: a pattern cannot be read, or nothing matches it.
        UnknownScheme: a remote file system has to be listed and is not known.
        MissingDependency: or its package is not installed.
    """
    options = storage_options or {}
    rules = rules_of(rewrite, variables)
    expanded: list[str] = []
    for text in pattern_texts(urls):
        for pattern in split_patterns(text):
            expanded += expand_pattern(substitute(pattern, variables), options, rules)
    if not expanded:
        raise PatternError(f"There is no shard in {urls!r}. Name at least one")
    return expanded


def pattern_texts(urls: Patterns) -> Iterator[str]:
    """Every pattern as a string."""
    if isinstance(urls, (str, os.PathLike)):
        yield pattern_text(urls)
        return
    if isinstance(urls, (set, frozenset)):
        raise PatternError("Shards cannot be given as a set: its order differs between processes. Use sorted(...)")
    if isinstance(urls, (bytes, bytearray, Mapping)) or not isinstance(urls, Iterable):
        raise PatternError(f"Shards are given as a string, a path or a list of these, not as {type(urls).__name__}")
    for position, item in enumerate(urls):
        yield pattern_text(item, f" at position {position}")


def pattern_text(item: object, where: str = "") -> str:
    """A pattern as a string; a path that is a directory gets the slash that a path object cannot hold."""
    text = os.fspath(item) if isinstance(item, os.PathLike) else item
    if not isinstance(text, str):
        raise PatternError(f"A shard pattern is a string or a path, and {item!r}{where} is {type(item).__name__}")
    return f"{text}/" if isinstance(item, os.PathLike) and Path(text).is_dir() else text


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
            raise PatternError(f"The shard pattern {redact(text)!r} {'has an empty part' if text else 'is empty'}")
        yield part


def substitute(pattern: str, variables: Mapping[str, str]) -> str:
    """Put the values of variables in, and of those that they refer to."""

    def value(match: re.Match[str]) -> str:
        name = f"WDS_{match[1]}"
        if name not in variables:
            raise PatternError(
                f"The shard pattern {redact(pattern)!r} needs {match[0]}, and the environment variable {name} is not "
                "set. Set it, or write the value into the pattern"
            )
        return variables[name]

    text = pattern
    for _ in range(MAX_ROUNDS):
        text, changes = VARIABLE.subn(value, text)
        if not changes:
            return text
    if VARIABLE.search(text):
        raise PatternError(
            f"The variables in the shard pattern {redact(pattern)!r} refer to others more than {MAX_ROUNDS} deep. One "
            "of them may refer to itself"
        )
    return text


def expand_pattern(pattern: str, storage_options: Mapping[str, Any], rules: Rules) -> list[str]:
    """The shards of a pattern without variables."""
    urls = expand_braces(pattern)
    # A million shards take little more than their strings do, if not each of them is looked at.
    if not rules and GLOB_MARKS.isdisjoint(pattern) and not pattern.endswith(("/", "}")):
        return urls
    if "" in urls:
        raise PatternError(f"One of the shards of the pattern {redact(pattern)!r} has an empty name")
    return [shard for url in urls for shard in listed(rewritten(url, rules), storage_options)]


def expand_braces(pattern: str) -> list[str]:
    """All that the braces of a pattern stand for."""
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    try:
        # Looking for backslashes in the results costs more than all of the rest.
        return list(braceexpand(pattern, escape="\\" in pattern))
    except ValueError as error:
        raise PatternError(
            f"The braces in the shard pattern {redact(pattern)!r} do not pair. Write \\{{ or \\}} for one that is part "
            "of a name"
        ) from error
