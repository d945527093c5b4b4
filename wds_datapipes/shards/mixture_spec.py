"""Mixtures of shard collections, specified in a YAML or JSON file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from random import Random
from typing import Any, NamedTuple

from wds_datapipes.errors import MissingSidecarError, SpecError
from wds_datapipes.extras import require
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import read_sidecar
from wds_datapipes.io.urls import check_url, without_query
from wds_datapipes.shards.patterns import MAX_SHARDS, split_patterns

TOP_KEYS = ("prefix", "buckets", "datasets")
DATASET_KEYS = ("buckets", "name", "shards", "resample", "choose")
SUFFIXES = (".yaml", ".yml", ".json")
#: Errors that PyYAML raises besides its own, for example for an invalid date, an empty number, or deeply nested text.
YAML_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


class Collection(NamedTuple):
    """A collection of shards, and the number of them in an epoch."""

    name: str
    urls: list[str]
    count_per_epoch: int
    #: Whether shards are drawn with replacement.
    with_replacement: bool


class Mixture:
    """The collections of a specification. This is not a list, because torch traverses lists in every epoch."""

    def __init__(self, collections: list[Collection]) -> None:
        self.collections = collections

    def __len__(self) -> int:
        return sum(each.count_per_epoch for each in self.collections)

    @property
    def is_random(self) -> bool:
        """Whether shards are drawn at random."""
        return any(each.with_replacement or each.count_per_epoch < len(each.urls) for each in self.collections)

    def fingerprint(self) -> str:
        """Return the number of shards and of datasets, and a digest of their names, URLs and counts."""
        facts = [tuple(each) for each in self.collections]
        return f"{len(self)} shards of {len(self.collections)} datasets #{fingerprint(facts)[:12]}"

    def draw(self, rng: Random) -> Iterator[str]:
        """Yield the shards of an epoch, in the order of the specification."""
        for _, urls, count, with_replacement in self.collections:
            if with_replacement:
                yield from map(urls.__getitem__, sorted(rng.choices(range(len(urls)), k=count)))
            elif count < len(urls):
                yield from map(urls.__getitem__, sorted(rng.sample(range(len(urls)), count)))
            else:
                yield from urls


def read_mixture(
    spec: object,
    expand: Callable[[str], list[str]],
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_local_files: bool = True,
) -> Mixture:
    """Read a specification.

    Args:
        spec: the path or URL of a file, or the content of such a file.
        expand: expands a pattern into the URLs of shards.
        storage_options: the options of the file's remote file system.
        allow_local_files: False reads the file only from a network.

    Raises:
        SpecError: the specification is invalid, or a pattern in it cannot be expanded or matches nothing.
        MissingDependencyError: the specification is a file, but PyYAML is not installed.
        UnsafeInputError: the specification comes from another host and names a command, or is a local file without
            permission.
    """
    file_url, where = None, "the given specification"
    if isinstance(spec, str | os.PathLike):
        file_url = os.fspath(spec)
        check_url(file_url, allow_local_files=allow_local_files)
        where = redact(file_url)
        spec = _load_file(file_url, where, storage_options)
    top = _check_mapping(spec, where, TOP_KEYS)
    datasets = top.get("datasets")
    if not isinstance(datasets, list) or not datasets:
        raise SpecError(f"{where} needs a list of at least one dataset under 'datasets', not {datasets!r}")

    def expand_safely(pattern: str) -> list[str]:
        urls = expand(pattern)
        for url in urls:
            check_url(url, listed_in=file_url)
        return urls

    join = _join_homes if allow_local_files else os.path.join  # untrusted input must not reveal home directories
    collections = []
    for number, dataset in enumerate(datasets):
        named = _check_mapping(dataset, f"{where}, datasets[{number}]", DATASET_KEYS)
        facts = {"prefix": top.get("prefix", ""), "buckets": top.get("buckets", []), **named}
        collections.append(_collection(facts, f"{where}, datasets[{number}]", join, expand_safely))
    return Mixture(collections)


def _load_file(url: str, path: str, storage_options: Mapping[str, Any] | None) -> object:
    """Parse a file; ``path`` is its name for messages."""
    if not without_query(url).endswith(SUFFIXES):
        raise SpecError(f"A specification must be a file that ends in {', '.join(SUFFIXES)}, not {path!r}")
    yaml = require("yaml", extra="yaml", purpose=f"read the specification {path}")
    try:
        return parse_plain_yaml(yaml, read_sidecar(url, storage_options))
    except MissingSidecarError as error:
        raise SpecError(f"The specification {error}") from error
    except ValueError as error:
        raise SpecError(f"The specification {path} is not YAML with plain values: {error}") from error


def parse_plain_yaml(yaml: Any, text: str | bytes) -> Any:
    """Parse YAML with plain values.

    Aliases are rejected, because a few lines of them can expand to more values than fit into memory.

    Args:
        yaml: the PyYAML module.
        text: the YAML text.

    Raises:
        ValueError: the text is not YAML with plain values, or has an alias.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package is optional
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"aliases are not supported, but there is one:\n{self.peek_event().start_mark}")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        cause = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise ValueError(cause) from error


def _collection(
    facts: Mapping[str, Any], where: str, join: Callable[[str, str], str], expand: Callable[[str], list[str]]
) -> Collection:
    """Return a dataset, given its own facts and those that all datasets share."""
    prefix, bucket = ("".join(_strings(facts[key], where, key, 1)) for key in ("prefix", "buckets"))
    name = str(facts.get("name", f"@{bucket}"))
    where = f"{where} ({name})"
    texts, urls = _strings(facts.get("shards"), where, "shards"), list[str]()
    try:
        for part in chain.from_iterable(map(split_patterns, texts)):
            urls += expand(prefix + join(bucket, part))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    if not urls:
        raise SpecError(f"{where} has no shards")
    if "choose" in facts and "resample" in facts:
        raise SpecError(f"{where} has choose and resample; only one of them is allowed")
    key = "resample" if "resample" in facts else "choose"
    count = facts.get(key, len(urls))
    most = len(urls) if key == "choose" else MAX_SHARDS
    if type(count) is not int or not 1 <= count <= most:
        raise SpecError(
            f"{where}: {key} must be a number of shards from 1 to {most:,}, not {count!r:.100}. A dataset has at most "
            "its own shards, each once, unless resample repeats them"
        )
    return Collection(name, urls, count, key == "resample")


def _check_mapping(value: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return a mapping; raise an error if it has other keys."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a mapping with some of the keys {', '.join(keys)}, not {value!r}")
    if unknown := [key for key in value if key not in keys]:
        raise SpecError(f"{where} has the unknown keys {', '.join(map(repr, unknown))}; known are {', '.join(keys)}")
    return value


def _strings(value: object, where: str, key: str, most: int = sys.maxsize) -> list[str]:
    """Return the strings of a key whose value is a string or a list of strings."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings) or len(strings) > most:
        text = "a string" if most == 1 else "a string or a list of strings"
        raise SpecError(f"{where}: {key} must be {text}, not {value!r}")
    return strings


def _join_homes(bucket: str, part: str) -> str:
    """Join the bucket and the name of shards, both of which may start with a home directory."""
    expand = os.path.expanduser
    return os.path.join(expand(bucket), expand(part))  # noqa: PTH118  URLs are no paths
