"""Creation of shards from files, for all ``create`` commands.

Annotations are not postponed: cyclopts would look for their names in the module of a class that inherits a field.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from wds_datapipes.errors import EmptySourceError, plural
from wds_datapipes.index.format.manifest import Manifest, write_manifest
from wds_datapipes.io.compression.formats import strip_shard_suffix
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.sidecars import write_sidecar
from wds_datapipes.tools.cli.errors import WrongUse, printable
from wds_datapipes.tools.cli.options.read import SampleArguments, Workers
from wds_datapipes.tools.cli.options.values import FileOrUrl, load_function, metavar, parse_decoders, wrong_use
from wds_datapipes.tools.cli.options.write import WriteArguments
from wds_datapipes.tools.cli.printing import print_error, print_skipped, report_shards
from wds_datapipes.tools.prepare.create import create_shards
from wds_datapipes.tools.prepare.job_options import JobOptions
from wds_datapipes.tools.prepare.sample_spec import Source
from wds_datapipes.tools.prepare.sources.image_folder import Faults, ImageFiles
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.shard_names import NUMBER

INPUT = Group("Input", sort_key=1)
ORDER, FUNCTION = Group("Order and keys", sort_key=6), Group("User function", sort_key=7)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CreateArguments(WriteArguments, SampleArguments):
    """The options of all ``create`` commands.

    Args:
        output: Files or URLs with %06d for the shard number; without it, one archive; 'pipe:COMMAND' or -.
        manifest: Write a manifest of all shards, with their SHA-256.
        resume: Keep a journal and write only missing shards.
        journal: The journal for shards that are not local.
        shuffle: Shuffle the samples.
        seed: The seed for --shuffle.
        rekey: The pattern of new keys, with {number}, {key} and {name}, such as '{number:08d}'.
        function: A function that maps a sample to a sample, None or several samples.
        decode: Decode fields first: basic, or also images: pil, rgb8, torch ...; may be repeated.
    """

    output: Annotated[FileOrUrl, metavar("TARGET", alias="-o")]
    shuffle: Annotated[bool, Parameter(group=ORDER)] = False
    seed: Annotated[int, metavar("NUMBER", group=ORDER)] = 0
    rekey: Annotated[str, metavar("PATTERN", group=ORDER)] = ""
    function: Annotated[str, metavar("MODULE:FUNCTION", alias="-f", group=FUNCTION)] = ""
    decode: Annotated[list[str] | None, metavar("WORD", alias="-d", group=FUNCTION)] = None
    manifest: Annotated[FileOrUrl, metavar("FILE")] = ""
    resume: bool = False
    journal: Annotated[Path | None, metavar("FILE")] = None
    num_workers: Workers = None


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
        try:
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
        except EmptySourceError:
            print_skipped(faults)
            raise
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
