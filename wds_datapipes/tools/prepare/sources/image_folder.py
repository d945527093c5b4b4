"""Samples from folders of images, with or without classes."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from wds_datapipes.errors import EmptySourceError, SampleSourceError
from wds_datapipes.hints import ENDINGS, NO_CLASSES
from wds_datapipes.on_error.policy import raise_error
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.tools.prepare.sample_spec import FilePart, Part, SampleSpec, make_spec

#: The default file extensions of images.
IMAGE_ENDINGS = (
    *("avif", "bmp", "gif", "heic", "heif", "hif", "jpeg", "jpg"),
    *("jxl", "pgm", "png", "ppm", "tif", "tiff", "webp"),
)

Faults: TypeAlias = Callable[[Exception], object]
"""A handler that raises or records errors."""

Files: TypeAlias = tuple[str, tuple[str, ...]]
"""The files of one sample: their common path without an extension, and their extensions."""


class ImageFiles:
    """Image files, each with a class number if there are classes.

    Args:
        root: the folder that all paths are relative to.
        classes: the names of the classes in the order of their numbers; ``None`` if there are none.

    Attributes:
        files: the files of all samples in order, relative to the root.
        left_out: the number of ignored files, by extension.
        joined: the samples of several images whose names all have another dot, and may be samples of their own.
    """

    def __init__(self, root: str, classes: Sequence[str] | None) -> None:
        self.root = root
        self.classes = None if classes is None else list(classes)
        self.left_out: Counter[str] = Counter()
        self.files: list[Files] = []
        self.joined: list[Files] = []
        self._labels = array("l")

    def add(self, files: Files, label: int = -1) -> None:
        """Add a sample."""
        self.files.append(files)
        self._labels.append(label)

    def set_label(self, number: int, label: int) -> None:
        """Set the class of a sample."""
        self._labels[number] = label

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep only some samples."""
        self.files = [self.files[number] for number in numbers]
        self._labels = array("l", (self._labels[number] for number in numbers))

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.files)

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each sample.

        Raises:
            EmptySourceError: there are none.
        """
        if not self.files:
            others = "".join(f", {ending} {count:,}" for ending, count in sorted(self.left_out.items()))
            raise EmptySourceError(
                f"The folder {self.root!r} has no image{f' (others: {others[2:]})' if others else ''}. For files with "
                "other extensions, ",
                ENDINGS,
            )
        for (stem, endings), label in zip(self.files, self._labels, strict=True):
            paths = [os.path.join(self.root, f"{stem}.{ending}") for ending in endings]  # noqa: PTH118  faster than Path
            fields: list[tuple[str, Part]] = [
                (field_of(ending), FilePart(path)) for ending, path in zip(endings, paths, strict=True)
            ]
            if self.classes is not None:
                fields.append(("cls", b"%d" % label))
            try:
                yield make_spec(stem, fields, paths[0], f"the sample of {paths[0]!r}")
            except SampleSourceError as error:
                yield error


def find_images(
    root: str | os.PathLike[str],
    *,
    has_classes: bool = True,
    classes: Sequence[str] | None = None,
    endings: Collection[str] = IMAGE_ENDINGS,
    key_rule: KeyRule | None = None,
    on_fault: Faults = raise_error,
) -> ImageFiles:
    """Find images in a folder with one subfolder per class, including nested folders.

    Classes are numbered from 0 by sorted name and files are ordered as in ``torchvision.datasets.ImageFolder``. Hidden
    files and folders are ignored. Links are followed.

    Args:
        root: the folder.
        has_classes: whether the subfolders are classes; if not, samples have no class.
        classes: the names of all classes in the order of their numbers, if some may have no folder.
        endings: the file extensions of images.
        key_rule: group all files with the same key into one sample, which must contain an image. By default, each image
            is a sample.
        on_fault: called with the error of a class or sample, which is then skipped; by default, errors are raised.

    Raises:
        SampleSourceError: a folder cannot be read or is not one of the classes, links form a loop, a class has no
            image, or an image no class.
    """
    top = os.fspath(root)
    wanted = {ending.lower().lstrip(".") for ending in endings}
    [(_, folders, files)] = _walk_folder(top, "", deep=False)
    numbers = {name: number for number, name in enumerate(folders if classes is None else classes)}
    if has_classes and (unknown := [name for name in folders if name not in numbers]):
        raise SampleSourceError(
            f"The folder {f'{top}/{unknown[0]}'!r} is not one of the {len(numbers)} known classes. Remove or list it"
        )
    found = ImageFiles(top, list(numbers) if has_classes else None)
    select = partial(_select_files, wanted=wanted, key_rule=key_rule, found=found, fault=on_fault)
    for stem, some in select("", files) if has_classes else ():
        raise SampleSourceError(
            f"The image {f'{top}/{stem}.{some[0]}'!r} is not in the folder of a class. Move it to one, or, if the "
            "folders are not classes, ",
            NO_CLASSES,
        )
    for name in folders if has_classes else [""]:
        before = len(found)
        for path, _, names in sorted(_walk_folder(top, name)):
            for each in select(path, names):
                found.add(each, numbers.get(name, -1))
        if has_classes and len(found) == before:
            on_fault(
                SampleSourceError(
                    f"The folder {f'{top}/{name}'!r} of the class {name!r} has no image ({', '.join(sorted(wanted))}). "
                    "Remove it, or, for files with other extensions, ",
                    ENDINGS,
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


def _select_files(
    folder: str,
    names: Iterable[str],
    *,
    wanted: Collection[str],
    key_rule: KeyRule | None,
    found: ImageFiles,
    fault: Faults,
) -> Iterator[Files]:
    """Yield the samples of one folder and count the other files."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(names):
        stem, dot, ending = name.rpartition(".")
        if key_rule is not None:
            stem, ending = key_rule(name) or ("", ending)
        if stem and dot and (key_rule is not None or ending.lower() in wanted):
            stem = f"{folder}/{stem}" if folder else stem
            if key_rule is None:
                yield stem, (ending,)
            else:
                grouped.setdefault(stem, []).append(ending)
        else:
            found.left_out[f".{ending.lower()}" if dot else "without an ending"] += 1
    for stem, some in grouped.items():
        images = [ending for ending in some if ending.lower().rpartition(".")[2] in wanted]
        if images:
            if len(images) > 1 and all("." in ending for ending in images):
                found.joined.append((stem, tuple(images)))
            yield stem, tuple(some)
        else:
            path = f"{found.root}/{stem}.{some[0]}"
            fault(SampleSourceError(f"The sample of {path!r} has no image. Add one"))


def _walk_folder(top: str, folder: str, *, deep: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield a folder and its nested folders, relative to the top, with their subfolders and files; skip hidden ones."""
    for path, folders, files in os.walk(os.path.join(top, folder), onerror=_raise_unreadable, followlinks=True):  # noqa: PTH118  faster than Path
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        relative = "" if path == os.path.join(top, "") else os.path.relpath(path, top)  # noqa: PTH118  as above
        yield "" if relative == "." else relative, list(folders), [name for name in files if not name.startswith(".")]
        if not deep:
            return
        for name in folders:
            below = f"{path}/{name}"
            if Path(below).is_symlink() and Path(below).resolve() in map(
                Path.resolve, (Path(path), *Path(path).parents)
            ):
                raise SampleSourceError(f"The folder {below!r} is a link to one of its parent folders. Remove it")


def _raise_unreadable(error: OSError) -> None:
    raise SampleSourceError(f"The folder {error.filename.rstrip('/')!r} cannot be read: {error.strerror}") from None
