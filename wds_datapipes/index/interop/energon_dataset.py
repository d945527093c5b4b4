"""Datasets of Megatron Energon: a folder of shards that is described by the files in its folder ``.nv-meta``.

``.info.json`` has the number of samples of each shard, ``split.yaml`` the shards of each split, and ``dataset.yaml``
how samples are built from fields.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, UnsupportedSidecarError
from wds_datapipes.extras import require
from wds_datapipes.index.build import DEFAULT_OPTIONS
from wds_datapipes.index.interop.energon import build_energon_index, energon_index_url
from wds_datapipes.index.interop.energon_sqlite import energon_keys, remove_energon_keys
from wds_datapipes.index.manifest import Manifest, ManifestEntry
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.small_files import join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards
from wds_datapipes.shards.mixture_spec import parse_plain_yaml
from wds_datapipes.shards.patterns import expand_braces

#: The version recorded in ``.info.json``, whose format this is.
ENERGON_VERSION = "7.4.1"
#: The splits that Energon supports.
SPLITS = ("train", "val", "test")


class EnergonDataset(NamedTuple):
    """The metadata of a dataset in its folder ``.nv-meta``.

    Attributes:
        counts: the number of samples of each shard, in the order of the shards.
        splits: the shards of each split, such as ``"train"``, without those that ``split.yaml`` excludes.
        excluded_samples: the single samples that ``split.yaml`` excludes, each named after its shard and a slash.
        definition: the content of ``dataset.yaml``, with ``subflavors`` and the like; empty if there is none.
    """

    counts: dict[str, int]
    splits: dict[str, list[str]]
    excluded_samples: Sequence[str] = ()
    definition: Mapping[str, Any] = MappingProxyType({})

    def manifest(self, split: str) -> Manifest:
        """Return the shards of a split as a manifest, for `IndexedSamples`. Their sizes are unknown, so they are 0.

        Args:
            split: the name, such as ``"train"``.

        Raises:
            ValueError: there is no such split.
            CorruptSidecarError: a shard of the split has no number of samples.
            UnsupportedSidecarError: single samples of the split are excluded.

        Examples:
            >>> from wds_datapipes import IndexedSamples
            >>> from wds_datapipes.index import read_energon_dataset, write_energon_dataset
            >>> from wds_datapipes.testing import build_shard
            >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}])
            >>> _ = write_energon_dataset(".", {"train": [url]})
            >>> samples = IndexedSamples(read_energon_dataset(".").manifest("train"))
            >>> [sample["txt"] for sample in samples]
            [b'one']
        """
        if split not in self.splits:
            raise ValueError(f"The dataset has the splits {', '.join(map(repr, self.splits)) or 'none'}, not {split!r}")
        urls = self.splits[split]
        if unknown := [url for url in urls if url not in self.counts]:
            raise CorruptSidecarError(
                f"split.yaml names the shard {redact(unknown[0])}, whose number of samples is not in .info.json. Run "
                "`energon prepare`, or call write_energon_dataset"
            )
        for name in self.excluded_samples:
            if any(name.startswith(f"{url}/") for url in urls):
                raise UnsupportedSidecarError(
                    f"split.yaml excludes the sample {redact(name)}, but a manifest lists whole shards. Remove the "
                    "entry, and choose samples with select= of IndexedSamples"
                )
        return Manifest(ManifestEntry(url, self.counts[url], 0) for url in urls)

    def fields(self) -> dict[str, str]:
        """Return the ``field_map`` of ``dataset.yaml`` as arguments of ``.rename()``.

        Raises:
            UnsupportedSidecarError: samples are built by Python code, from parts of a JSON field, or by a class
                without a ``field_map``, such as ``CrudeWebdataset``.

        Examples:
            >>> definition = {"__class__": "CaptioningWebdataset", "field_map": {"image": "jpg,png", "caption": "txt"}}
            >>> dataset = EnergonDataset({}, {}, definition=definition)
            >>> dataset.fields()
            {'image': 'jpg;png', 'caption': 'txt'}
            >>> from torch.utils.data.datapipes.iter import IterableWrapper
            >>> samples = IterableWrapper([{"__key__": "x", "png": b"...", "txt": "a cat"}])
            >>> list(samples.rename(**dataset.fields(), keep=False))
            [{'__key__': 'x', 'image': b'...', 'caption': 'a cat'}]
        """
        if code := self.definition.keys() & {"sample_loader", "part_filter"}:
            raise UnsupportedSidecarError(
                f"dataset.yaml names Python code for {' and '.join(sorted(code))}, which is not run. Write the "
                "function for .map_samples()"
            )
        found = self.definition.get("field_map")
        if not isinstance(found, Mapping) or not found:
            raise UnsupportedSidecarError(
                f"dataset.yaml has no field_map; its class is {self.definition.get('__class__')!r}. Samples have the "
                "fields of the shards; rename them with .rename()"
            )
        for name, field in found.items():
            if not isinstance(name, str) or not isinstance(field, str) or "[" in field or not all(field.split(",")):
                raise UnsupportedSidecarError(
                    f"The field_map of dataset.yaml builds {name!r} from {field!r}, which is not a list of fields "
                    "separated by commas. Decode the field, and take its part with .map_samples()"
                )
        return {name: field.replace(",", ";") for name, field in found.items()}


def write_energon_dataset(
    folder: str | os.PathLike[str],
    splits: Mapping[str, Shards],
    *,
    keys: bool = True,
    options: IndexOptions = DEFAULT_OPTIONS,
    executor: Executor | None = None,
    num_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> EnergonDataset:
    """Write the indexes and the ``.nv-meta`` that turn a folder of shards into a dataset of Energon.

    ``dataset.yaml``, which defines how samples are built from files, is written for a dataset that yields the fields
    unchanged (``CrudeWebdataset``); an existing one is kept.

    Args:
        folder: the folder that contains all shards, possibly in subfolders.
        splits: the shards of each split, ``"train"``, ``"val"`` or ``"test"``: a pattern, or an iterable of URLs.
        keys: write ``index.sqlite`` too, if the folder is local. Energon needs it to find samples by key, to exclude
            samples, and to read only some of their files; keys must be unique then. Without it, samples are loaded in
            order, and an existing one is removed, as it may describe other shards.
        options: how the shards are indexed; names are always split as Energon does.
        executor: any executor to read the shards; by default, processes on this host.
        num_workers: the number of processes; 0 reads the shards in this process.
        storage_options: passed to a remote file system.

    Returns:
        The metadata that was written.

    Raises:
        ValueError: a shard is not in the folder, or a split is unknown.
        SidecarError: a file cannot be written, or Energon cannot use a shard, or its keys.
        ShardError: a shard cannot be read.
    """
    root = os.fspath(folder).rstrip("/") + "/"
    listed = {split: resolve_shards(shards) for split, shards in splits.items()}
    if unknown := listed.keys() - set(SPLITS):
        raise ValueError(f"Energon supports the splits {', '.join(SPLITS)}, not {min(unknown)!r}")
    urls = list(dict.fromkeys(url for split in SPLITS for url in listed.get(split, ())))
    names = {url: within(root, url) for url in urls}
    for url, name in names.items():
        if split_scheme(name)[0] or name.startswith("/"):
            raise ValueError(f"{redact(url)} is not in the folder {redact(root)}, where Energon looks for shards")
    meta = local_path(f"{root}.nv-meta/")
    if meta is not None:
        try:
            Path(meta).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MissingSidecarError(f"The folder {meta} cannot be created: {error.strerror}") from error
    counts: dict[int, int] = {}
    work = (options, storage_options)
    with contextlib.ExitStack() as opened:
        table = opened.enter_context(energon_keys(meta)) if keys and meta is not None else None
        for number, task in map_shards(_index, urls, work, executor=executor, num_workers=num_workers):
            index = task.result()
            counts[number] = len(index)
            if table is not None:
                table.add(number, redact(urls[number]), index)
    if not keys and meta is not None:
        remove_energon_keys(meta)
    dataset = EnergonDataset(
        {names[url]: counts[number] for number, url in enumerate(urls)},
        {split: [names[url] for url in listed.get(split, ())] for split in SPLITS},
    )
    files = {
        ".info.json": json.dumps({"energon_version": ENERGON_VERSION, "shard_counts": dataset.counts}, indent=2),
        "split.yaml": _yaml(dataset.splits),
    }
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset"
    try:
        read_sidecar(f"{root}.nv-meta/dataset.yaml", storage_options)
    except MissingSidecarError:
        files["dataset.yaml"] = crude
    for name, text in files.items():
        write_sidecar(f"{root}.nv-meta/{name}", f"{text}\n".encode(), storage_options)
    return dataset


def read_energon_dataset(
    folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> EnergonDataset:
    """Read the ``.nv-meta`` of a dataset of Energon, with the paths of its shards.

    Args:
        folder: the folder that contains ``.nv-meta``.
        storage_options: passed to a remote file system.

    Raises:
        MissingSidecarError: a file cannot be read.
        CorruptSidecarError: a file is damaged or not one of Energon.
        MissingDependencyError: PyYAML is not installed.
        UnsafeInputError: it comes from another host and names a command as a shard.
    """
    root = os.fspath(folder).rstrip("/") + "/"
    yaml = require("yaml", extra="yaml", purpose="read split.yaml and dataset.yaml")
    name = f"{root}.nv-meta/.info.json"
    try:
        counts = json.loads(read_sidecar(name, storage_options))["shard_counts"]
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise ValueError("its counts are not whole numbers")
        name = f"{root}.nv-meta/split.yaml"
        found = parse_plain_yaml(yaml, read_sidecar(name, storage_options))
        listed = {split: _expand(parts) for split, parts in found["split_parts"].items()}
        excluded = set(_expand(found.get("exclude")))
        dataset = EnergonDataset(
            {join_name(root, url): count for url, count in counts.items()},
            {split: [join_name(root, url) for url in urls if url not in excluded] for split, urls in listed.items()},
            [join_name(root, each) for each in sorted(excluded.difference(*listed.values())) if "/" in each],
        )
        name = f"{root}.nv-meta/dataset.yaml"
        with contextlib.suppress(MissingSidecarError):
            definition = parse_plain_yaml(yaml, read_sidecar(name, storage_options))
            if not isinstance(definition, dict):
                raise ValueError("it is not a mapping")
            dataset = dataset._replace(definition=definition)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSidecarError(f"{redact(name)} is not a file of Energon, or is damaged: {error}") from error
    for url in {*dataset.counts, *chain.from_iterable(dataset.splits.values())}:
        check_url(url, listed_in=f"{root}.nv-meta/split.yaml")
    return dataset


def _expand(patterns: Sequence[str] | None) -> list[str]:
    return [url for pattern in patterns or () for url in expand_braces(pattern)]


def _index(url: str, options: IndexOptions, storage_options: Mapping[str, Any] | None) -> ShardIndex:
    return build_energon_index(url, energon_index_url(url), options, storage_options)


def _yaml(splits: Mapping[str, Sequence[str]]) -> str:
    """Return the text of split.yaml; strings are quoted as in JSON, which is valid YAML."""
    lines = ["split_parts:"]
    for split, urls in splits.items():
        lines += [f"  {split}:{'' if urls else ' []'}", *(f"  - {json.dumps(url)}" for url in urls)]
    return "\n".join([*lines, "exclude: []"])
