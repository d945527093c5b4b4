"""What ``create`` makes samples of: which kind of source it is, and the options that go with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.small_files import read_sidecar, write_sidecar
from wds_datapipes.prepare.sample_spec import Source
from wds_datapipes.prepare.sources.image_folder import IMAGE_ENDINGS, Faults, ImageFiles, find_images
from wds_datapipes.prepare.sources.imagenet import find_imagenet
from wds_datapipes.prepare.sources.table import Table
from wds_datapipes.prepare.sources.table_rows import ending_of
from wds_datapipes.prepare.sources.tarp_recipe import Recipe
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.writing.shard_names import NUMBER

__all__ = ["Kind", "Material", "MissingWord", "class_list_place", "open_source", "write_class_list"]

#: Where the ending of a shard's name begins.
ENDING = re.compile(r"\.(tar|tgz|tbz2?|txz|tzst)(\.\w+)?$")
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


class Kind(str, Enum):
    """What samples are made of."""

    images = "images"
    imagenet = "imagenet"
    table = "table"
    recipe = "recipe"


class MissingWord(str, Enum):
    """What becomes of a row that lacks a value."""

    fault = "raise"
    keep = "keep"


@dataclass(frozen=True, kw_only=True)
class Material:
    """The options about a source; each goes with some kinds alone."""

    no_classes: bool
    all_files: bool
    ending: list[str]
    class_name: str
    classes_from: str
    split: str
    labels: Path | None
    file: list[str]
    field: list[str]
    key: str
    missing: MissingWord
    root: str


#: The options, and the kinds that they go with.
GOES_WITH = {
    "no_classes": {Kind.images},
    "all_files": {Kind.images},
    "ending": {Kind.images},
    "class_name": {Kind.images, Kind.imagenet},
    "classes_from": {Kind.images},
    "split": {Kind.imagenet},
    "labels": {Kind.imagenet},
    "file": {Kind.table},
    "field": {Kind.table},
    "key": {Kind.table},
    "missing": {Kind.table},
    "root": {Kind.table, Kind.recipe},
}


def open_source(
    source: str,
    kind: Kind | None,
    material: Material,
    rule: KeyRule,
    on_fault: Faults,
    storage_options: Mapping[str, Any] | None,
) -> Source:
    """Open a source, as which its name tells if nothing else is said.

    Raises:
        WrongUse: it is nothing of these, or an option does not go with it.
    """
    path = local_path(source)
    if path is not None and not Path(path).exists():
        raise WrongUse(f"There is no file or folder {source!r}")
    kind = _kind_of(source) if kind is None else kind
    for name, kinds in GOES_WITH.items():
        if getattr(material, name) not in (False, [], "", None, MissingWord.fault) and kind not in kinds:
            told = " and ".join(f"--from {each}" for each in sorted(each.value for each in kinds))
            raise WrongUse(f"--{name.replace('_', '-')} goes with {told}, and this is --from {kind.value}")
    if kind in (Kind.images, Kind.imagenet) and not (path is not None and Path(path).is_dir()):
        raise WrongUse(
            f"{redact(source)!r} is no folder of this host, as --from {kind.value} takes one. A table may name files "
            f"in a store"
        )
    try:
        return _open_source(source if path is None else path, kind, material, rule, on_fault, storage_options)
    except ValueError as error:
        if type(error) is not ValueError:  # one of this package, with a text of its own
            raise
        raise WrongUse(str(error)) from None


def _kind_of(source: str) -> Kind:
    path = local_path(source)
    if path is not None and Path(path).is_dir():
        return Kind.images
    if ending_of(source) in TABLES:
        return Kind.table
    raise WrongUse(
        f"What {redact(source)!r} is, its name does not tell: {', '.join(TABLES)} are tables. For a recipe of tarp, "
        f"use --from recipe"
    )


def _open_source(
    source: str,
    kind: Kind,
    material: Material,
    rule: KeyRule,
    on_fault: Faults,
    storage_options: Mapping[str, Any] | None,
) -> Source:
    if kind is Kind.recipe:
        return Recipe(source, root=material.root, key_rule=rule, storage_options=storage_options)
    if kind is Kind.table:
        return Table(
            source,
            files=[_pair(each, "--file", "") for each in material.file],
            values=[_pair(each, "--field", None) for each in material.field] or None,
            key=material.key,
            root=material.root or None,
            missing=material.missing.value,
            storage_options=storage_options,
        )
    if kind is Kind.imagenet:
        split = material.split or "train"
        return find_imagenet(source, split, labels=material.labels, name_field=material.class_name, on_fault=on_fault)
    if material.no_classes and (material.class_name or material.classes_from):
        raise WrongUse("--no-classes goes neither with --class-name nor with --classes-from")
    found = find_images(
        source,
        has_classes=not material.no_classes,
        endings=material.ending or IMAGE_ENDINGS,
        key_rule=rule if material.all_files else None,
        name_field=material.class_name,
        on_fault=on_fault,
    )
    if not material.classes_from:
        return found
    return found.numbered_by(_read_class_list(material.classes_from, storage_options))


def _read_class_list(place: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Read the names of classes that `write_class_list` has written."""
    try:
        names = json.loads(read_sidecar(place, storage_options))["classes"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("its classes are no list of names")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WrongUse(
            f"--classes-from is a list of classes, as create writes it, and {redact(place)!r} is none: {error}"
        ) from None
    return names


def _pair(text: str, option: str, field: str | None) -> tuple[str, str]:
    """Return the field and the column of ``FIELD=COLUMN``; of a column alone, the field that it has by itself."""
    name, equals, column = text.partition("=")
    if not equals:
        name, column = text.lower() if field is None else field, text
    if not column or (equals and not name) or (column == "*" and not equals):
        raise WrongUse(f"{option} is FIELD=COLUMN, or a COLUMN, and not {text!r}")
    return name, column


def class_list_place(output: str, source: Source, place: str) -> str:
    """Return where the list of classes goes: beside the shards, if they have a place; nothing, if there is none.

    >>> class_list_place("out/train-%06d.tar.gz", ImageFiles("", ["cat"]), "")
    'out/train-classes.json'
    >>> class_list_place("s3://bucket/%d.tar", ImageFiles("", ["cat"]), ""), class_list_place("-", Recipe, "")
    ('s3://bucket/classes.json', '')
    """
    if not isinstance(source, ImageFiles) or source.classes is None:
        if place:
            raise WrongUse("--class-list goes with classes, and these samples have none")
        return ""
    if place or split_scheme(output)[0] in ("-", "pipe"):
        return place
    folder, slash, name = ENDING.sub("", output).rpartition("/")
    name = NUMBER.sub("classes", name) if NUMBER.search(name) else f"{name}-classes"
    return f"{folder}{slash}{name}.json"


def write_class_list(source: Source, place: str, storage_options: dict[str, Any] | None) -> None:
    """Write the names of classes in the order of their numbers."""
    assert isinstance(source, ImageFiles)  # noqa: S101  others have no place for the list
    facts = {"classes": source.classes, **({"words": source.words} if source.words else {})}
    write_sidecar(place, (json.dumps(facts, indent=1) + "\n").encode(), storage_options)
