"""Samples from ImageNet, as distributed or as unpacked by torchvision."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.extras import require
from wds_datapipes.prepare.sources.image_folder import Faults, Files, ImageFiles, find_images

__all__ = ["find_imagenet"]

#: The ID of a class: a synset of WordNet.
WNID = re.compile(r"n\d{8}")
ENDINGS = ("jpeg", "jpg", "png")
#: The folder of the development kit.
DEVKIT = "ILSVRC2012_devkit_t12/data"
KNOWN_FILES = {"val": ("LOC_val_solution.csv", "meta.bin", f"{DEVKIT}/ILSVRC2012_validation_ground_truth.txt")}


class Synsets(NamedTuple):
    """The names and numbers of the classes."""

    #: Maps the ID of each class to its words, such as ``"tench, Tinca tinca"``.
    words: dict[str, str]
    #: Maps the number in the development kit to the ID of the class.
    numbered: dict[int, str]
    #: The classes of the validation images in the order of their names, as saved by torchvision.
    validation: Sequence[str]


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
        labels: the file with the classes of images in a single folder: ``LOC_val_solution.csv`` of Kaggle,
            torchvision's ``meta.bin``, the ground truth of the development kit, lines with a file and its class, or one
            class per line in the order of the file names. A class is given by its ID or, after a file, also by its
            number from 0. The first three files are found automatically in the root.
        name_field: the field for the words of the class, or its ID if they are unknown.
        on_fault: called with the error of an image, which is then skipped; by default, errors are raised.

    Raises:
        SampleSourceError: a file or folder does not exist or cannot be read, or an image has no class.
        MissingDependencyError: reading the labels requires another package.
    """
    top, folder = Path(root), Path(root, split)
    if not folder.is_dir():
        raise SampleSourceError(f"There is no folder {str(folder)!r}. The root of ImageNet contains train and val")
    synsets = read_synsets(top, labels)
    classes = list_class_folders(top / "train") or list_class_folders(folder)
    if list_class_folders(folder):
        found = _in_folders(folder, classes, on_fault)
    else:
        found = _in_one_folder(top, folder, split, labels, classes, synsets, on_fault)
    if found.classes is not None and synsets.words:
        found.words = [synsets.words.get(name, name) for name in found.classes]
    found.name_field = name_field
    return found


def _in_folders(folder: Path, classes: list[str], on_fault: Faults | None) -> ImageFiles:
    return find_images(folder, endings=ENDINGS, on_fault=on_fault).numbered_by(classes)


def _in_one_folder(
    top: Path,
    folder: Path,
    split: str,
    labels: str | os.PathLike[str] | None,
    classes: list[str],
    synsets: Synsets,
    on_fault: Faults | None,
) -> ImageFiles:
    images = find_images(folder, has_classes=False, endings=ENDINGS, on_fault=on_fault)
    names = [Files(*files) for files in images.files]
    by_name = _read_labels(_label_file(top, split, labels), [files.stem for files in names], classes, synsets)
    classes = classes or sorted(synsets.words) or sorted(set(by_name.values()))
    numbers = {name: number for number, name in enumerate(classes)}
    found = ImageFiles(str(folder), classes)
    found.left_out = images.left_out
    for files in names:
        label = by_name.get(files.stem.rpartition("/")[2])
        if label in numbers:
            found.add(files, numbers[label])
            continue
        problem = "has no class in the file of labels" if label is None else f"has the unknown class {label!r}"
        error = SampleSourceError(
            f"The image {str(folder / files.stem)!r} {problem}. Add it there, or remove the image"
        )
        if on_fault is None:
            raise error
        on_fault(error)
    return found


def list_class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders that are IDs of synsets."""
    try:
        return sorted(each.name for each in folder.iterdir() if WNID.fullmatch(each.name) and each.is_dir())
    except FileNotFoundError:
        return []


def read_synsets(top: Path, labels: str | os.PathLike[str] | None) -> Synsets:
    """Read the synsets from a file in the root or next to the labels."""
    folders = [top, top / DEVKIT]
    if labels is not None:
        folders += [Path(labels).parent]
    for folder in folders:
        if (binary := folder / "meta.bin").is_file():
            return _torchvision_synsets(binary)
        if (mapping := folder / "LOC_synset_mapping.txt").is_file():
            lines = (line.partition(" ") for line in _lines(mapping))
            return Synsets({name: words for name, _, words in lines}, {}, ())
        if (matrix := folder / "meta.mat").is_file():
            return _devkit_synsets(matrix)
    return Synsets({}, {}, ())


def _torchvision_synsets(path: Path) -> Synsets:
    import torch

    try:
        words, validation = torch.load(path, weights_only=True)
        return Synsets({name: ", ".join(each) for name, each in words.items()}, {}, list(validation))
    except Exception as error:  # noqa: BLE001  the file may contain anything
        raise SampleSourceError(
            f"{str(path)!r} is not in torchvision's format: {type(error).__name__}: {error}"
        ) from None


def _devkit_synsets(path: Path) -> Synsets:
    loading = require("scipy.io", extra="imagenet", purpose="read meta.mat of ImageNet's development kit")
    try:
        rows = loading.loadmat(path, squeeze_me=True)["synsets"]
        leaves = [row for row in rows if int(row["num_children"]) == 0]  # the others are groups of classes
        words = {str(row["WNID"]): str(row["words"]) for row in leaves}
        return Synsets(words, {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}, ())
    except (ValueError, LookupError, OSError, TypeError) as error:
        raise SampleSourceError(
            f"{str(path)!r} is not in the format of the development kit: {type(error).__name__}: {error}"
        ) from None


def _label_file(top: Path, split: str, labels: str | os.PathLike[str] | None) -> Path:
    if labels is not None:
        return Path(labels)
    for name in KNOWN_FILES.get(split, ()):
        if (path := top / name).is_file():
            return path
    raise SampleSourceError(
        f"The images of {str(top / split)!r} are not in folders of classes, and there is no file of labels. Put "
        f"LOC_val_solution.csv, meta.bin or {DEVKIT} into {str(top)!r}, or name a file with their labels"
    )


def _read_labels(path: Path, stems: Sequence[str], classes: Sequence[str], synsets: Synsets) -> Mapping[str, str]:
    """Return a mapping of image names to classes."""
    if path.name == "meta.bin":
        validation = synsets.validation or _torchvision_synsets(path).validation
        return _labels_in_order(path, validation, stems)
    lines = _lines(path)
    if lines and lines[0].lower().startswith("imageid,"):
        return {row[0]: row[1].split()[0] for row in csv.reader(lines[1:]) if len(row) > 1 and row[1].strip()}
    words = [line.split() for line in lines if line.strip()]
    if all(len(each) == 1 for each in words):
        return _labels_in_order(path, [_resolve_devkit_class(each[0], path, synsets) for each in words], stems)
    known = classes or sorted(synsets.words)
    return {_stem(line[0]): _resolve_class(line, path, known) for line in words}


def _labels_in_order(path: Path, labels: Sequence[str], stems: Sequence[str]) -> dict[str, str]:
    if len(labels) != len(stems):
        raise SampleSourceError(
            f"{str(path)!r} has the classes of {len(labels)} images, but there are {len(stems)} images. Add the "
            f"missing ones"
        )
    return dict(zip(sorted(_stem(stem) for stem in stems), labels, strict=True))


def _resolve_devkit_class(word: str, path: Path, synsets: Synsets) -> str:
    """Return the class for an ID, or a number from 1 in the development kit."""
    if not word.isdigit():
        return word
    if (name := synsets.numbered.get(int(word))) is None:
        raise SampleSourceError(
            f"{str(path)!r} has the class number {word}, which requires meta.mat of the development kit. Put it next "
            f"to the file"
        )
    return name


def _resolve_class(line: Sequence[str], path: Path, classes: Sequence[str]) -> str:
    """Return the class of a line with a file and a class ID or number from 0."""
    if len(line) != 2:
        raise SampleSourceError(f"{str(path)!r} has the line {' '.join(line)!r}, which is not a file and its class")
    if not line[1].isdigit():
        return line[1]
    if not int(line[1]) < len(classes):
        raise SampleSourceError(
            f"{str(path)!r} has the class number {line[1]}, but only {len(classes)} classes are known, counted from 0. "
            f"Put the folder train, or a file with all classes, into the root"
        )
    return classes[int(line[1])]


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SampleSourceError(f"The file {str(path)!r} cannot be read: {error}") from None
