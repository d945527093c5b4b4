"""The command ``create images``: create shards from a folder of images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.sidecars import read_sidecar
from wds_datapipes.tools.cli.create.files import INPUT, CreateArguments, create_from
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar, wrong_use
from wds_datapipes.tools.prepare.sample_spec import Source
from wds_datapipes.tools.prepare.sources.image_folder import IMAGE_ENDINGS, Faults, find_images


def images(
    folder: FileOrUrl,
    /,
    *,
    no_classes: Annotated[bool, Parameter(group=INPUT)] = False,
    all_files: Annotated[bool, Parameter(group=INPUT)] = False,
    ending: Annotated[list[str] | None, metavar("EXT", group=INPUT)] = None,
    classes_from: Annotated[FileOrUrl, metavar("FILE", group=INPUT)] = "",
    options: CreateArguments,
) -> None:
    """Create shards from a folder of images.

    Each subfolder is a class, and the field cls is its number. The class names are written next to the shards, to
    photos-classes.json for photos-%03d.tar. Files are copied unchanged unless --function transforms the samples. The
    shards do not depend on the number of workers.

    Args:
        folder: A folder of images.
        no_classes: The subfolders are not classes.
        all_files: Group all files with the same key into one sample.
        ending: The extension of the files, instead of those of images; may be repeated.
        classes_from: Number the classes as in this list, written for another split.
    """
    if no_classes and classes_from:
        raise WrongUse("--no-classes cannot be used with --classes-from")
    if (path := local_path(folder)) is None:
        raise WrongUse(f"{redact(folder)!r} is not a local folder. Use create recipe for files in a store")

    def find(on_fault: Faults) -> Source:
        return find_images(
            path,
            has_classes=not no_classes,
            classes=read_class_list(classes_from, options.store) if classes_from else None,
            endings=ending or IMAGE_ENDINGS,
            key_rule=options.rule if all_files else None,
            on_fault=on_fault,
        )

    create_from(find, options)


def read_class_list(url: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Read the class names from a file that `create_from` has written."""
    with wrong_use(
        "--classes-from is not a list of classes that create has written: ",
        MissingSidecarError,
        LookupError,
        TypeError,
        RecursionError,
    ):
        return list(json.loads(read_sidecar(url, storage_options))["classes"])
