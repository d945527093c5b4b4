"""Options shared by all ``create`` commands, and the writing of shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from wds_datapipes.cli._app import WrongUse, printable
from wds_datapipes.cli._copy import WriterOptions, report
from wds_datapipes.cli._functions import OWN, Decode, Function, load_function, parse_decoders, parse_encoders
from wds_datapipes.cli._options import SampleOptions, Workers, parse_bytes
from wds_datapipes.index.manifest import Manifest, write_manifest
from wds_datapipes.io.compression.formats import strip_shard_suffix
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.small_files import write_sidecar
from wds_datapipes.prepare.create import create_shards
from wds_datapipes.prepare.sample_spec import Source
from wds_datapipes.prepare.sources.image_folder import Faults, ImageFiles
from wds_datapipes.prepare.sources.table import Table
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.writing.shard_names import NUMBER

__all__ = ["CreateOptions", "OpenSource", "create_from"]

#: The help panel of the options.
ORDER = {"rich_help_panel": "Order and keys"}

OpenSource: TypeAlias = "Callable[[Faults, KeyRule, Mapping[str, Any] | None], Source]"
"""Opens a source, given an error policy, a key rule and storage options."""


@dataclass(frozen=True, kw_only=True)
class CreateOptions(WriterOptions, SampleOptions):
    """The options of all ``create`` commands."""

    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="Files or URLs with %06d for the shard number; without it, one archive; 'pipe:COMMAND' or -.",
        ),
    ]
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the samples.", **ORDER)] = False
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="The seed for --shuffle.", **ORDER)] = 0
    rekey: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="A pattern for new keys with {number}, {key} and {name}, such as '{number:08d}'.",
            **ORDER,
        ),
    ] = ""
    function: Function = ""
    decode: Decode = None
    encode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXT:OPTION=VALUE",
            help="Options for encoding returned images, such as jpg:quality=90; may be repeated.",
            **OWN,
        ),
    ] = None
    manifest: Annotated[
        str, typer.Option(metavar="FILE", help="Write a manifest of all shards, with their SHA-256.")
    ] = ""
    resume: Annotated[bool, typer.Option("--resume", help="Keep a journal, and write only missing shards.")] = False
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The journal for shards that are not local.", show_default=False),
    ] = None
    workers: Workers = None


def create_from(
    open_source: OpenSource,
    options: CreateOptions,
    class_list: str = "",
) -> None:
    """Write shards of a source, and print what was written.

    Args:
        open_source: opens the source.
        options: the options of the command.
        class_list: the path or URL for the list of classes; next to the shards by default.

    Raises:
        WrongUse: an option is invalid.
    """
    output, function = options.output, options.function
    if output == "-" and (options.as_json or sys.stdout.isatty()):
        raise WrongUse(
            "The archive cannot go to a terminal, or to standard output together with --json. Name a file with --output"
        )
    if not function and (options.decode is not None or options.encode is not None):
        raise WrongUse("--decode and --encode require --function. Without it, files are copied unchanged")
    function_options: dict[str, Any] = {}
    if function:
        function_options = {"function": load_function(function), "decode": parse_decoders(options.decode)}
    if options.encode:
        function_options["encoder"] = parse_encoders(options.encode)
    size, rule = parse_bytes(options.maxsize, "--maxsize"), options.rule
    faults: list[Exception] = []

    def skip(error: Exception) -> bool:
        if not options.skip_bad:
            raise error
        faults.append(error)
        return True

    try:
        source = open_source(skip, rule, options.store)
        class_list = locate_class_list(output, source, class_list)
        made = create_shards(
            source,
            output,
            maxcount=options.maxcount,
            maxsize=size,
            **function_options,
            rekey=options.rekey,
            seed=options.seed if options.shuffle else None,
            key_rule=rule,
            on_error=skip if options.skip_bad else "raise",
            remove_old=options.remove_old,
            num_workers=0 if options.workers == 1 else options.workers,
            resume=options.journal or options.resume,
            progress=output != "-",
            compress=options.compress,  # type: ignore[arg-type]  # the writer checks it
            index=options.index,
            digest=bool(options.manifest),
            storage_options=options.store,
        )
    except ValueError as error:
        if type(error) is not ValueError:  # an error of this package, with its own message
            raise
        raise WrongUse(str(error)) from None
    shards = [shard.info for shard in made]
    if class_list:
        write_class_list(source, class_list, options.store)
    if options.manifest:
        write_manifest(Manifest(shards), options.manifest, storage_options=options.store)
    left_out = dict(source.left_out) if isinstance(source, ImageFiles) else {}
    if left_out:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(left_out.items()))
        typer.echo(f"Ignored files that are not images: {printable(counts)}", err=True)
    held = sum(not shard.is_new for shard in made)
    facts = {
        "samples": sum(info.samples for info in shards),
        "held": held,
        "classes": redact(class_list) or None,
        "manifest": redact(options.manifest) or None,
        "left_out": left_out,
    }
    report(shards if output != "-" else [], faults, as_json=options.as_json, **(facts if options.as_json else {}))
    for label, written in (("Classes", class_list), ("Manifest", options.manifest)):
        if written and not options.as_json and output != "-":
            sys.stdout.write(f"{label}: {printable(redact(written))}\n")
    if held and not options.as_json:
        sys.stdout.write(f"{held:,} of {len(shards):,} shards were already finished\n")


def locate_class_list(output: str, source: Source, given: str) -> str:
    """Return the path or URL for the list of classes: next to the shards by default; "" if there is no list.

    >>> locate_class_list("out/train-%06d.tar.gz", ImageFiles("", ["cat"]), "")
    'out/train-classes.json'
    >>> locate_class_list("s3://bucket/%d.tar", ImageFiles("", ["cat"]), "")
    's3://bucket/classes.json'
    """
    if not isinstance(source, ImageFiles | Table) or source.classes is None:
        return ""
    if given or split_scheme(output)[0] in ("-", "pipe"):
        return given
    folder, slash, name = strip_shard_suffix(output).rpartition("/")
    name = NUMBER.sub("classes", name) if NUMBER.search(name) else f"{name}-classes"
    return f"{folder}{slash}{name}.json"


def write_class_list(source: Source, url: str, storage_options: dict[str, Any] | None) -> None:
    """Write the class names in the order of their numbers."""
    assert isinstance(source, ImageFiles | Table)  # noqa: S101  other sources have no list
    words = source.words if isinstance(source, ImageFiles) else []
    facts = {"classes": source.classes, **({"words": words} if words else {})}
    write_sidecar(url, (json.dumps(facts, indent=1) + "\n").encode(), storage_options)
