"""Shard patterns: expand variables, braces and globs into the URLs of shards, and rewrite URLs by rules."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from braceexpand import braceexpand

from wds_datapipes.errors import SpecError, UnsafeInputError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.urls import check_url
from wds_datapipes.redaction.storage_options import raise_alone
from wds_datapipes.shards.listing import GLOB_MARKS, list_urls

Patterns: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""A pattern, or an iterable of patterns in the order of their shards."""

Rewrite = Sequence[tuple[str, str]]
"""Pairs of a regular expression, which must match at the beginning of a URL, and a replacement for the match."""

Rules = list[tuple[re.Pattern[str], str]]
"""Compiled rewriting rules."""

#: AIStore's names for URL schemes.
PROVIDERS = {"ais": "ais", "s3": "aws", "aws": "aws", "gs": "gcp", "gcp": "gcp", "az": "azure", "azure": "azure"}

#: The maximum depth of variables that refer to other variables.
MAX_ROUNDS = 10

#: The maximum number of shards to which patterns expand together, and that of untrusted ones.
MAX_SHARDS, MAX_UNTRUSTED_SHARDS = 10_000_000, 1_000_000
#: The maximum number of characters for each of these shards, assuming that a name is as long as its pattern.
CHARACTERS_PER_SHARD = 200

#: A range of numbers or letters between braces.
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?|(.)\.\.(.)(?:\.\.-?\d+)?")
MARK = re.compile(r"\\.|[{,}]", re.DOTALL)
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

    1. ``::`` separates patterns. 2. ``${NAME}`` becomes the value of the variable ``WDS_NAME``, which may contain any
    of the following. 3. Braces: ``{000..146}`` counts with leading zeros, ``{0..8..2}`` in steps, ``{9..0}`` down,
    ``{train,val}`` lists. Braces can be nested. In a pattern with braces, a backslash escapes the next character. 4.
    The first rule of `compile_rules` that changes the URL is applied. 5. A local path with ``*``, ``?``, ``[...]`` or
    ``**`` becomes the sorted files that match it, unless a file with exactly that name exists. In a URL of a remote
    file system, only ``*`` is a wildcard. 6. A directory, which ends in ``/``, becomes its sorted shards: files that
    end in ``.tar``, ``.tgz`` and so on.

    Steps 5 and 6 do not apply to ``-``, ``pipe:`` and the schemes of `register_opener`.

    >>> expand_urls("s3://bucket/{train-{08..10},val-0}.tar", variables={})
    ['s3://bucket/train-08.tar', 's3://bucket/train-09.tar', 's3://bucket/train-10.tar', 's3://bucket/val-0.tar']
    >>> expand_urls(["${DATA}/0.tar", "pipe:cat 1.tar"], variables={"WDS_DATA": "/data"})
    ['/data/0.tar', 'pipe:cat 1.tar']

    Args:
        urls: a string, a path, or an iterable of these.
        variables: the values for step 2, usually ``os.environ``.
        storage_options: the options of the remote file systems to list.
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
    patterns: list[str] = []
    for text in pattern_texts(urls, allow_local_files):
        for pattern in split_patterns(text):
            if not allow_local_files and (found := VARIABLE.search(pattern)):
                raise UnsafeInputError(
                    f"The shard pattern {redact(pattern)!r} was refused: with allow_local_files=False, environment "
                    f"variables such as {found[0]} are not substituted"
                )
            patterns.append(substitute(pattern, variables))
    check_count(patterns, allow_local_files)
    expanded: list[str] = []
    for pattern in patterns:
        expanded += expand_pattern(pattern, options, rules, allow_local_files)
    if not expanded:
        raise SpecError(f"There are no shards in {urls!r}. Name at least one")
    return expanded


def pattern_texts(urls: Patterns, allow_local_files: bool = True) -> Iterator[str]:
    """Yield the patterns as strings; a directory gets a trailing slash, which a path object lacks.

    Without ``allow_local_files``, no path counts as a directory.
    """
    if isinstance(urls, (set, frozenset)):
        raise SpecError("Shards cannot be given as a set: its order differs between processes. Use sorted(...)")
    if isinstance(urls, (bytes, bytearray, Mapping)) or not isinstance(urls, Iterable | os.PathLike):
        raise SpecError(f"Shards must be given as a string, a path or a list of these, not as {type(urls).__name__}")
    for position, item in enumerate([urls] if isinstance(urls, str | os.PathLike) else urls):
        text = os.fspath(item) if isinstance(item, os.PathLike) else item
        if not isinstance(text, str):
            raise SpecError(
                f"A shard pattern must be a string or a path, but {item!r} at position {position} is "
                f"{type(item).__name__}"
            )
        is_directory = isinstance(item, os.PathLike) and allow_local_files and Path(text).is_dir()
        yield f"{text}/" if is_directory else text


#: The end of a URL whose user info has no end.
OPEN_USER_INFO = re.compile(r"://[^/?#@\s]{0,1024}:[^/@]{0,1024}\Z")


def split_patterns(text: str) -> Iterator[str]:
    """Split at ``::``, but not within brackets, as in ``http://[::1]/``.

    Raises:
        SpecError: a part is empty, or ``::`` is in the user or password of a URL.
    """
    parts: list[str] = []
    for piece in text.split("::"):
        if parts and OPEN_USER_INFO.search(parts[-1]) and "@" in piece.partition("/")[0]:
            raise SpecError(
                f"The shard pattern {redact(text)!r} has :: in the user or password of a URL, where it would separate "
                "two patterns. Write it as %3A%3A"
            )
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
    for _ in range(MAX_ROUNDS + 1):
        text, changes = VARIABLE.subn(value, text)
        if not changes:
            return text
    raise SpecError(
        f"The variables in the shard pattern {redact(pattern)!r} are nested more than {MAX_ROUNDS} deep. One of "
        "them may refer to itself"
    )


def expand_pattern(
    pattern: str, storage_options: Mapping[str, Any], rules: Rules, allow_local_files: bool = True
) -> list[str]:
    """Expand a pattern without variables; if local files are not allowed, check URLs before and after listing."""
    urls = expand_braces(pattern)
    if not allow_local_files:
        return [shard for url in urls for shard in _list_safely(rewrite_url(url, rules), storage_options)]
    # Checking each name of a million shards would take too long.
    if not rules and GLOB_MARKS.isdisjoint(pattern) and not pattern.endswith(("/", "}")):
        return urls
    if "" in urls:
        raise SpecError(f"One of the shards of the pattern {redact(pattern)!r} has an empty name")
    return [shard for url in urls for shard in list_urls(rewrite_url(url, rules), storage_options)]


def _list_safely(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    check_url(url, allow_local_files=False)
    found = list_urls(url, storage_options)
    for each in found:
        if each is not url:
            check_url(each, allow_local_files=False)
    return found


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern."""
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    check_count([pattern])
    try:
        # Unescaping costs more than the expansion itself.
        return list(braceexpand(pattern, escape="\\" in pattern))
    except (ValueError, RecursionError):
        raise_alone(
            SpecError(
                f"The braces in the shard pattern {redact(pattern)!r} are unbalanced. Write \\{{ or \\}} for a literal "
                "brace"
            )
        )


def most_shards(allow_local_files: bool) -> int:
    """Return the maximum number of shards that patterns name together."""
    return MAX_SHARDS if allow_local_files else MAX_UNTRUSTED_SHARDS


def check_count(patterns: Iterable[str], allow_local_files: bool = True) -> None:
    """Check to how many shards patterns expand together, without expanding them.

    Raises:
        SpecError: their braces expand to more than the limit, which is lower without ``allow_local_files``.
    """
    most = most_shards(allow_local_files)
    shards = characters = 0
    for pattern in patterns:
        if "{" not in pattern:
            continue  # its size is that of the input
        count = count_names(pattern)
        shards += count
        characters += count * len(pattern)
        if shards > most or characters > most * CHARACTERS_PER_SHARD:
            before = "" if count == shards else f", with those before it to {shards:,}"
            limit = f"{most:,}{'' if allow_local_files else ' with allow_local_files=False'}"
            raise SpecError(
                f"The braces in the shard pattern {redact(pattern)[:200]!r} expand to {count:,} shards{before}; the "
                f"limit is {limit}, of {CHARACTERS_PER_SHARD} characters each. Name fewer"
            )


def count_names(pattern: str) -> int:
    """Return an upper bound for the number of names to which a pattern expands.

    >>> count_names("a-{00..99}-{b,c{1..3}}.tar")
    400
    """
    open_braces: list[tuple[int, int]] = []  # per brace: the names of earlier alternatives and of the current one
    before, count, start = 0, 1, 0
    for mark in MARK.finditer(pattern):
        if mark[0] == "{":
            open_braces.append((before, count))
            before, count, start = 0, 1, mark.end()
        elif mark[0] == "," and open_braces:
            before, count = before + count, 1
        elif mark[0] == "}" and open_braces:
            inside = RANGE.fullmatch(pattern, start, mark.start())
            if inside and inside[4]:
                names = abs(ord(inside[4]) - ord(inside[5])) + 1
            elif inside:
                names = abs(int(inside[2]) - int(inside[1])) // (int(inside[3] or 1) or 1) + 1
            else:
                names = before + count
            before, count = open_braces.pop()
            count *= names
    return math.prod(max(before + count, 1) for before, count in [*open_braces, (before, count)])  # or unbalanced


def compile_rules(rewrite: Rewrite | None, variables: Mapping[str, str]) -> Rules:
    r"""Compile the given rules, or those of the environment, followed by those of AIStore.

    >>> rules = compile_rules(None, {"WDS_REWRITE": "gs://data/=/mnt/data/;s3://=http://cache/"})
    >>> rewrite_url("gs://data/0.tar", rules), rewrite_url("s3://bucket/0.tar", rules), rewrite_url("0.tar", rules)
    ('/mnt/data/0.tar', 'http://cache/bucket/0.tar', '0.tar')
    >>> rules = compile_rules(None, {"AIS_ENDPOINT": "http://ais:51080", "USE_AIS_FOR": "gs:s3"})
    >>> rewrite_url("gs://bucket/train/0.tar", rules)
    'http://ais:51080/v1/objects/bucket/train/0.tar?provider=gcp'

    Args:
        rewrite: the rules; by default, those of ``WDS_REWRITE`` or ``GOPEN_REWRITE``, written as
            ``EXPRESSION=REPLACEMENT`` and separated by ``;``.
        variables: the environment. ``AIS_ENDPOINT`` is the address of an AIStore cluster for ``ais:`` URLs, and
            ``USE_AIS_FOR`` names further schemes to redirect there, separated by ``:``.

    Raises:
        SpecError: a rule is invalid.
    """
    if rewrite is None:
        name = "WDS_REWRITE" if "WDS_REWRITE" in variables else "GOPEN_REWRITE"
        rewrite = list(_pairs(name, variables.get(name, "")))
    given: Any = rewrite
    pairs: list[Any] = [None] if isinstance(given, str | bytes) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(pair, tuple | list) and [*map(type, pair)] == [str, str] for pair in pairs):
        raise TypeError(f'rewrite must be pairs of two strings, as in [("s3://", "/mnt/")], not {rewrite!r:.200}')
    rules = []
    for expression, replacement in pairs:
        try:
            pattern = re.compile(expression)
            pattern.sub(replacement, "")
        except (re.error, IndexError) as error:
            raise SpecError(
                f"The rule that rewrites {expression!r} to {replacement!r} is not a valid regular expression with a "
                f"replacement: {error}"
            ) from error
        rules.append((pattern, replacement))
    return [*rules, *_aistore_rules(variables)]


def rewrite_url(url: str, rules: Rules) -> str:
    """Rewrite a URL with the first rule that changes it."""
    for pattern, replacement in rules:
        match = pattern.match(url)
        if match and (found := match.expand(replacement) + url[match.end() :]) != url:
            return found
    return url


def _pairs(name: str, text: str) -> Iterable[tuple[str, str]]:
    """Yield the rules in the value of a variable."""
    for rule in text.split(";"):
        if rule:
            expression, sign, replacement = rule.partition("=")
            if not sign:
                raise SpecError(f"The rule {rule!r} in {name} has no '='. Write it as EXPRESSION=REPLACEMENT")
            yield expression, replacement


def _aistore_rules(variables: Mapping[str, str]) -> Iterable[tuple[re.Pattern[str], str]]:
    schemes = ["ais", *filter(None, variables.get("USE_AIS_FOR", "").split(":"))]
    endpoint = variables.get("AIS_ENDPOINT", "")
    if unknown := [each for each in schemes if each not in PROVIDERS]:
        raise SpecError(f"USE_AIS_FOR names {unknown[0]!r}. AIStore supports {', '.join(sorted(PROVIDERS))}")
    if not endpoint:
        if schemes[1:]:
            raise SpecError(
                "USE_AIS_FOR is set, but AIS_ENDPOINT is not. Set it to the address of the cluster, such as "
                "http://localhost:51080"
            )
        return
    for scheme in schemes:
        replacement = rf"{endpoint.rstrip('/')}/v1/objects/\1/\2?provider={PROVIDERS[scheme]}"
        yield re.compile(rf"{scheme}://([^/?#]+)/([^?#]+)$"), replacement
