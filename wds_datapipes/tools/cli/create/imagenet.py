"""The command ``create imagenet``: create shards from ImageNet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.tools.cli.create.files import INPUT, CreateArguments, create_from
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.values import FileOrUrl, metavar
from wds_datapipes.tools.prepare.sample_spec import Source
from wds_datapipes.tools.prepare.sources.image_folder import Faults


def imagenet(
    folder: FileOrUrl,
    /,
    *,
    split: Annotated[str, metavar("NAME", group=INPUT)] = "train",
    labels: Annotated[Path | None, metavar("FILE", group=INPUT)] = None,
    options: CreateArguments,
) -> None:
    """Create shards from ImageNet, packed or not.

    The folder has the archives ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, or the folders train and val of
    torchvision or Kaggle. Archives are not unpacked. Samples have the fields jpg and cls, whose numbers are those of
    torchvision. Keys are numbers, or the names of the files with --rekey '{name}'.

    Args:
        folder: The folder with the archives, or with train and val.
        split: train, val or test; images of test have no class.
        labels: The classes of val, if they are not in the folder: LOC_val_solution.csv, the development kit, or
            a file with a class in each line.
    """
    if split not in ("train", "val", "test"):
        raise WrongUse(f"--split must be train, val or test, not {split!r}")
    if (path := local_path(folder)) is None:
        raise WrongUse(f"{redact(folder)!r} is not a local folder. Use create recipe for files in a store")

    def find(on_fault: Faults) -> Source:
        from wds_datapipes.tools.prepare.sources.imagenet import find_imagenet

        return find_imagenet(path, split, labels=labels, on_fault=on_fault)

    create_from(find, replace(options, rekey=options.rekey or "{number:07d}"))
