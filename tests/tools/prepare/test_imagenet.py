"""ImageNet in each form in which it is distributed gives the same samples."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.io
from error_facts import naming

from wds_datapipes import JobOptions, ShardList, create_shards
from wds_datapipes.errors import SampleSourceError
from wds_datapipes.tools.prepare.sources.imagenet import find_imagenet

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")

WNIDS = ["n01440764", "n01443537", "n01484850"]
#: The images of each class, in another order than that of their names.
TRAIN = {name: {f"{name}_{number}.JPEG": f"{name} {number}".encode() for number in (10, 2, 1)} for name in WNIDS}
#: The validation images with their classes.
VAL = dict(
    zip([f"ILSVRC2012_val_0000000{number}" for number in (1, 2, 3, 4)], [WNIDS[i] for i in (2, 0, 2, 1)], strict=True)
)
#: The numbers of classes in the development kit, which are not those of the sorted IDs. Inner nodes have children.
DEVKIT = {1: WNIDS[1], 2: WNIDS[2], 3: WNIDS[0], 4: "n00001740"}
Put = Callable[[Path], None]


def pack(path: Path, files: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def train_archive(root: Path) -> None:
    inner = {f"{name}.tar": pack(root / "inner.tar", TRAIN[name]) for name in reversed(WNIDS)}
    (root / "inner.tar").unlink()
    pack(root / "ILSVRC2012_img_train.tar", inner)


def train_folders(root: Path) -> None:
    put(root / "train", {f"{name}/{image}": content for name in WNIDS for image, content in TRAIN[name].items()})


def kaggle_folders(root: Path) -> None:
    train_folders(root / "ILSVRC/Data/CLS-LOC")


def val_archive(root: Path) -> None:
    pack(root / "ILSVRC2012_img_val.tar", {f"{name}.JPEG": name.encode() for name in reversed(VAL)})


def val_folder(root: Path) -> None:
    put(root / "val", {f"{name}.JPEG": name.encode() for name in VAL})


def kaggle_val(root: Path) -> None:
    val_folder(root / "ILSVRC/Data/CLS-LOC")


def solution(root: Path) -> None:
    lines = [f"{name},{label} 1 2 3 4 {label} 5 6 7 8" for name, label in reversed(VAL.items())]
    (root / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *lines]))


def synset_labels(root: Path) -> None:
    (root / "imagenet_2012_validation_synset_labels.txt").write_text("".join(f"{label}\n" for label in VAL.values()))


def devkit_files() -> dict[str, bytes]:
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    rows = [(number, name, "a fish", int(number == 4)) for number, name in DEVKIT.items()]
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, {"synsets": __import__("numpy").array(rows, kinds)})
    numbers = {name: number for number, name in DEVKIT.items()}
    truth = "".join(f"{numbers[label]}\n" for label in VAL.values()).encode()
    top = "ILSVRC2012_devkit_t12/data"
    return {f"{top}/meta.mat": buffer.getvalue(), f"{top}/ILSVRC2012_validation_ground_truth.txt": truth}


def devkit(root: Path) -> None:
    pack(root / "ILSVRC2012_devkit_t12.tar.gz", devkit_files(), "w:gz")


def unpacked_devkit(root: Path) -> None:
    put(root, devkit_files())


def samples_of(root: Path, split: str, **options: Any) -> list[dict[str, Any]]:
    """Return the samples of the shards of a split, without their place."""
    create_shards(
        find_imagenet(root, split, **options),
        f"{split}-%d.tar",
        num_workers=0,
        job=JobOptions(remove_old=True),
        maxcount=4,
    )
    samples = ShardList(f"{split}-*.tar").load_wds_shards().group_samples().wds_decode(only="cls")
    found = [{name: value for name, value in sample.items() if name in ("__key__", "jpg", "cls")} for sample in samples]
    for path in Path().glob(f"{split}-*.tar"):
        path.unlink()
    return found


@pytest.mark.parametrize("make", [train_archive, train_folders, kaggle_folders])
def test_the_training_images_are_the_same_from_archives_and_folders(make: Put) -> None:
    make(Path("in"))
    found = find_imagenet("in", "train")
    assert (found.classes, len(found)) == (WNIDS, 9)
    samples = samples_of(Path("in"), "train")
    assert [(sample["jpg"].decode(), sample["cls"]) for sample in samples] == [
        (f"{name} {number}", label) for label, name in enumerate(WNIDS) for number in (1, 10, 2)
    ]


@pytest.mark.parametrize("labels", [solution, synset_labels, devkit, unpacked_devkit])
@pytest.mark.parametrize("make", [val_archive, val_folder, kaggle_val])
@pytest.mark.parametrize("train", [None, train_archive])
def test_the_validation_images_have_their_classes(train: Put | None, make: Put, labels: Put) -> None:
    root = Path("in")
    root.mkdir()
    if train is not None:
        train(root)
    make(root)
    labels(root)
    samples = samples_of(root, "val")
    assert samples == [
        {"__key__": name, "jpg": name.encode(), "cls": WNIDS.index(label)} for name, label in VAL.items()
    ]


def test_validation_folders_are_numbered_by_the_classes_of_train() -> None:
    train_archive(Path("in"))
    put(Path("in/val"), {f"{WNIDS[2]}/a.JPEG": b"x"})
    assert [sample["cls"] for sample in samples_of(Path("in"), "val")] == [2]
    put(Path("in/val"), {"n99999999/a.JPEG": b"x"})
    with pytest.raises(SampleSourceError, match=naming("n99999999'", "3 known classes")):
        find_imagenet("in", "val")


def test_test_images_have_no_class() -> None:
    pack(Path("in/ILSVRC2012_img_test_v10102019.tar"), {"test/ILSVRC2012_test_00000001.JPEG": b"x"})
    assert samples_of(Path("in"), "test") == [{"__key__": "test/ILSVRC2012_test_00000001", "jpg": b"x"}]


def test_images_without_a_class_are_errors_or_skipped() -> None:
    root = Path("in")
    train_archive(root)
    val_folder(root)
    solution(root)
    text = (root / "LOC_val_solution.csv").read_text()
    (root / "LOC_val_solution.csv").write_text(text.replace(f"00000001,{WNIDS[2]}", "00000001,n00000000"))
    with pytest.raises(SampleSourceError, match="image 'ILSVRC2012_val_00000001' of 'in/val' has the unknown class"):
        find_imagenet(root, "val")
    put(root / "val", {"extra.JPEG": b"x"})
    faults: list[Exception] = []
    assert len(samples_of(root, "val", on_fault=faults.append)) == 3
    assert [str(fault).partition(" has ")[2][:12] for fault in faults] == ["the unknown ", "no class in "]


def test_damaged_and_missing_files_are_named() -> None:
    root = Path("in")
    root.mkdir()
    with pytest.raises(SampleSourceError, match=naming("'val'", "ILSVRC2012_img_val.tar", "'in'")):
        find_imagenet(root, "val")
    val_archive(root)
    with pytest.raises(SampleSourceError, match=r"no file of labels 'in/LOC_val_solution\.csv'\. Provide LOC_val_sol"):
        find_imagenet(root, "val")
    (root / "labels.txt").write_text(f"{WNIDS[0]}\n")
    with pytest.raises(
        SampleSourceError, match=r"labels\.txt' must have the class, .* of each of the 4 images, .* 1 lines"
    ):
        find_imagenet(root, "val", labels=root / "labels.txt")
    (root / "kit.tar.gz").write_bytes(b"<html>")
    with pytest.raises(SampleSourceError, match=r"development kit 'in/kit\.tar\.gz' cannot be read: .*Fetch it again"):
        find_imagenet(root, "val", labels=root / "kit.tar.gz")
    synset_labels(root)
    found = find_imagenet(root, "val")
    archive = root / "ILSVRC2012_img_val.tar"
    archive.write_bytes(archive.read_bytes()[:1500])
    with pytest.raises(SampleSourceError, match=r"img_val\.tar'.* it ends at byte 1,500, before byte"):
        create_shards(found, "val-%d.tar", num_workers=0)
    with pytest.raises(SampleSourceError, match=r"The archive 'in/ILSVRC2012_img_val\.tar' cannot be read: .*Fetch it"):
        find_imagenet(root, "val")


def test_a_class_that_is_cut_is_not_silently_shorter() -> None:
    root = Path("in")
    root.mkdir()
    inner = {f"{name}.tar": pack(root / "inner.tar", TRAIN[name]) for name in WNIDS}
    pack(root / "ILSVRC2012_img_train.tar", {**inner, f"{WNIDS[1]}.tar": inner[f"{WNIDS[1]}.tar"][:1500]})
    with pytest.raises(SampleSourceError, match=r"img_train\.tar' cannot be read: it is cut or damaged at byte"):
        find_imagenet(root, "train")
