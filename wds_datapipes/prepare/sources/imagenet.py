"""Samples from ImageNet, as distributed by Kaggle or as unpacked by torchvision."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.prepare.sources.image_folder import Faults, ImageFiles, find_images

ENDINGS = ("jpeg", "jpg", "png")
#: Kaggle's files with the classes of images in a single folder, and with the words of classes.
SOLUTION, MAPPING = "LOC_val_solution.csv", "LOC_synset_mapping.txt"


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
        labels: ``LOC_val_solution.csv`` of Kaggle, with the classes of images in a single folder, if it is not in the
            root.
        name_field: the field for the words of the class, or its ID if they are unknown.
        on_fault: called with the error of an image, which is then skipped; by default, errors are raised.

    Raises:
        SampleSourceError: a file or folder does not exist or cannot be read, or an image has no class.
    """
    top, folder = Path(root), Path(root, split)
    if not folder.is_dir():
        raise SampleSourceError(f"There is no folder {str(folder)!r}. The root of ImageNet contains train and val")
    mapping = _lines(top / MAPPING) if (top / MAPPING).is_file() else []
    words = {name: meaning for name, _, meaning in (line.partition(" ") for line in mapping)}
    classes = _list_folders(top / "train") or _list_folders(folder)
    if _list_folders(folder):
        found = find_images(folder, endings=ENDINGS, on_fault=on_fault)
        found.number_by(classes)
    else:
        images = find_images(folder, has_classes=False, endings=ENDINGS, on_fault=on_fault)
        by_name = _read_labels(top / SOLUTION if labels is None else Path(labels))
        numbers = {name: number for number, name in enumerate(classes or sorted(words or {*by_name.values()}))}
        found = ImageFiles(str(folder), list(numbers))
        found.left_out = images.left_out
        for stem, endings in images.files:
            label = by_name.get(stem.rpartition("/")[2], "")
            if label in numbers:
                found.add((stem, endings), numbers[label])
                continue
            problem = f"has the unknown class {label!r}" if label else "has no class in the file of labels"
            path = str(folder / stem)
            error = SampleSourceError(f"The image {path!r} {problem}. Add it there, or remove the image")
            if on_fault is None:
                raise error
            on_fault(error)
    if words:
        found.words = [words.get(name, name) for name in found.classes or ()]
    found.name_field = name_field
    return found


def _list_folders(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders that are IDs of classes, such as ``n01440764``."""
    try:
        names = sorted(each.name for each in folder.iterdir() if each.is_dir())
    except FileNotFoundError:
        return []
    return [name for name in names if len(name) == 9 and name[0] == "n" and name[1:].isdigit()]


def _read_labels(path: Path) -> dict[str, str]:
    """Return a mapping of image names to classes."""
    if not path.is_file():
        raise SampleSourceError(
            f"The images are not in folders of classes, and there is no file of labels {str(path)!r}. Put "
            f"{SOLUTION} of Kaggle there, or list the images and their classes in a table"
        )
    lines = _lines(path)
    if not lines or not lines[0].lower().startswith("imageid,"):
        raise SampleSourceError(f"{str(path)!r} is not {SOLUTION} of Kaggle")
    return {row[0]: row[1].split()[0] for row in csv.reader(lines[1:]) if len(row) > 1 and row[1].strip()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SampleSourceError(f"The file {str(path)!r} cannot be read: {error}") from None
