"""The commands ``create images``, ``imagenet`` and ``recipe``: create shards from files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wds_datapipes.errors import MissingSidecarError, plural
from wds_datapipes.index.format.manifest import Manifest, write_manifest
from wds_datapipes.io.compression.formats import strip_shard_suffix
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.sidecars import read_sidecar, write_sidecar
from wds_datapipes.tools.cli.copy import WriteArguments
from wds_datapipes.tools.cli.docstring_options import Natural
from wds_datapipes.tools.cli.printing import print_error, report_shards
from wds_datapipes.tools.cli.program import WrongUse, printable
from wds_datapipes.tools.cli.shared_options import SampleArguments, load_function, parse_decoders, wrong_use
from wds_datapipes.tools.prepare.create import create_shards
from wds_datapipes.tools.prepare.job_options import JobOptions
from wds_datapipes.tools.prepare.sample_spec import Source
from wds_datapipes.tools.prepare.sources.image_folder import IMAGE_ENDINGS, Faults, ImageFiles, find_images
from wds_datapipes.tools.prepare.sources.listing import Recipe
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_names import NUMBER


@dataclass(frozen=True, kw_only=True)
class CreateArguments(WriteArguments, SampleArguments):
    """The options of all ``create`` commands.

    Input:
        --classes-from FILE: Number the classes as in this list, written for another split.
        --root-dir DIR: The folder for relative paths.

    Options:
        --output, -o TARGET: Files or URLs with %06d for the shard number; without it, one archive; 'pipe:COMMAND' or -.
        --manifest FILE: Write a manifest of all shards, with their SHA-256.
        --resume: Keep a journal and write only missing shards.
        --journal FILE: The journal for shards that are not local.
        --num-workers NUMBER: The number of processes, by default one per CPU; 0 uses this process.

    Order and keys:
        --shuffle: Shuffle the samples.
        --seed NUMBER: The seed for --shuffle.
        --rekey PATTERN: The pattern of new keys, with {number}, {key} and {name}, such as '{number:08d}'.

    User function:
        --function, -f MODULE:FUNCTION: A function that maps a sample to a sample, None or several samples.
        --decode, -d WORD: Decode fields first: basic, or also images: pil, rgb8, torch ...; may be repeated.
    """

    output: str
    shuffle: bool = False
    seed: int = 0
    rekey: str = ""
    function: str = ""
    decode: list[str] | None = None
    manifest: str = ""
    resume: bool = False
    journal: Path | None = None
    num_workers: Natural | None = None


def create_images(
    folder: str,
    options: CreateArguments,
    no_classes: bool = False,
    all_files: bool = False,
    ending: list[str] | None = None,
    classes_from: str = "",
) -> None:
    """Create shards from a folder of images.

    Each subfolder is a class, and the field cls is its number. The class names are written to classes.json next to the
    shards. Files are copied unchanged unless --function transforms the samples. The shards do not depend on the number
    of workers.

    Input:
        FOLDER: A folder of images.
        --no-classes: The subfolders are not classes.
        --all-files: Group all files with the same key into one sample.
        --ending EXT: The extension of the files, instead of those of images; may be repeated.
    """
    if no_classes and classes_from:
        raise WrongUse("--no-classes cannot be used with --classes-from")
    if (path := local_path(folder)) is None:
        raise WrongUse(f"{redact(folder)!r} is not a local folder. Use create recipe for files in a store")

    def find(on_fault: Faults) -> Source:
        return find_images(
            path,
            has_classes=not no_classes,
            classes=read_class_list(classes_from, options.store) if classes_from else None,
            endings=ending or IMAGE_ENDINGS,
            key_rule=options.rule if all_files else None,
            on_fault=on_fault,
        )

    create_from(find, options)


def create_imagenet(folder: str, options: CreateArguments, split: str = "train", labels: Path | None = None) -> None:
    """Create shards from ImageNet, packed or not.

    The folder has the archives ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, or the folders train and val of
    torchvision or Kaggle. Archives are not unpacked. Samples have the fields jpg and cls, whose numbers are those of
    torchvision. Keys are numbers, or the names of the files with --rekey '{name}'.

    Input:
        FOLDER: The folder with the archives, or with train and val.
        --split NAME: train, val or test; images of test have no class.
        --labels FILE: The classes of val, if they are not in the folder: LOC_val_solution.csv, the development kit, or
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


def create_recipe(recipe: str, options: CreateArguments, root_dir: str = "") -> None:
    """Create shards from a tarp recipe of files and commands.

    Each line has the name in the archive and a path, URL, text:STRING or pipe:COMMAND. Consecutive lines with the same
    key form a sample. Relative paths start from the current folder, or from --root-dir.

    Input:
        RECIPE: A recipe for tarp create: a local file, or -.
    """
    create_from(lambda _: Recipe(recipe, root=root_dir, key_rule=options.rule), options)


def create_from(open_source: Callable[[Faults], Source], options: CreateArguments) -> None:
    """Write the samples of a source to shards, and print what was written."""
    output = options.output
    if output == "-" and (options.json or sys.stdout.isatty()):
        raise WrongUse("An archive cannot go to a terminal or share standard output with --json. Use --output FILE")
    if options.seed and not options.shuffle:
        raise WrongUse("--seed requires --shuffle. Without it, samples keep their order")
    if not options.function and options.decode is not None:
        raise WrongUse("--decode requires --function. Without it, files are copied unchanged")
    function = load_function(options.function) if options.function else None
    decode = parse_decoders(options.decode)
    faults: list[Exception] = []
    skip = options.skip_into(faults)
    with wrong_use():
        source = open_source(skip)
        class_list = locate_class_list(output, source)
        made = create_shards(
            source,
            output,
            **options.limits_of(output),
            function=function,
            decode=decode,
            rekey=options.rekey,
            seed=options.seed if options.shuffle else None,
            on_error="raise" if options.on_error == "raise" else skip,
            num_workers=options.num_workers,
            options=WriteOptions(
                compress=options.compress,  # type: ignore[arg-type]  # it is checked
                index=options.index,
                digest=bool(options.manifest),
                key_rule=options.rule,
                storage_options=options.store,
            ),
            job=JobOptions(
                journal=options.journal or options.resume,
                remove_old=options.remove_old,
                limits=options.limits,
                progress=output != "-",
            ),
        )
    shards = [shard.info for shard in made]
    if isinstance(source, ImageFiles) and class_list:
        listed = json.dumps({"classes": source.classes}, indent=1)
        write_sidecar(class_list, f"{listed}\n".encode(), options.store)
    if options.manifest:
        write_manifest(Manifest(shards), options.manifest, storage_options=options.store)
    left_out = dict(source.left_out) if isinstance(source, ImageFiles) else {}
    if left_out:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(left_out.items()))
        print_error(counts, "Ignored files that are not images")
    joined = source.joined if isinstance(source, ImageFiles) else []
    if joined:
        stem, endings = joined[0]
        files = " and ".join(f"{stem}.{each}" for each in endings[:2])
        print_error(
            f"{plural(len(joined), 'sample')} of images whose names have several dots, such as {stem!r} of {files}. If "
            "each image is a sample, pass --key-rule last-dot",
            "Joined by the first dot",
        )
    facts = {
        "samples": sum(info.samples for info in shards),
        "held": sum(not shard.is_new for shard in made),
        "classes": redact(class_list) or None,
        "manifest": redact(options.manifest) or None,
        "left_out": left_out,
        "joined": len(joined),
    }
    report_shards(made if output != "-" else [], faults, as_json=options.json, facts=facts)
    if options.json or output == "-":
        return
    for label, written in (("Classes", class_list), ("Manifest", options.manifest)):
        if written:
            sys.stdout.write(f"{label}: {printable(redact(written))}\n")


def locate_class_list(output: str, source: Source) -> str:
    """Return the path or URL for the list of classes next to the shards, or "" if there is no list.

    >>> locate_class_list("out/train-%06d.tar.gz", ImageFiles("", ["cat"]))
    'out/train-classes.json'
    >>> locate_class_list("s3://bucket/%d.tar", ImageFiles("", ["cat"]))
    's3://bucket/classes.json'
    """
    is_stream = split_scheme(output)[0] in ("-", "pipe")
    if is_stream or not isinstance(source, ImageFiles) or source.classes is None:
        return ""
    folder, slash, name = strip_shard_suffix(output).rpartition("/")
    name = NUMBER.sub("classes", name) if NUMBER.search(name) else f"{name}-classes"
    return f"{folder}{slash}{name}.json"


def read_class_list(url: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Read the class names from a file that `create_from` has written."""
    with wrong_use(
        "--classes-from is not a list of classes that create has written: ",
        MissingSidecarError,
        LookupError,
        TypeError,
        RecursionError,
    ):
        return list(json.loads(read_sidecar(url, storage_options))["classes"])
