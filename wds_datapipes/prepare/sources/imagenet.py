"""Samples from ImageNet, as distributed by Kaggle or as unpacked by torchvision."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.prepare.sources.image_folder import Faults, ImageFiles, find_images

ENDINGS = ("jpeg", "jpg", "png")
#: The files with the classes of images in a single folder, and the file with the words of classes.
SOLUTION, META, MAPPING = "LOC_val_solution.csv", "meta.bin", "LOC_synset_mapping.txt"


class Synsets(NamedTuple):
    """The classes.

    Attributes:
        words: maps the ID of each class to its words, such as ``"tench, Tinca tinca"``.
        validation: the classes of the validation images in the order of their names, as saved by torchvision.
    """

    words: dict[str, str]
    validation: Sequence[str] = ()


def find_imagenet(
    root: str | os.PathLike[str],
    split: str,
    *,
    labels: str | os.PathLike[str] | None = None,
    name_field: str = "",
    on_fault: Faults | None = None,
) -> ImageFiles:
    """Find the images of ``root/split``, in one folder per class or, for validation, in a single folder.

    Classes are numbered by sorted ID (``n01440764`` is 0), as in torchvision. If ``root/train`` exists, its folders are
    the classes, even if another split lacks some.

    Args:
        root: the folder that contains ``train`` or ``val``.
        split: the name of the subfolder.
        labels: the file with the classes of images in a single folder, if it is not in the root:
            ``LOC_val_solution.csv`` of Kaggle, or ``meta.bin`` of torchvision.
        name_field: the field for the words of the class, or its ID if they are unknown.
        on_fault: called with the error of an image, which is then skipped; by default, errors are raised.

    Raises:
        SampleSourceError: a file or folder does not exist or cannot be read, or an image has no class.
    """
    top, folder = Path(root), Path(root, split)
    if not folder.is_dir():
        raise SampleSourceError(f"There is no folder {str(folder)!r}. The root of ImageNet contains train and val")
    synsets = _read_synsets([top, *([] if labels is None else [Path(labels).parent])])
    classes = _list_folders(top / "train") or _list_folders(folder)
    if _list_folders(folder):
        found = find_images(folder, endings=ENDINGS, on_fault=on_fault)
        found.number_by(classes)
    else:
        images = find_images(folder, has_classes=False, endings=ENDINGS, on_fault=on_fault)
        by_name = _read_labels(top, None if labels is None else Path(labels), [stem for stem, _ in images.files])
        found = _labeled(images, folder, by_name, classes or sorted(synsets.words), on_fault)
    if found.classes is not None and synsets.words:
        found.words = [synsets.words.get(name, name) for name in found.classes]
    found.name_field = name_field
    return found


def _labeled(
    images: ImageFiles, folder: Path, by_name: Mapping[str, str], classes: list[str], on_fault: Faults | None
) -> ImageFiles:
    """Return images with the classes of their names."""
    numbers = {name: number for number, name in enumerate(classes or sorted(set(by_name.values())))}
    found = ImageFiles(str(folder), list(numbers))
    found.left_out = images.left_out
    for stem, endings in images.files:
        label = by_name.get(stem.rpartition("/")[2])
        if label in numbers:
            found.add((stem, endings), numbers[label])
            continue
        problem = "has no class in the file of labels" if label is None else f"has the unknown class {label!r}"
        error = SampleSourceError(f"The image {str(folder / stem)!r} {problem}. Add it there, or remove the image")
        if on_fault is None:
            raise error
        on_fault(error)
    return found


def _list_folders(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders that are IDs of classes, such as ``n01440764``."""
    try:
        names = sorted(each.name for each in folder.iterdir() if each.is_dir())
    except FileNotFoundError:
        return []
    return [name for name in names if len(name) == 9 and name[0] == "n" and name[1:].isdigit()]


def _read_synsets(folders: Sequence[Path]) -> Synsets:
    for folder in folders:
        if (binary := folder / META).is_file():
            return _read_meta(binary)
        if (mapping := folder / MAPPING).is_file():
            lines = (line.partition(" ") for line in _lines(mapping))
            return Synsets({name: words for name, _, words in lines})
    return Synsets({})


def _read_meta(path: Path) -> Synsets:
    import torch

    try:
        words, validation = torch.load(path, weights_only=True)
        return Synsets({name: ", ".join(each) for name, each in words.items()}, list(validation))
    except Exception as error:  # noqa: BLE001  the file may contain anything
        raise SampleSourceError(
            f"{str(path)!r} is not in torchvision's format: {type(error).__name__}: {error}"
        ) from None


def _read_labels(top: Path, labels: Path | None, stems: Sequence[str]) -> Mapping[str, str]:
    """Return a mapping of image names to classes."""
    path = labels or next((top / name for name in (SOLUTION, META) if (top / name).is_file()), None)
    if path is None:
        raise SampleSourceError(
            f"The images in {str(top)!r} are not in folders of classes, and there is no file of labels. Put {SOLUTION} "
            f"of Kaggle or {META} of torchvision there, or list the images and their classes in a table"
        )
    if path.name == META:
        validation = _read_meta(path).validation
        if len(validation) != len(stems):
            raise SampleSourceError(
                f"{str(path)!r} has the classes of {len(validation)} images, but there are {len(stems)} images. Add "
                f"the missing ones"
            )
        return dict(zip(sorted(stem.rpartition("/")[2] for stem in stems), validation, strict=True))
    lines = _lines(path)
    if not lines or not lines[0].lower().startswith("imageid,"):
        raise SampleSourceError(f"{str(path)!r} is neither {SOLUTION} of Kaggle nor {META} of torchvision")
    return {row[0]: row[1].split()[0] for row in csv.reader(lines[1:]) if len(row) > 1 and row[1].strip()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SampleSourceError(f"The file {str(path)!r} cannot be read: {error}") from None
