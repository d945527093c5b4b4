"""Folders of images, with or without classes."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.prepare.sample_spec import FilePart, Part, SampleSpec
from wds_datapipes.samples.keys import KeyRule

__all__ = ["IMAGE_ENDINGS", "Faults", "Files", "ImageFiles", "find_images"]

#: The ends of names that are images, if nothing else is said.
IMAGE_ENDINGS = ("bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp")

Faults = Callable[[Exception], object]
"""Is called with what is wrong, and raises it or takes note."""


class Files(NamedTuple):
    """The files of one sample: their path without what tells them apart, and the ends of their names."""

    stem: str
    endings: tuple[str, ...]


class ImageFiles:
    """Images that were found, each with the number of its class, if there are classes.

    Args:
        root: what all paths begin with.
        classes: the names of the classes, in the order of their numbers; ``None`` if there are none.
        name_field: a field for the name of the class, or nothing.

    Attributes:
        classes: the same.
        name_field: the same.
        words: what the classes are called by people, if that is known.
        left_out: how many files of other kinds there were, by the ends of their names.
    """

    def __init__(self, root: str, classes: Sequence[str] | None, *, name_field: str = "") -> None:
        self._root, self.name_field = root, name_field
        self.classes = None if classes is None else list(classes)
        self.words: list[str] = []
        self.left_out: Counter[str] = Counter()
        self._stems: list[str] = []
        self._endings: list[tuple[str, ...]] = []
        self._labels = array("l")
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def add(self, files: Files, label: int = -1) -> None:
        """Take a sample; its stem is as it is from the root."""
        self._stems.append(files.stem)
        self._endings.append(self._known.setdefault(files.endings, files.endings))  # there are few of them
        self._labels.append(label)

    @property
    def files(self) -> Iterator[Files]:
        """What was added, in its order."""
        return map(Files, self._stems, self._endings)

    def numbered_by(self, classes: Sequence[str]) -> ImageFiles:
        """Return the same images, their classes numbered as they are in a longer list.

        Raises:
            SampleSourceError: it lacks a class.
        """
        places = {name: number for number, name in enumerate(classes)}
        if unknown := [name for name in self.classes or () if name not in places]:
            raise SampleSourceError(
                f"The folder {os.path.join(self._root, unknown[0])!r} is none of the {len(classes)} classes that are "  # noqa: PTH118  texts
                f"known. Remove it, or add it to these"
            )
        numbers = [places[name] for name in self.classes or ()]
        found = ImageFiles(self._root, classes, name_field=self.name_field)
        found.left_out = self.left_out
        for files, label in zip(self.files, self._labels, strict=True):
            found.add(files, numbers[label])
        return found

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._stems)

    def draft(self, number: int) -> SampleSpec:
        """Return what a sample is to be made of.

        Raises:
            SampleSourceError: two of its files are for one field.
        """
        stem, endings = self._stems[number], self._endings[number]
        paths = [os.path.join(self._root, f"{stem}.{ending}") for ending in endings]  # noqa: PTH118  many of them
        parts: dict[str, Part] = {}
        for ending, path in zip(endings, paths, strict=True):
            self._put(parts, field_of(ending), FilePart(path), paths[0])
        if self.classes is not None:
            label = self._labels[number]
            self._put(parts, "cls", b"%d" % label, paths[0])
            if self.name_field:
                called = (self.words or self.classes)[label]
                self._put(parts, self.name_field, _utf8(called, paths[0]), paths[0])
        return SampleSpec(stem, parts, paths[0])

    def close(self) -> None:
        """There is nothing open."""

    @staticmethod
    def _put(parts: dict[str, Part], field: str, part: Part, origin: str) -> None:
        if field in parts:
            raise SampleSourceError(
                f"The sample of {origin!r} would have the field {field!r} twice. Give a file another name"
            )
        parts[field] = part


def find_images(
    root: str | os.PathLike[str],
    *,
    has_classes: bool = True,
    endings: Collection[str] = IMAGE_ENDINGS,
    key_rule: KeyRule | None = None,
    name_field: str = "",
    on_fault: Faults | None = None,
) -> ImageFiles:
    """Look for images: each folder in the root is a class, with all that is in it and in folders below.

    Classes are numbered by their names in order, from 0, as ``torchvision.datasets.ImageFolder`` does, and files come
    in its order too. Hidden files and folders are left out. Links are followed.

    Args:
        root: the folder.
        has_classes: whether folders are classes; otherwise, all images are samples without one.
        endings: which ends of names are images.
        key_rule: take all files whose names have the same key as the fields of one sample, which has to have an image.
            Without it, each image is a sample.
        name_field: a field for the name of the class.
        on_fault: called with what is wrong with a class or a sample, which is then left out; otherwise it is raised.

    Raises:
        SampleSourceError: a folder cannot be read, links form a loop, a class has no image, or an image no class.
    """
    top = os.fspath(root)
    fault = _raise_fault if on_fault is None else on_fault
    folders, files = _list_folder(top)
    found = ImageFiles(top, folders if has_classes else None, name_field=name_field)
    choose = _Chosen(top, frozenset(ending.lower().lstrip(".") for ending in endings), key_rule, found.left_out, fault)
    if not has_classes:
        for each in choose.below(""):
            found.add(each)
        return found
    for stray in choose.samples("", files):
        raise SampleSourceError(
            f"The image {_describe_path(top, stray)!r} is in no folder of a class. Put it into one; or, if the "
            f"folders are no classes, say so"
        )
    for label, name in enumerate(folders):
        before = len(found)
        for each in choose.below(name):
            found.add(each, label)
        if len(found) == before:
            fault(
                SampleSourceError(
                    f"The folder {os.path.join(top, name)!r} of the class {name!r} has no image "  # noqa: PTH118  texts
                    f"({', '.join(sorted(choose.endings))}). Remove it, or say which ends the names of its files have"
                )
            )
    return found


def field_of(ending: str) -> str:
    """Return the field for a file: all JPEG files have the same.

    >>> field_of("JPEG"), field_of("PNG"), field_of("seg.png")
    ('jpg', 'png', 'seg.png')
    """
    field = ending.lower()
    return "jpg" if field == "jpeg" else field


class _Chosen(NamedTuple):
    """Chooses files that are samples."""

    top: str
    endings: frozenset[str]
    key_rule: KeyRule | None
    left_out: Counter[str]
    fault: Faults

    def below(self, folder: str) -> Iterator[Files]:
        """Yield the samples of a folder and all folders in it."""
        for place, names in sorted(_walk_folder(self.top, folder, ())):
            yield from self.samples(place, names)

    def samples(self, folder: str, names: Iterable[str]) -> Iterator[Files]:
        """Yield the samples of one folder."""
        grouped: dict[str, list[str]] = {}
        for name in sorted(names):
            stem, dot, ending = name.rpartition(".")
            if self.key_rule is not None:
                stem, ending = self.key_rule(name) or ("", ending)
            if stem and dot and (self.key_rule is not None or ending.lower() in self.endings):
                stem = f"{folder}/{stem}" if folder else stem
                if self.key_rule is None:
                    yield Files(stem, (ending,))
                else:
                    grouped.setdefault(stem, []).append(ending)
            else:
                self.left_out[f".{ending.lower()}" if dot else "without an ending"] += 1
        for stem, found in grouped.items():
            if any(ending.lower().rpartition(".")[2] in self.endings for ending in found):
                yield Files(stem, tuple(found))
            else:
                path = _describe_path(self.top, Files(stem, tuple(found)))
                self.fault(SampleSourceError(f"No file beside {path!r} is the image of that sample. Put it there"))


def _list_folder(path: str) -> tuple[list[str], list[str]]:
    """Return the folders in a folder, and its other files, by name, without hidden ones."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as error:
        raise SampleSourceError(f"The folder {path!r} cannot be read: {error.strerror}") from None
    return sorted(folders), files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is told when its file is looked at
        return False


def _walk_folder(top: str, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder, and all folders in it, each with the names of its files."""
    path = os.path.join(top, folder)  # noqa: PTH118  many of them
    folders, files = _list_folder(path)
    found = os.stat(path)  # noqa: PTH116  it is a text
    here = (found.st_dev, found.st_ino)
    if here in above:
        raise SampleSourceError(f"The folder {path!r} is a link to one that it is in. Remove the link")
    yield folder, files
    for name in folders:
        yield from _walk_folder(top, f"{folder}/{name}" if folder else name, (*above, here))


def _describe_path(top: str, files: Files) -> str:
    return os.path.join(top, f"{files.stem}.{files.endings[0]}")  # noqa: PTH118  the same


def _utf8(name: str, origin: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise SampleSourceError(
            f"The class of {origin!r} has a name that is no UTF-8. Give its folder another name"
        ) from None


def _raise_fault(error: Exception) -> None:
    raise error
