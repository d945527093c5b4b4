"""Index files of Megatron Energon, next to the shards and in the folder ``.nv-meta`` of a dataset.

An index is an array of little-endian 64-bit numbers: the offsets of the first headers of all samples, and that of the
end marker. ``.info.json`` has the number of samples of each shard, and ``split.yaml`` the shards of each split.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError, StaleSidecarError, UnsupportedSidecarError
from wds_datapipes.extras import require
from wds_datapipes.index.builder import IndexBuilder
from wds_datapipes.index.interop.energon_sqlite import energon_keys, remove_energon_keys
from wds_datapipes.index.interop.member_table import MemberTable
from wds_datapipes.index.manifest import Manifest, ManifestEntry
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.small_files import join_name, read_sidecar, within, write_sidecar
from wds_datapipes.io.url_safety import refuse_commands
from wds_datapipes.parallel.map_shards import Shards, map_shards, resolve_shards
from wds_datapipes.shards.mixture_spec import parse_plain_yaml
from wds_datapipes.shards.patterns import expand_braces
from wds_datapipes.tar.headers import EndMarker

__all__ = [
    "EnergonDataset",
    "energon_index_url",
    "energon_rule",
    "read_energon_dataset",
    "read_energon_index",
    "write_energon_dataset",
    "write_energon_index",
]

#: The version recorded in ``.info.json``, whose format this is.
ENERGON_VERSION = "7.4.1"
#: Energon's split of names: the directory may have dots, but the key after it has none.
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
#: The splits that Energon supports.
SPLITS = ("train", "val", "test")


class EnergonDataset(NamedTuple):
    """The metadata of a dataset in its folder ``.nv-meta``.

    Attributes:
        counts: the number of samples of each shard, in the order of the shards.
        splits: the shards of each split, such as ``"train"``, without those that ``split.yaml`` excludes.
        excluded_samples: the single samples that ``split.yaml`` excludes, each named after its shard and a slash.
    """

    counts: dict[str, int]
    splits: dict[str, list[str]]
    excluded_samples: Sequence[str] = ()

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


def energon_rule(name: str) -> tuple[str, str] | None:
    """Split a member's name as Energon does.

    >>> energon_rule("v1.2/a.seg.png"), energon_rule("README"), energon_rule("d/.hidden.png")
    (('v1.2/a', 'seg.png'), None, ('d/', 'hidden.png'))
    """
    match = NAME.match(name)
    return (match[1], match[2]) if match else None


def energon_index_url(url: str) -> str:
    """Return the name of the index of a shard: that of the shard, without its last suffix, and ``.tar.idx``.

    >>> energon_index_url("data/train-000.tar"), energon_index_url("a.b.tgz")
    ('data/train-000.tar.idx', 'a.b.tar.idx')
    """
    scheme, _ = split_scheme(url)
    path, mark, query = url.partition("?") if scheme in ("http", "https") else (url, "", "")
    dot = path.rfind(".", path.rfind("/") + 2)
    return f"{path if dot < 0 else path[:dot]}.tar.idx{mark}{query}"


def write_energon_index(
    url: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Write the index of a shard for Energon, and return its name.

    Args:
        url: the shard, a path or a URL.
        path: the file to write; by default, the one next to the shard that Energon expects.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to a remote file system.

    Raises:
        UnsupportedSidecarError: the shard is compressed or has no samples.
        ShardError: the shard cannot be read.
        DuplicateKeyError: a field occurs twice in a sample.
        MissingSidecarError: the index cannot be written.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "jpg": "one"}, {"__key__": "y", "jpg": "two"}])
        >>> import numpy
        >>> numpy.fromfile(write_energon_index(url), "<u8")
        array([   0, 1024, 2048], dtype=uint64)
    """
    shard = os.fspath(url)
    target = os.fspath(path) if path is not None else energon_index_url(shard)
    _write(shard, target, end_marker, storage_options)
    return target


def read_energon_index(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
) -> ShardIndex:
    """Read an index of Energon, and verify it against the shard's headers.

    Args:
        path: the index.
        url: its shard.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        storage_options: passed to remote file systems.

    Returns:
        The index, with keys and fields as Energon splits names.

    Raises:
        MissingSidecarError: the index cannot be read.
        CorruptSidecarError: the file is not an index of Energon.
        StaleSidecarError: the index does not match the shard; the message names the sample.
        ShardError: the shard cannot be read.
    """
    name, shard = redact(os.fspath(path)), os.fspath(url)
    content = read_sidecar(os.fspath(path), storage_options)
    if len(content) % 8 or not content:
        raise CorruptSidecarError(
            f"{name} is not an index of Energon: its size of {len(content)} bytes is not a multiple of 8"
        )
    offsets = np.frombuffer(content, "<u8")
    index = _index_shard(MemberTable(shard, end_marker=end_marker, storage_options=storage_options), redact(shard))
    found = index.columns["sample_offsets"].astype("<u8")
    for number, (expected, actual) in enumerate(zip(offsets.tolist(), found.tolist(), strict=False)):
        if expected != actual:
            what = f"sample {number}" if number + 1 < len(offsets) else "the end"
            found_there = (
                f"sample {number} ({index[number].key!r}) begins" if number < len(index) else "the samples end"
            )
            raise StaleSidecarError(
                f"{name} says that {what} is at byte {expected} of {redact(shard)}, but {found_there} at byte "
                f"{actual}. Build it again"
            )
    if len(offsets) != len(found):
        raise StaleSidecarError(
            f"{name} has {len(offsets) - 1} samples, but {redact(shard)} has {len(index)}. Build it again"
        )
    return index


def write_energon_dataset(
    folder: str | os.PathLike[str],
    splits: Mapping[str, Shards],
    *,
    keys: bool = True,
    end_marker: EndMarker = "required",
    executor: Executor | None = None,
    max_workers: int | None = None,
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
        end_marker: ``"optional"`` accepts archives without the two blocks of zeros at their end.
        executor: any executor to read the shards; by default, processes on this host.
        max_workers: the number of processes.
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
        os.makedirs(meta, exist_ok=True)  # noqa: PTH103  a string
    counts: dict[int, int] = {}
    work = (end_marker, storage_options)
    with contextlib.ExitStack() as opened:
        table = opened.enter_context(energon_keys(meta)) if keys and meta is not None else None
        for number, task in map_shards(_index, urls, work, executor=executor, max_workers=max_workers):
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
    yaml = require("yaml", extra="yaml", purpose="read split.yaml")
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
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSidecarError(f"{redact(name)} is not a file of Energon, or is damaged: {error}") from error
    for url in {*dataset.counts, *chain.from_iterable(dataset.splits.values())}:
        refuse_commands(url, name)
    return dataset


def _expand(patterns: Sequence[str] | None) -> list[str]:
    return [url for pattern in patterns or () for url in expand_braces(pattern)]


def _index(url: str, end_marker: EndMarker, storage_options: Mapping[str, Any] | None) -> ShardIndex:
    return _write(url, energon_index_url(url), end_marker, storage_options)


def _write(url: str, path: str, end_marker: EndMarker, storage_options: Mapping[str, Any] | None) -> ShardIndex:
    """Write the index of a shard for Energon, and return it as a `ShardIndex`."""
    index = _index_shard(MemberTable(url, end_marker=end_marker, storage_options=storage_options), redact(url))
    if not len(index):
        raise UnsupportedSidecarError(f"{redact(url)} has no samples, and Energon does not accept an empty shard")
    write_sidecar(path, index.columns["sample_offsets"].astype("<u8").tobytes(), storage_options)
    return index


def _index_shard(members: MemberTable, archive: str) -> ShardIndex:
    """Index the files of a shard with Energon's rule."""
    builder = IndexBuilder(key_rule=energon_rule, lowercase=False, on_repeated_key="ignore", archive=archive)
    for member in members.found:
        builder.add(*member)
    return builder.finish(end=members.scan.end, facts=members.facts)


def _yaml(splits: Mapping[str, Sequence[str]]) -> str:
    """Return the text of split.yaml; strings are quoted as in JSON, which is valid YAML."""
    lines = ["split_parts:"]
    for split, urls in splits.items():
        lines += [f"  {split}:{'' if urls else ' []'}", *(f"  - {json.dumps(url)}" for url in urls)]
    return "\n".join([*lines, "exclude: []"])
