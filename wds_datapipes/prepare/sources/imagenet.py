"""ImageNet as it comes, or as torchvision has unpacked it: which class each image is of."""

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

#: The name of a class: a synset of WordNet.
WNID = re.compile(r"n\d{8}")
ENDINGS = ("jpeg", "jpg", "png")
#: Files that tell the classes of images, where they are by themselves.
DEVKIT = "ILSVRC2012_devkit_t12/data"
KNOWN_FILES = {"val": ("LOC_val_solution.csv", "meta.bin", f"{DEVKIT}/ILSVRC2012_validation_ground_truth.txt")}


class Synsets(NamedTuple):
    """What is known of the classes."""

    #: The name of each class to what it is called, such as ``"tench, Tinca tinca"``.
    words: dict[str, str]
    #: The names of classes by their numbers in the development kit.
    numbered: dict[int, str]
    #: The classes of the images for validation, in the order of their names; torchvision keeps these.
    validation: Sequence[str]


def find_imagenet(
    root: str | os.PathLike[str],
    split: str,
    *,
    labels: str | os.PathLike[str] | None = None,
    name_field: str = "",
    on_fault: Faults | None = None,
) -> ImageFiles:
    """Look for the images of ``root/split``, which are in a folder for each class, or, for validation, in one for all.

    Classes are numbered by their names in order (``n01440764`` is 0), as torchvision does. If there is
    ``root/train``, its folders are the classes, also where another split lacks some.

    Args:
        root: the folder that has ``train`` or ``val``.
        split: the name of the folder in it.
        labels: where images are in one folder, the file that tells their classes: ``LOC_val_solution.csv`` of Kaggle,
            torchvision's ``meta.bin``, the ground truth of the development kit, lines of a file and its class, or a
            line with a class for each file, in the order of their names. A class is told by its name, and in lines of a
            file and its class by its number from 0, too. The first three are found in the root by themselves.
        name_field: a field for what the class is called, or for its name if that is not known.
        on_fault: called with what is wrong with an image, which is then left out; otherwise it is raised.

    Raises:
        SampleSourceError: a file or folder is not there or cannot be read, or an image has no class.
        MissingDependencyError: reading the file takes another package.
    """
    top, place = Path(root), Path(root, split)
    if not place.is_dir():
        raise SampleSourceError(
            f"There is no folder {str(place)!r}. ImageNet is the folder that has train and val in it"
        )
    synsets = read_synsets(top, labels)
    classes = class_folders(top / "train") or class_folders(place)
    if class_folders(place):
        found = _in_folders(place, classes, on_fault)
    else:
        found = _in_one_folder(top, place, split, labels, classes, synsets, on_fault)
    if found.classes is not None and synsets.words:
        found.words = [synsets.words.get(name, name) for name in found.classes]
    found.name_field = name_field
    return found


def _in_folders(place: Path, classes: list[str], on_fault: Faults | None) -> ImageFiles:
    return find_images(place, endings=ENDINGS, on_fault=on_fault).numbered_by(classes)


def _in_one_folder(
    top: Path,
    place: Path,
    split: str,
    labels: str | os.PathLike[str] | None,
    classes: list[str],
    synsets: Synsets,
    on_fault: Faults | None,
) -> ImageFiles:
    images = find_images(place, has_classes=False, endings=ENDINGS, on_fault=on_fault)
    names = [Files(*files) for files in images.files]
    by_name = _read_labels(_label_file(top, split, labels), [files.stem for files in names], classes, synsets)
    classes = classes or sorted(synsets.words) or sorted(set(by_name.values()))
    numbers = {name: number for number, name in enumerate(classes)}
    found = ImageFiles(str(place), classes)
    found.left_out = images.left_out
    for files in names:
        label = by_name.get(files.stem.rpartition("/")[2])
        if label in numbers:
            found.add(files, numbers[label])
            continue
        why = "has no class in the file of labels" if label is None else f"is of the class {label!r}, which is unknown"
        error = SampleSourceError(f"The image {str(place / files.stem)!r} {why}. Add it there, or leave the image out")
        if on_fault is None:
            raise error
        on_fault(error)
    return found


def class_folders(place: Path) -> list[str]:
    """Return the folders in a folder that are named for synsets, in order."""
    try:
        return sorted(each.name for each in place.iterdir() if WNID.fullmatch(each.name) and each.is_dir())
    except FileNotFoundError:
        return []


def read_synsets(top: Path, labels: str | os.PathLike[str] | None) -> Synsets:
    """Return what the files in the root, or beside the labels, tell of the classes."""
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
    except Exception as error:  # noqa: BLE001  whatever is in the file
        raise SampleSourceError(
            f"{str(path)!r} is not what torchvision writes: {type(error).__name__}: {error}"
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
            f"{str(path)!r} is not that of the development kit: {type(error).__name__}: {error}"
        ) from None


def _label_file(top: Path, split: str, labels: str | os.PathLike[str] | None) -> Path:
    if labels is not None:
        return Path(labels)
    for name in KNOWN_FILES.get(split, ()):
        if (path := top / name).is_file():
            return path
    raise SampleSourceError(
        f"The images of {str(top / split)!r} are in no folders of classes, and no file tells their classes. Put "
        f"LOC_val_solution.csv, meta.bin or {DEVKIT} into {str(top)!r}, or name a file with their labels"
    )


def _read_labels(path: Path, stems: Sequence[str], classes: Sequence[str], synsets: Synsets) -> Mapping[str, str]:
    """Return the classes of images by their names."""
    if path.name == "meta.bin":
        validation = synsets.validation or _torchvision_synsets(path).validation
        return _in_order(path, validation, stems)
    lines = _lines(path)
    if lines and lines[0].lower().startswith("imageid,"):
        return {row[0]: row[1].split()[0] for row in csv.reader(lines[1:]) if len(row) > 1 and row[1].strip()}
    words = [line.split() for line in lines if line.strip()]
    if all(len(each) == 1 for each in words):
        return _in_order(path, [_by_kit(each[0], path, synsets) for each in words], stems)
    known = classes or sorted(synsets.words)
    return {_stem(line[0]): _by_number(line, path, known) for line in words}


def _in_order(path: Path, labels: Sequence[str], stems: Sequence[str]) -> dict[str, str]:
    if len(labels) != len(stems):
        raise SampleSourceError(
            f"{str(path)!r} has the classes of {len(labels)} images, in the order of their names, and there are "
            f"{len(stems)}. Put all of them there"
        )
    return dict(zip(sorted(_stem(stem) for stem in stems), labels, strict=True))


def _by_kit(word: str, path: Path, synsets: Synsets) -> str:
    """Return the class of a line that is a class, or its number in the development kit, from 1."""
    if not word.isdigit():
        return word
    if (name := synsets.numbered.get(int(word))) is None:
        raise SampleSourceError(
            f"{str(path)!r} has the number {word}, and which class that is stands in meta.mat of the development kit. "
            f"Put it beside the file"
        )
    return name


def _by_number(line: Sequence[str], path: Path, classes: Sequence[str]) -> str:
    """Return the class of a line of a file and a class, or its number from 0."""
    if len(line) != 2:
        raise SampleSourceError(f"{str(path)!r} has the line {' '.join(line)!r}, which is not a file and its class")
    if not line[1].isdigit():
        return line[1]
    if not int(line[1]) < len(classes):
        raise SampleSourceError(
            f"{str(path)!r} has the number {line[1]}, and {len(classes)} classes are known, counted from 0. Put "
            f"the folder train, or a file with all classes, into the root"
        )
    return classes[int(line[1])]


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SampleSourceError(f"The file {str(path)!r} cannot be read: {error}") from None
