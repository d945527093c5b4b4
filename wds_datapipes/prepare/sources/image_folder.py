"""Samples from folders of images, with or without classes."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.prepare.sample_spec import FilePart, Part, SampleSpec
from wds_datapipes.samples.keys import KeyRule

#: The default file extensions of images.
IMAGE_ENDINGS = ("bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp")

Faults = Callable[[Exception], object]
"""A handler of errors, which raises or records them."""


class Files(NamedTuple):
    """The files of one sample: their common path without extension, and their extensions."""

    stem: str
    endings: tuple[str, ...]


class ImageFiles:
    """Image files, each with the number of its class if there are classes.

    Args:
        root: the folder of all paths.
        classes: the names of the classes, in the order of their numbers; ``None`` if there are none.
        name_field: the field for the name of the class, or an empty string.

    Attributes:
        classes: the names of the classes.
        files: the files of all samples, in order.
        name_field: the field for the name of the class.
        words: human-readable names of the classes, if known.
        left_out: the number of files without images, by extension.
    """

    def __init__(self, root: str, classes: Sequence[str] | None, *, name_field: str = "") -> None:
        self._root, self.name_field = root, name_field
        self.classes = None if classes is None else list(classes)
        self.words: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.files: list[Files] = []
        self._labels = array("l")

    def add(self, files: Files, label: int = -1) -> None:
        """Add a sample; its stem is relative to the root."""
        self.files.append(files)
        self._labels.append(label)

    def numbered_by(self, classes: Sequence[str]) -> ImageFiles:
        """Return the same images with classes numbered by a longer list.

        Raises:
            SampleSourceError: the list lacks a class.
        """
        paths = {name: number for number, name in enumerate(classes)}
        if unknown := [name for name in self.classes or () if name not in paths]:
            raise SampleSourceError(
                f"The folder {os.path.join(self._root, unknown[0])!r} is not one of the {len(classes)} known "  # noqa: PTH118  strings
                f"classes. Remove it, or add it to them"
            )
        numbers = [paths[name] for name in self.classes or ()]
        found = ImageFiles(self._root, classes, name_field=self.name_field)
        found.left_out = self.left_out
        for files, label in zip(self.files, self._labels, strict=True):
            found.add(files, numbers[label])
        return found

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.files)

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each sample."""
        for files, label in zip(self.files, self._labels, strict=True):
            try:
                yield self._spec(files, label)
            except SampleSourceError as error:  # noqa: PERF203  two files are for the same field
                yield error

    def _spec(self, files: Files, label: int) -> SampleSpec:
        stem, endings = files
        paths = [os.path.join(self._root, f"{stem}.{ending}") for ending in endings]  # noqa: PTH118  faster than Path
        parts: dict[str, Part] = {}
        for ending, path in zip(endings, paths, strict=True):
            self._put(parts, field_of(ending), FilePart(path), paths[0])
        if self.classes is not None:
            self._put(parts, "cls", b"%d" % label, paths[0])
            if self.name_field:
                name = (self.words or self.classes)[label]
                self._put(parts, self.name_field, _utf8(name, paths[0]), paths[0])
        return SampleSpec(stem, parts, paths[0])

    @staticmethod
    def _put(parts: dict[str, Part], field: str, part: Part, location: str) -> None:
        if field in parts:
            raise SampleSourceError(
                f"The sample of {location!r} would have two fields {field!r}. Rename one of its files"
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
    """Find images in a folder with one subfolder per class, including all folders below.

    Classes are numbered from 0 by sorted name, and files are ordered, as in ``torchvision.datasets.ImageFolder``.
    Hidden files and folders are ignored. Links are followed.

    Args:
        root: the folder.
        has_classes: whether folders are classes; otherwise, samples have no class.
        endings: the file extensions of images.
        key_rule: group all files with the same key into one sample, which must have an image. By default, each image is
            a sample.
        name_field: the field for the name of the class.
        on_fault: called with the error of a class or sample, which is then skipped; by default, errors are raised.

    Raises:
        SampleSourceError: a folder cannot be read, links form a loop, a class has no image, or an image no class.
    """
    top = os.fspath(root)
    fault = _raise_fault if on_fault is None else on_fault
    folders, files = _list_folder(top)
    found = ImageFiles(top, folders if has_classes else None, name_field=name_field)
    choose = _Selector(
        top, frozenset(ending.lower().lstrip(".") for ending in endings), key_rule, found.left_out, fault
    )
    if not has_classes:
        for each in choose.below(""):
            found.add(each)
        return found
    for stray in choose.samples("", files):
        raise SampleSourceError(
            f"The image {_describe_path(top, stray)!r} is not in the folder of a class. Move it to one; or, if the "
            f"folders are not classes, say so: has_classes=False, or --no-classes"
        )
    for label, name in enumerate(folders):
        before = len(found)
        for each in choose.below(name):
            found.add(each, label)
        if len(found) == before:
            fault(
                SampleSourceError(
                    f"The folder {os.path.join(top, name)!r} of the class {name!r} has no image "  # noqa: PTH118  texts
                    f"({', '.join(sorted(choose.endings))}). Remove it, or name the extensions of its files"
                )
            )
    return found


def field_of(ending: str) -> str:
    """Return the field for a file extension; ``jpeg`` becomes ``jpg``.

    >>> field_of("JPEG"), field_of("PNG"), field_of("seg.png")
    ('jpg', 'png', 'seg.png')
    """
    field = ending.lower()
    return "jpg" if field == "jpeg" else field


class _Selector(NamedTuple):
    """Selects the files of samples."""

    top: str
    endings: frozenset[str]
    key_rule: KeyRule | None
    left_out: Counter[str]
    fault: Faults

    def below(self, folder: str) -> Iterator[Files]:
        """Yield the samples of a folder, recursively."""
        for path, names in sorted(_walk_folder(self.top, folder, ())):
            yield from self.samples(path, names)

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
                self.fault(SampleSourceError(f"The sample of {path!r} has no image. Add one"))


def _list_folder(path: str) -> tuple[list[str], list[str]]:
    """Return the names of the subfolders and files of a folder, without hidden ones."""
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
    except OSError:  # a circular link, which is reported when its file is measured
        return False


def _walk_folder(top: str, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and all folders below it, each with the names of its files."""
    path = os.path.join(top, folder)  # noqa: PTH118  faster than Path
    folders, files = _list_folder(path)
    found = os.stat(path)  # noqa: PTH116  a string
    here = (found.st_dev, found.st_ino)
    if here in above:
        raise SampleSourceError(f"The folder {path!r} is a link to one of its parents. Remove the link")
    yield folder, files
    for name in folders:
        yield from _walk_folder(top, f"{folder}/{name}" if folder else name, (*above, here))


def _describe_path(top: str, files: Files) -> str:
    return os.path.join(top, f"{files.stem}.{files.endings[0]}")  # noqa: PTH118  faster than Path


def _utf8(name: str, location: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise SampleSourceError(f"The class of {location!r} has a name that is not UTF-8. Rename its folder") from None


def _raise_fault(error: Exception) -> None:
    raise error
