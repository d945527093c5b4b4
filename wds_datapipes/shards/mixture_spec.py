"""Mixtures of shard collections, specified in a YAML or JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeGuard

from wds_datapipes.errors import MissingSidecarError, SpecError
from wds_datapipes.extras import require
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.small_files import read_sidecar
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.shards.patterns import MAX_SHARDS, split_patterns

#: webdataset's documentation uses both "datasets" and "dataset".
TOP_KEYS = ("prefix", "buckets", "datasets", "dataset")
DATASET_KEYS = ("buckets", "name", "shards", "resample", "choose", "scaleprob", "scale", "extensions", "settings")
SUFFIXES = (".yaml", ".yml", ".json")
#: Errors that PyYAML raises besides its own: for an invalid date, an empty number, a deeply nested text.
YAML_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


class Collection(NamedTuple):
    """A collection of shards, and how many of them are part of an epoch."""

    name: str
    urls: list[str]
    count_per_epoch: int
    #: Whether shards are drawn with replacement.
    with_replacement: bool
    #: The settings for its samples, for the pipeline to use.
    settings: Mapping[str, Any]


class Mixture:
    """The collections of a specification. Not a list, since torch traverses lists in every epoch."""

    def __init__(self, collections: list[Collection]) -> None:
        self.collections = collections

    def __len__(self) -> int:
        return sum(each.count_per_epoch for each in self.collections)

    @property
    def is_random(self) -> bool:
        """Whether shards are drawn at random."""
        return any(each.with_replacement or each.count_per_epoch < len(each.urls) for each in self.collections)

    @property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """The settings of each shard's collection, by URL."""
        return {url: each.settings for each in self.collections if each.settings for url in each.urls}

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
        spec: the path or the URL of a file, or the content of such a file.
        expand: expands a pattern to the URLs of shards.
        storage_options: passed to the remote file system of the file.
        allow_local_files: False reads the file only from a network.

    Raises:
        SpecError: the specification is invalid, or a pattern in it cannot be expanded or matches nothing.
        MissingDependencyError: it is a YAML file and PyYAML is not installed.
        UnsafeInputError: it comes from another host and names a command; or it is a local file, which was not allowed.
    """
    file_url = None
    if isinstance(spec, Mapping):
        where: str = "the given specification"
        content: object = spec
    elif isinstance(spec, str | os.PathLike):
        file_url = os.fspath(spec)
        check_url(file_url, allow_local_files=allow_local_files)
        where = redact(file_url)
        content = _load_file(file_url, where, storage_options)
    else:
        raise SpecError(f"A specification must be the path of a {', '.join(SUFFIXES)} file or a dict, not {spec!r}")
    top = _check_mapping(content, where, TOP_KEYS)
    if "datasets" in top and "dataset" in top:
        raise SpecError(f"{where} has both 'datasets' and 'dataset'. Put all of them under 'datasets'")
    datasets = top.get("datasets", top.get("dataset"))
    if not isinstance(datasets, list) or not datasets:
        raise SpecError(f"{where} needs a list of at least one dataset under 'datasets', not {datasets!r}")
    prefix = _text(top.get("prefix", ""), where, "prefix")

    def expand_safely(pattern: str) -> list[str]:
        urls = expand(pattern)
        for url in urls:
            check_url(url, listed_in=file_url)
        return urls

    join = _join_homes if allow_local_files else os.path.join  # a stranger must not learn the name of a home
    collections = [
        _collection(dataset, f"{where}, datasets[{number}]", prefix, top.get("buckets", []), join, expand_safely)
        for number, dataset in enumerate(datasets)
    ]
    _check_settings(collections, where)
    return Mixture(collections)


def _load_file(url: str, path: str, storage_options: Mapping[str, Any] | None) -> object:
    """Parse a file; ``path`` is its name in messages."""
    name = url.partition("?")[0] if split_scheme(url)[0] in ("http", "https") else url
    if not name.endswith(SUFFIXES):
        raise SpecError(f"A specification must be a file that ends in {', '.join(SUFFIXES)}, not {path!r}")
    file = local_path(url)
    try:
        text = (Path(file).read_bytes() if file is not None else read_sidecar(url, storage_options)).decode()
    except MissingSidecarError as error:
        raise SpecError(f"The specification {error}") from error
    except OSError as error:
        raise SpecError(f"The specification {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"The specification {path} is not UTF-8 text: {error}") from error
    if name.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"The specification {path} is not valid JSON: {error}") from error
    yaml = require("yaml", extra="yaml", purpose=f"read the specification {path}")
    try:
        return parse_plain_yaml(yaml, text)
    except ValueError as error:
        raise SpecError(f"The specification {path} is not YAML with plain values: {error}") from error


def parse_plain_yaml(yaml: Any, text: str | bytes) -> Any:
    """Parse YAML with plain values.

    Aliases are refused: a few lines of them can expand to more values than fit in memory.

    Args:
        yaml: the PyYAML module.
        text: the YAML text.

    Raises:
        ValueError: the text is not YAML with plain values, or has an alias.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package is optional
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"aliases are not supported, and there is one:\n{self.peek_event().start_mark}")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        cause = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise ValueError(cause) from error


def _collection(
    dataset: object,
    where: str,
    prefix: str,
    buckets: object,
    join: Callable[[str, str], str],
    expand: Callable[[str], list[str]],
) -> Collection:
    found = _check_mapping(dataset, where, DATASET_KEYS)
    bucket = _bucket(found.get("buckets", buckets), where)
    name = _text(found.get("name", f"@{bucket}"), where, "name")
    where = f"{where} ({name})"
    shards = found.get("shards")
    patterns = [shards] if isinstance(shards, str) else shards
    if not isinstance(patterns, list) or not patterns:
        raise SpecError(f"{where} needs its shards as a string or a list of strings, not {shards!r}")
    urls: list[str] = []
    try:
        for text in patterns:
            for part in split_patterns(_text(text, where, "shards")):
                urls += expand(prefix + join(bucket, part))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    given = [key for key in ("resample", "choose", "scaleprob") if key in found]
    if len(given) > 1:
        raise SpecError(f"{where} has {' and '.join(given)}; only one of them is allowed")
    settings = _settings(found, where)
    if not given:
        return Collection(name, urls, len(urls), with_replacement=False, settings=settings)
    key = given[0]
    return Collection(name, urls, _epoch_shards(key, found[key], len(urls), where), key == "resample", settings)


def _settings(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of a dataset for its samples."""
    settings = dict(_string_keys(found.get("settings", {}), where))
    if twice := settings.keys() & {"scale", "extensions"} & found.keys():
        raise SpecError(f"{where} has {' and '.join(sorted(twice))} twice: inside and outside of its settings")
    if "scale" in found:
        scale = found["scale"]
        limits = scale if isinstance(scale, list) and len(scale) == 2 else [scale, scale]
        if not all(_is_positive(limit) for limit in limits) or limits[0] > limits[1]:
            raise SpecError(
                f"{where}: scale must be a positive number or a range of minimum and maximum, as in [0.5, 2.0], not "
                f"{scale!r}"
            )
        settings["scale"] = scale
    if "extensions" in found:
        extensions = found["extensions"]
        words = extensions if isinstance(extensions, list) else [extensions]
        if not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise SpecError(
                f"{where}: extensions must be a string such as nrm.jpg, or a list of strings, not {extensions!r}"
            )
        settings["extensions"] = extensions
    return settings


def _string_keys(settings: object, where: str) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise SpecError(f"{where}: settings must be a mapping from names to values, not {settings!r}")
    return settings


def _check_settings(collections: list[Collection], where: str) -> None:
    """Raise if collections have different settings for the same shard: samples are looked up by shard."""
    first: dict[str, Collection] = {}
    if not any(each.settings for each in collections):
        return
    for each in collections:
        for url in each.urls:
            other = first.setdefault(url, each)
            if other.settings != each.settings:
                raise SpecError(
                    f"{where}: {redact(url)} is in {other.name} and in {each.name}, whose settings differ: "
                    f"{dict(other.settings)!r} and {dict(each.settings)!r}"
                )


def _is_positive(value: object) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _epoch_shards(key: str, value: object, shards: int, where: str) -> int:
    """Return the number of shards in an epoch, given as a number or as a fraction of all shards."""
    if not _is_positive(value):
        raise SpecError(f"{where}: {key} must be a positive number, not {value!r}")
    if key == "scaleprob":
        value = float(value)
    if key != "resample" and value > (shards if isinstance(value, int) else 1):
        raise SpecError(
            f"{where}: {key} is {value!r}, but there are only {shards} shards, and each is used at most once. Use "
            f"resample to repeat shards"
        )
    count = value if isinstance(value, int) else max(1, math.floor(value * shards + 0.5))
    if count > MAX_SHARDS:
        raise SpecError(f"{where}: {key} is {value!r:.100}, but an epoch is limited to {MAX_SHARDS:,} shards")
    return count


def _bucket(buckets: object, where: str) -> str:
    """Return the bucket of a dataset, or "" if it has none."""
    several = [buckets] if isinstance(buckets, str) else buckets
    if not isinstance(several, list) or len(several) > 1:
        raise SpecError(f"{where}: buckets must be a string, or a list of one string, not {buckets!r}")
    return _text(several[0], where, "buckets") if several else ""


def _check_mapping(value: object, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return a mapping, or raise if it has other keys."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a mapping with some of the keys {', '.join(keys)}, not {value!r}")
    unknown = [key for key in value if key not in keys]
    if unknown:
        own = ". Put custom keys under 'settings'" if "settings" in keys else ""
        raise SpecError(
            f"{where} has the unknown keys {', '.join(map(repr, unknown))}; known are {', '.join(keys)}{own}"
        )
    return value


def _text(value: object, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{where}: {key} must be a string, not {value!r}")
    return value


def _join_homes(bucket: str, part: str) -> str:
    """Join the bucket and the name of shards, which may both start with a home directory."""
    expand = os.path.expanduser
    return os.path.join(expand(bucket), expand(part))  # noqa: PTH118  URLs are no paths
