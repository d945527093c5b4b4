"""The commands ``create images``, ``imagenet``, ``table`` and ``recipe``: create shards from files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._create import CreateOptions, create_from
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.small_files import read_sidecar
from wds_datapipes.prepare.sample_spec import Source
from wds_datapipes.prepare.sources.image_folder import IMAGE_ENDINGS, Faults, find_images
from wds_datapipes.prepare.sources.imagenet import find_imagenet
from wds_datapipes.prepare.sources.table import Table
from wds_datapipes.prepare.sources.tarp_recipe import Recipe
from wds_datapipes.samples.keys import KeyRule

__all__ = ["create"]

OWN = {"rich_help_panel": "Input"}
StoreOptions: TypeAlias = "Mapping[str, Any] | None"

ClassName: TypeAlias = Annotated[
    str, typer.Option("--class-name", metavar="FIELD", help="A field for the class name, such as txt.", **OWN)
]
ClassList: TypeAlias = Annotated[
    str, typer.Option("--class-list", metavar="FILE", help="The list of classes, if not next to the shards.", **OWN)
]
ClassesFrom: TypeAlias = Annotated[
    str,
    typer.Option(metavar="FILE", help="Number classes as in this list, which was written for another split.", **OWN),
]


class MissingValue(str, Enum):
    """How to handle a row that lacks a value."""

    fault = "raise"
    keep = "keep"


def create_images(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of images.", show_default=False)],
    options: CreateOptions,
    no_classes: Annotated[bool, typer.Option("--no-classes", help="Folders are not classes.", **OWN)] = False,
    all_files: Annotated[
        bool, typer.Option("--all-files", help="Group all files with the same key into one sample.", **OWN)
    ] = False,
    ending: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXT", help="The extension of samples, instead of those of images; may be repeated.", **OWN
        ),
    ] = None,
    class_name: ClassName = "",
    class_list: ClassList = "",
    classes_from: ClassesFrom = "",
) -> None:
    """Create shards from a folder of images.

    Each subfolder is a class, and its number is the field cls. The class names are written to classes.json next to the
    shards. Files are copied unchanged, unless --function transforms the samples. The shards do not depend on the number
    of workers.
    """
    if no_classes and (class_name or classes_from):
        raise WrongUse("--no-classes cannot be used with --class-name or --classes-from")
    if no_classes and class_list:
        raise WrongUse("--class-list cannot be used with --no-classes")
    path = existing_folder(folder)

    def find(on_fault: Faults, key_rule: KeyRule, storage_options: StoreOptions) -> Source:
        found = find_images(
            path,
            has_classes=not no_classes,
            endings=ending or IMAGE_ENDINGS,
            key_rule=key_rule if all_files else None,
            name_field=class_name,
            on_fault=on_fault,
        )
        return found.numbered_by(read_class_list(classes_from, storage_options)) if classes_from else found

    create_from(find, options, class_list)


def create_imagenet(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder with train and val.", show_default=False)],
    options: CreateOptions,
    split: Annotated[str, typer.Option(metavar="NAME", help="The split, train or val.", **OWN)] = "train",
    labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The labels of val, if not in the folder.", show_default=False, **OWN),
    ] = None,
    class_name: ClassName = "",
    class_list: ClassList = "",
) -> None:
    """Create shards from ImageNet, as distributed by torchvision and Kaggle.

    Samples have the fields jpg and cls. Keys are numbers, or file names with --rekey '{name}'.
    """
    path = existing_folder(folder)

    def find(on_fault: Faults, _rule: KeyRule, _options: StoreOptions) -> Source:
        return find_imagenet(path, split, labels=labels, name_field=class_name, on_fault=on_fault)

    create_from(find, replace(options, rekey=options.rekey or "{number:07d}"), class_list)


def create_table(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="The path or URL of a CSV, JSON lines or Parquet file.", show_default=False
        ),
    ],
    options: CreateOptions,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="[FIELD=]COLUMN", help="A column of file names; may be repeated.", **OWN),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FIELD=]COLUMN",
            help="A column of values; by default all columns. json=* stores all as JSON; may be repeated.",
            **OWN,
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(metavar="COLUMN", help="The column of keys; by default, keys are numbers.", **OWN)
    ] = "",
    missing: Annotated[
        MissingValue, typer.Option(help="How to handle a row that lacks a value.", **OWN)
    ] = MissingValue.fault,
    root: Annotated[
        str, typer.Option(metavar="DIR", help="The folder for relative paths; by default that of the table.", **OWN)
    ] = "",
    class_list: ClassList = "",
    classes_from: ClassesFrom = "",
) -> None:
    """Create shards from the rows of a table, whose columns are values or name files.

    If the column for the field cls has names of classes, they are numbered, and written to classes.json next to the
    shards.
    """
    path = existing_file(table)

    def open_table(_fault: Faults, _rule: KeyRule, storage_options: StoreOptions) -> Source:
        found = Table(
            path,
            files=[split_pair(each, "--file", "") for each in file or ()],
            values=[split_pair(each, "--field", None) for each in field or ()] or None,
            key=key,
            root=root or None,
            classes=read_class_list(classes_from, storage_options) if classes_from else None,
            missing=missing.value,
            storage_options=storage_options,
        )
        if found.classes is None and (class_list or classes_from):
            raise WrongUse(
                "--class-list and --classes-from require a column of class names for the field cls, as in "
                "--field cls=COLUMN"
            )
        return found

    create_from(open_table, options, class_list)


def create_recipe(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe for tarp create: a path, a URL, or -.", show_default=False)
    ],
    options: CreateOptions,
    root: Annotated[
        str, typer.Option(metavar="DIR", help="The folder for relative paths; by default the current one.", **OWN)
    ] = "",
) -> None:
    """Create shards from a tarp recipe, which lists files, texts and commands.

    Each line has a name in the archive and a path, URL, text:STRING or pipe:COMMAND. Consecutive lines with the same
    key form a sample.
    """
    path = existing_file(recipe)

    def open_recipe(_fault: Faults, key_rule: KeyRule, storage_options: StoreOptions) -> Source:
        return Recipe(path, root=root, key_rule=key_rule, storage_options=storage_options)

    create_from(open_recipe, options)


def existing_folder(folder: str) -> str:
    """Return the path of a local folder.

    Raises:
        WrongUse: it is not a folder.
    """
    path = existing_file(folder)
    if not Path(path).is_dir() or local_path(folder) is None:
        raise WrongUse(
            f"{redact(folder)!r} is not a local folder. To read files from a store, list them in a table for "
            f"create table"
        )
    return path


def existing_file(source: str) -> str:
    """Return a path or a URL unchanged.

    Raises:
        WrongUse: the path does not exist.
    """
    path = local_path(source)
    if path is not None and not os.path.exists(path):  # noqa: PTH110  Path raises an error for long names
        raise WrongUse(f"There is no file or folder {source!r}")
    return source if path is None else path


def split_pair(text: str, option: str, field: str | None) -> tuple[str, str]:
    """Return the field and the column of ``FIELD=COLUMN``; for a column alone, its default field."""
    name, equals, column = text.partition("=")
    if not equals:
        name, column = text.lower() if field is None else field, text
    if not column or (equals and not name) or (column == "*" and not equals):
        raise WrongUse(f"{option} must be FIELD=COLUMN or COLUMN, not {text!r}")
    return name, column


def read_class_list(url: str, storage_options: StoreOptions) -> list[str]:
    """Read the class names from a file written by `write_class_list`."""
    try:
        names = json.loads(read_sidecar(url, storage_options))["classes"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("its classes are not a list of names")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WrongUse(
            f"--classes-from must be a list of classes written by create, but {redact(url)!r} is not: {error}"
        ) from None
    return names


#: The help text of the command group.
HELP = "Create shards from image folders, ImageNet, tables or recipes."
#: The subcommands.
create: dict[str, Callable[..., Any]] = {
    "images": create_images,
    "imagenet": create_imagenet,
    "table": create_table,
    "recipe": create_recipe,
}
