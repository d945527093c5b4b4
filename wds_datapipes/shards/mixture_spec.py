"""Mixtures of shard collections, specified in a YAML or JSON file."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from random import Random
from typing import Any, NamedTuple

from wds_datapipes.errors import MissingSidecarError, SpecError
from wds_datapipes.extras import require
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.io.openers import redact
from wds_datapipes.io.sidecars import read_sidecar
from wds_datapipes.io.urls import check_url, without_query
from wds_datapipes.shards.patterns import check_count, most_shards, split_patterns
from wds_datapipes.shards.plain_yaml import parse_plain_yaml

#: webdataset's documentation has both "datasets" and "dataset".
TOP_KEYS = ("prefix", "buckets", "datasets", "dataset")
#: The keys that say how many shards of a dataset an epoch has; a dataset has at most one of them.
COUNT_KEYS = ("choose", "resample", "scaleprob")
DATASET_KEYS = ("buckets", "name", "shards", "settings", *COUNT_KEYS)
SUFFIXES = (".yaml", ".yml", ".json")


class Collection(NamedTuple):
    """A collection of shards, and the number of them in an epoch."""

    name: str
    urls: list[str]
    count_per_epoch: int
    #: Whether shards are drawn with replacement.
    with_replacement: bool
    #: What the specification says about the samples, for the pipeline to use.
    settings: Mapping[str, Any]


class Mixture:
    """The collections of a specification. This is not a list, because torch traverses lists in every epoch."""

    def __init__(self, collections: list[Collection]) -> None:
        self.collections = collections

    def __len__(self) -> int:
        return sum(each.count_per_epoch for each in self.collections)

    @property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """The settings of the samples of each shard, by URL."""
        return {url: each.settings for each in self.collections for url in each.urls}

    @property
    def is_random(self) -> bool:
        """Whether shards are drawn at random."""
        return any(each.with_replacement or each.count_per_epoch < len(each.urls) for each in self.collections)

    def fingerprint(self) -> str:
        """Return the number of shards and of datasets, and a digest of their names, URLs and counts."""
        facts = [each[:4] for each in self.collections]
        return f"{len(self)} shards of {len(self.collections)} datasets #{fingerprint(facts)[:12]}"

    def draw(self, rng: Random) -> Iterator[str]:
        """Yield the shards of an epoch, in the order of the specification."""
        for _, urls, count, with_replacement, _ in self.collections:
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
    if unknown := [key for key in top if key not in TOP_KEYS]:
        raise SpecError(
            f"{where} has the unknown keys {', '.join(map(repr, unknown))}; known are {', '.join(TOP_KEYS)}"
        )
    if "datasets" in top and "dataset" in top:
        raise SpecError(f"{where} has both 'datasets' and 'dataset'. Put all of them under 'datasets'")
    key = "dataset" if "dataset" in top else "datasets"
    listed = top.get(key)
    if not isinstance(listed, list) or not listed:
        raise SpecError(f"{where} needs a list of at least one dataset under 'datasets', not {listed!r}")

    def expand_safely(pattern: str) -> list[str]:
        urls = expand(pattern)
        for url in urls if file_url is not None else ():
            check_url(url, listed_in=file_url)
        return urls

    join = _join_homes if allow_local_files else os.path.join  # untrusted input must not reveal home directories
    shared = {"prefix": top.get("prefix", ""), "buckets": top.get("buckets", [])}
    datasets = [_Dataset(each, shared, f"{where}, {key}[{number}]", join) for number, each in enumerate(listed)]
    check_count(chain.from_iterable(each.patterns for each in datasets), allow_local_files)
    mixture = Mixture([each.collection(expand_safely) for each in datasets])
    count = sum(each.count_per_epoch for each in mixture.collections)
    if count > (most := most_shards(allow_local_files)):
        raise SpecError(f"{where} has {count:,} shards in an epoch; the limit is {most:,}. Resample fewer")
    _check_settings(mixture, where)
    return mixture


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


class _Dataset:
    """A dataset of a specification, before its patterns are expanded.

    Args:
        value: the content of the specification.
        shared: the prefix and the buckets of all datasets.
        where: its place in the specification, for messages.
        join: joins a bucket and a pattern.
    """

    def __init__(self, value: object, shared: Mapping[str, Any], where: str, join: Callable[[str, str], str]) -> None:
        own = _check_mapping(value, where, DATASET_KEYS)
        self.facts = {**shared, **own}
        prefix, bucket = ("".join(_strings(self.facts[key], where, key, 1)) for key in ("prefix", "buckets"))
        self.name = str(self.facts.get("name", f"@{bucket}"))
        self.where = f"{where} ({self.name})"
        if misplaced := [key for key in own if key in TOP_KEYS and key not in DATASET_KEYS]:
            raise SpecError(f"{self.where} has the key {misplaced[0]!r}, which belongs next to 'datasets'")
        self.settings = self._settings()
        texts = _strings(self.facts.get("shards"), self.where, "shards")
        with self._naming_errors():
            self.patterns = [prefix + join(bucket, part) for part in chain.from_iterable(map(split_patterns, texts))]

    def collection(self, expand: Callable[[str], list[str]]) -> Collection:
        """Expand the patterns, and return the collection of their shards."""
        with self._naming_errors():
            urls = list(chain.from_iterable(map(expand, self.patterns)))
        if not urls:
            raise SpecError(f"{self.where} has no shards")
        return Collection(self.name, urls, self._count(len(urls)), "resample" in self.facts, self.settings)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except SpecError as error:
            raise SpecError(f"{self.where}: {error}") from error

    def _count(self, shards: int) -> int:
        """Return the number of shards in an epoch, which is given as a number or as a share of all shards."""
        value: object
        given = [key for key in COUNT_KEYS if key in self.facts]
        if len(given) > 1:
            raise SpecError(f"{self.where} has {' and '.join(given)}; only one of them is allowed")
        if not given:
            return shards
        key, value = given[0], self.facts[given[0]]
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            if isinstance(value, float) or key == "scaleprob":
                if value <= 1 or key == "resample":
                    return max(1, math.floor(value * shards + 0.5))
            elif value <= shards or key == "resample":
                return value
        number = "" if key == "scaleprob" else "a number of shards or "
        raise SpecError(
            f"{self.where}: {key} must be {number}a share of its {shards:,} shards such as 0.5, not {value!r:.100}. A "
            "dataset has at most its own shards, each once, unless resample repeats them"
        )

    def _settings(self) -> dict[str, Any]:
        """Return what is said about the samples: the keys that do not concern shards, and those in ``settings``."""
        settings = self.facts.get("settings", {})
        if not isinstance(settings, Mapping):
            raise SpecError(f"{self.where}: settings must be a mapping from names to values, not {settings!r}")
        others = {key: value for key, value in self.facts.items() if key not in (*DATASET_KEYS, "prefix")}
        for key in [*others, *settings]:
            if not isinstance(key, str) or key.startswith("__"):
                raise SpecError(
                    f"{self.where}: a setting must have a string without initial __ as its name, not {key!r}"
                )
        if twice := others.keys() & settings:
            raise SpecError(f"{self.where} has {' and '.join(sorted(twice))} twice, inside and outside of settings")
        for key in others:
            if alike := get_close_matches(key, DATASET_KEYS, 1, 0.8):
                raise SpecError(
                    f"{self.where} has the key {key!r}. If this means {alike[0]!r}, correct it; a setting with this "
                    "name belongs under 'settings'"
                )
        return {**others, **settings}


def _check_settings(mixture: Mixture, where: str) -> None:
    """Raise an error if a shard has different settings in two collections: samples are looked up by shard."""
    first: dict[str, Collection] = {}
    if not any(each.settings for each in mixture.collections):
        return
    for each in mixture.collections:
        for url in each.urls:
            other = first.setdefault(url, each)
            if other.settings != each.settings:
                raise SpecError(
                    f"{where}: {redact(url)} is in {other.name} and in {each.name}, but their settings differ: "
                    f"{dict(other.settings)!r} and {dict(each.settings)!r}. Give both the same"
                )


def _check_mapping(value: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a mapping with some of the keys {', '.join(keys)}, not {value!r}")
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
