"""Samples of ImageNet as it is distributed: archives or folders of its own site, of torchvision and of Kaggle."""

from __future__ import annotations

import csv
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.extras import require
from wds_datapipes.on_error.policy import raise_error
from wds_datapipes.tools.prepare.sample_spec import FilePart, SampleSpec
from wds_datapipes.tools.prepare.sources.image_folder import Faults, ImageFiles, find_images

ENDINGS = ("jpeg", "jpg", "png")
#: The folder of Kaggle's archive that contains the splits.
KAGGLE = "ILSVRC/Data/CLS-LOC"
#: Names of files with the classes of the validation images, in the order in which they are looked for.
LABELS = (
    "LOC_val_solution.csv",
    "ILSVRC2012_devkit_t12.tar.gz",
    "ILSVRC2012_devkit_t12",
    "imagenet_2012_validation_synset_labels.txt",
)
_IS_CLASS = re.compile(r"n\d{8}").fullmatch


class ArchivedImages(ImageFiles):
    """Images in a tar archive, which are read from it by their offsets."""

    def __init__(self, root: str, classes: Sequence[str] | None) -> None:
        super().__init__(root, classes)
        self._spans: list[tuple[int, int]] = []

    def add_span(self, name: str, span: tuple[int, int], label: int) -> None:
        """Add the image at an offset, with its size in bytes."""
        stem, _, ending = name.rpartition(".")
        self.add((stem, (ending,)), label)
        self._spans.append(span)

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep only some samples."""
        super().keep(numbers)
        self._spans = [self._spans[number] for number in numbers]

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each sample."""
        for spec, (offset, size) in zip(super().__iter__(), self._spans, strict=True):
            if isinstance(spec, Exception):
                yield spec
                continue
            parts = {field: part for field, part in spec.parts.items() if isinstance(part, bytes)}
            [field] = spec.parts.keys() - parts
            yield SampleSpec(
                spec.key,
                {field: FilePart(self.root, offset, size), **parts},
                f"the sample {spec.key!r} of {self.root!r}",
            )


def find_imagenet(
    root: str | Path, split: str, *, labels: str | Path | None = None, on_fault: Faults = raise_error
) -> ImageFiles:
    """Find the images of a split, with the numbers of their classes.

    The root contains the split as ``ILSVRC2012_img_train.tar``, an archive with one archive for each class, or
    ``ILSVRC2012_img_val.tar``; or as a folder ``train`` or ``val``, also below `KAGGLE`, with a folder for each class,
    or with images. Classes are numbered by their sorted IDs (``n01440764`` is 0), as in torchvision: those of the
    training images, even if another split lacks some. Images of the split ``test`` have no class.

    Args:
        root: the folder.
        split: ``"train"``, ``"val"`` or ``"test"``.
        labels: the classes of images that are not in folders: ``LOC_val_solution.csv`` of Kaggle; the development kit
            ``ILSVRC2012_devkit_t12``, packed or not, which requires the extra ``imagenet``; or a file with the class of
            the n-th image in line n. By default, a file of the root; see `LABELS`.
        on_fault: called with the error of an image, which is then skipped; by default, errors are raised.

    Raises:
        SampleSourceError: a file or folder does not exist or cannot be read, or an image has no class.
        MissingDependencyError: the development kit needs SciPy, which is not installed.
    """
    top = Path(root)
    folder, archive = _find_split(top, split)
    if split == "test":
        return _images_of(folder, archive)
    classes = _training_classes(top)
    if archive is not None and split == "train":
        return _read_training_archive(archive, on_fault)
    if folder is not None and _class_folders(folder):
        return find_images(folder, classes=classes or _class_folders(folder), endings=ENDINGS, on_fault=on_fault)
    images = _images_of(folder, archive)
    by_name = _read_labels(top, labels, sorted(stem for stem, _ in images.files))
    numbers = {name: number for number, name in enumerate(classes or sorted({*by_name.values()}))}
    images.classes = list(numbers)
    known: list[int] = []
    for number, (stem, _) in enumerate(images.files):
        label = by_name.get(stem.rpartition("/")[2], "")
        if label in numbers:
            images.set_label(number, numbers[label])
            known.append(number)
            continue
        problem = f"has the unknown class {label!r}" if label else "has no class in the file of labels"
        on_fault(
            SampleSourceError(f"The image {stem!r} of {images.root!r} {problem}. Add it there, or remove the image")
        )
    images.keep(known)
    return images


def _find_split(top: Path, split: str) -> tuple[Path | None, Path | None]:
    """Return the folder of a split, or else its archive."""
    folders = [folder for folder in (top / split, top / KAGGLE / split) if folder.is_dir()]
    archives = sorted(top.glob(f"ILSVRC2012_img_{split}*.tar"))
    if not folders and not archives:
        raise SampleSourceError(
            f"There is neither a folder {split!r} nor an archive ILSVRC2012_img_{split}.tar in {str(top)!r}. Name the "
            "folder that contains train and val, or the archives of ImageNet"
        )
    return (folders[0], None) if folders else (None, archives[0])


def _training_classes(top: Path) -> list[str]:
    """Return the IDs of all classes, sorted, or an empty list if there are no training images."""
    try:
        folder, archive = _find_split(top, "train")
    except SampleSourceError:
        return []
    if folder is not None:
        return _class_folders(folder)
    return [name for name, *_ in _class_archives(cast(Path, archive))]


def _class_folders(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if _IS_CLASS(each.name) and each.is_dir())


def _images_of(folder: Path | None, archive: Path | None) -> ImageFiles:
    """Return the images of a folder or an archive, without classes."""
    if folder is not None:
        return find_images(folder, has_classes=False, endings=ENDINGS)
    found = ArchivedImages(str(archive), None)
    with _open(cast(Path, archive)) as file:
        _add_images(found, _members(file))
    return found


def _read_training_archive(archive: Path, on_fault: Faults) -> ImageFiles:
    """Return the images of an archive that has an archive for each class."""
    packed = _class_archives(archive)
    found = ArchivedImages(str(archive), [name for name, *_ in packed])
    with _open(archive) as file:
        for label, (name, offset, size) in enumerate(packed):
            before = len(found)
            file.seek(offset)
            _add_images(found, _members(file, offset + size), label)
            if len(found) == before:
                on_fault(SampleSourceError(f"The archive {name}.tar in {str(archive)!r} has no image. Fetch it again"))
    return found


def _class_archives(archive: Path) -> list[tuple[str, int, int]]:
    """Return the IDs of the classes in the training archive, sorted, with the offsets and sizes of their archives."""
    with _open(archive) as file:
        members = [each for each in _members(file) if each.name.endswith(".tar")]
    named = [(Path(each.name).stem, each.offset_data, each.size) for each in members]
    return sorted(each for each in named if _IS_CLASS(each[0]))


def _add_images(found: ArchivedImages, members: Iterable[tarfile.TarInfo], label: int = -1) -> None:
    images = [each for each in members if each.isfile() and each.name.rpartition(".")[2].lower() in ENDINGS]
    for each in sorted(images, key=lambda image: str(image.name)):  # as in folders
        found.add_span(each.name.removeprefix("./"), (each.offset_data, each.size), label)


@contextmanager
def _open(archive: Path) -> Iterator[BinaryIO]:
    try:
        with archive.open("rb") as file:
            yield file
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SampleSourceError(f"The archive {str(archive)!r} cannot be read: {reason}. Fetch it again") from None


def _members(file: BinaryIO, limit: int | None = None) -> list[tarfile.TarInfo]:
    """Return the members of the archive at the position of a file, found by their headers.

    Args:
        file: a file with an archive, or with an archive in an archive.
        limit: where an inner archive ends, in bytes.

    Raises:
        tarfile.ReadError: the archive is cut or damaged, where tarfile would end without an error.
    """
    with tarfile.open(fileobj=file, mode="r:") as archive:
        members = archive.getmembers()
        end = archive.offset
    file.seek(end)
    if (limit is not None and end >= limit) or file.read(512) != bytes(512):
        raise tarfile.ReadError(f"it is cut or damaged at byte {end:,}")
    return members


def _read_labels(top: Path, labels: str | Path | None, images: Sequence[str]) -> dict[str, str]:
    """Return a mapping of the names of images to IDs of classes."""
    places = [top / name for name in LABELS] if labels is None else [Path(labels)]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise SampleSourceError(
            f"The images are not in folders of classes, and there is no file of labels {str(places[0])!r}. Provide "
            f"{', '.join(LABELS[:2])} or {LABELS[3]}"
        )
    if path.is_dir() or path.name.endswith((".tar.gz", ".tgz", ".tar")):
        lines = _devkit_labels(path)
    else:
        text = _text_of(path, path.read_bytes)
        if text[:1] and text[0].lower().startswith("imageid,"):
            return {row[0]: row[1].split()[0] for row in csv.reader(text[1:]) if len(row) > 1 and row[1].strip()}
        lines = [line.split()[0] for line in text if line.strip()]
    names = [name.rpartition("/")[2] for name in images]
    if len(lines) != len(names) or not all(map(_IS_CLASS, lines)):
        raise SampleSourceError(
            f"{str(path)!r} must have the class, such as n01440764, of each of the {len(names):,} images, in the order "
            f"of their names, but it has {len(lines):,} lines"
        )
    return dict(zip(names, lines, strict=True))


def _devkit_labels(path: Path) -> list[str]:
    """Return the ID of the class of each validation image, from the development kit."""
    truth, meta = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
    read = partial(_read_devkit, path)
    scipy_io = require("scipy.io", extra="imagenet", purpose="read the classes of ImageNet's development kit")
    matrices, lines = read(meta), _text_of(path / truth, partial(read, truth))
    try:
        synsets = scipy_io.loadmat(BytesIO(matrices), squeeze_me=True)["synsets"]
        ids = {int(each["ILSVRC2012_ID"]): str(each["WNID"]) for each in synsets if int(each["num_children"]) == 0}
        return [ids[int(line)] for line in lines if line.strip()]
    except (ValueError, LookupError, TypeError) as error:
        raise SampleSourceError(
            f"{str(path)!r} is not the development kit of ImageNet 2012: {type(error).__name__}: {error}"
        ) from None


def _read_devkit(path: Path, name: str) -> bytes:
    """Return a file of the development kit, which is a folder or an archive."""
    try:
        if path.is_dir():
            return (path / "data" / name).read_bytes()
        with tarfile.open(path) as archive:
            member = next((each for each in archive if each.name.rpartition("/")[2] == name), None)
            if member is None:
                raise KeyError(f"it has no file {name}")
            return cast(BinaryIO, archive.extractfile(member)).read()
    except (OSError, tarfile.TarError, KeyError) as error:
        reason = getattr(error, "strerror", None) or str(error.args[0]).partition("\n")[0].rstrip(":")
        raise SampleSourceError(f"The development kit {str(path)!r} cannot be read: {reason}. Fetch it again") from None


def _text_of(path: Path, read: Any) -> list[str]:
    try:
        lines: list[str] = read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SampleSourceError(f"The file {str(path)!r} cannot be read: {error}") from None
    return lines
