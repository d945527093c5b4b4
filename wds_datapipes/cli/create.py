"""The command ``create``: shards of images in folders, of ImageNet, of a table, or of a recipe of tarp."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wds_datapipes.cli._app import WrongUse, printable
from wds_datapipes.cli._copy import Compression, MaxCount, MaxSize, RemoveOld, SkipBad, WithIndex, report
from wds_datapipes.cli._functions import decoders_of, encoders_of, function_named
from wds_datapipes.cli._meter import ProgressMeter
from wds_datapipes.cli._options import (
    AsJson,
    KeyRuleOption,
    KeyRuleWord,
    Retries,
    StorageOptions,
    Timeout,
    Workers,
    key_rule_of,
    options_of,
    parse_bytes,
)
from wds_datapipes.cli.create_sources import (
    Kind,
    Material,
    MissingWord,
    class_list_place,
    open_source,
    write_class_list,
)
from wds_datapipes.index.manifest import Manifest, write_manifest
from wds_datapipes.io.openers import redact
from wds_datapipes.prepare.create import create_shards
from wds_datapipes.prepare.sources.image_folder import ImageFiles

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["create"]

#: The headings of options.
TAKEN, WRITTEN = {"rich_help_panel": "What is taken"}, {"rich_help_panel": "What is written"}
MADE = {"rich_help_panel": "What is made of it"}
FOLDERS = {"rich_help_panel": "Of folders of images"}
TABLES = {"rich_help_panel": "Of tables"}


def create(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A folder of images, or a table or a recipe or its URL.", show_default=False
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="Files or URLs with %06d for the number of the shard; without it, one archive; 'pipe:COMMAND' or -.",
            **WRITTEN,
        ),
    ],
    kind: Annotated[
        Kind | None,
        typer.Option("--from", help="What SOURCE is, if its name does not tell.", show_default=False, **TAKEN),
    ] = None,
    rekey: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="New keys, of {number}, {key} and {name}, such as '{number:08d}'.",
            **TAKEN,
        ),
    ] = "",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="In a random order.", **TAKEN)] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same order.", **TAKEN)] = 0,
    no_classes: Annotated[bool, typer.Option("--no-classes", help="Folders are no classes.", **FOLDERS)] = False,
    all_files: Annotated[
        bool, typer.Option("--all-files", help="All files of one key are one sample, not images alone.", **FOLDERS)
    ] = False,
    ending: Annotated[
        list[str] | None,
        typer.Option(metavar="EXT", help="Files of this ending are samples, in the place of images.", **FOLDERS),
    ] = None,
    class_name: Annotated[
        str, typer.Option(metavar="FIELD", help="A field for the name of the class, such as txt.", **FOLDERS)
    ] = "",
    classes_from: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Number classes as this list does, which was written for another part.", **FOLDERS
        ),
    ] = "",
    split: Annotated[
        str, typer.Option(metavar="NAME", help="The part of ImageNet: train if it is not told, or val.", **FOLDERS)
    ] = "",
    labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The classes of ImageNet's val.", show_default=False, **FOLDERS),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="[FIELD=]COLUMN", help="A column with names of files; repeat it.", **TABLES),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FIELD=]COLUMN",
            help="A column with values, in the place of all columns; json=* has all; repeat it.",
            **TABLES,
        ),
    ] = None,
    key: Annotated[str, typer.Option(metavar="COLUMN", help="The column of keys.", **TABLES)] = "",
    missing: Annotated[
        MissingWord, typer.Option(help="What becomes of a row without a value.", **TABLES)
    ] = MissingWord.fault,
    root: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Where paths begin, or a URL: at the table by default, and for a recipe here.", **TABLES
        ),
    ] = "",
    function: Annotated[
        str,
        typer.Option(
            "--function",
            "-f",
            metavar="MODULE:FUNCTION",
            help="A function of a sample that returns a sample, None or several samples.",
            show_default=False,
            **MADE,
        ),
    ] = "",
    decode: Annotated[
        list[str] | None,
        typer.Option(
            "--decode",
            "-d",
            metavar="WORD",
            help="Decode fields before: basic, or with images too: pil, rgb8, torch ...; repeat it.",
            **MADE,
        ),
    ] = None,
    encode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXT:OPTION=VALUE",
            help="How images that it returns are encoded, such as jpg:quality=90; repeat it.",
            **MADE,
        ),
    ] = None,
    maxcount: MaxCount = 100_000,
    maxsize: MaxSize = "3GB",
    compress: Compression = None,
    index: WithIndex = False,
    remove_old: RemoveOld = False,
    manifest: Annotated[
        str, typer.Option(metavar="FILE", help="Write the manifest of all shards, with their SHA-256.")
    ] = "",
    class_list: Annotated[
        str, typer.Option(metavar="FILE", help="Where the names of classes go, if not beside the shards.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep a journal, and write only the shards that are missing.")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The journal for shards that are not local.", show_default=False),
    ] = None,
    workers: Workers = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
) -> None:
    """Write shards of the files in a folder, or of those that a table or a recipe names.

    Bytes are copied as they are, unless --function makes other samples of them; values that it returns are encoded by
    the names of their fields. In a folder, each folder in it is a class, with the number cls; the names of classes go
    into classes.json beside the shards. The same files give the same shards, by any number of workers.
    """
    options, rule = options_of(storage_options, timeout, retries), key_rule_of(key_rule)
    if output == "-" and (as_json or sys.stdout.isatty()):
        raise WrongUse("The archive goes to standard output, and nothing else can. Name a file with --output")
    if not function and (decode is not None or encode is not None):
        raise WrongUse("--decode and --encode go with --function: without one, all files are copied as they are")
    making: dict[str, Any] = {"function": function_named(function), "decode": decoders_of(decode)} if function else {}
    if encode:
        making["encoder"] = encoders_of(encode)
    material = Material(
        no_classes=no_classes,
        all_files=all_files,
        ending=ending or [],
        class_name=class_name,
        classes_from=classes_from,
        split=split,
        labels=labels,
        file=file or [],
        field=field or [],
        key=key,
        missing=missing,
        root=root,
    )
    faults: list[Exception] = []

    def passes(error: Exception) -> bool:
        if not skip_bad:
            raise error
        faults.append(error)
        return True

    size = parse_bytes(maxsize, "--maxsize")
    with (
        closing(open_source(source, kind, material, rule, passes, options)) as opened,
        Shown(len(opened), output) as shown,
    ):
        place = class_list_place(output, opened, class_list)
        if kind is Kind.imagenet:
            rekey = rekey or "{number:07d}"
        try:
            made = create_shards(
                opened,
                output,
                maxcount=maxcount,
                maxsize=size,
                **making,
                rekey=rekey,
                seed=seed if shuffle else None,
                key_rule=rule,
                on_error=passes if skip_bad else "raise",
                remove_old=remove_old,
                max_workers=0 if workers == 1 else workers,
                resume=resume,
                journal=journal,
                watcher=shown,
                compress=compress,
                index=index,
                digest=bool(manifest),
                storage_options=options,
            )
        except ValueError as error:
            if type(error) is not ValueError:  # one of this package, with a text of its own
                raise
            raise WrongUse(str(error)) from None
    shards = [shard.info for shard in made]
    if place:
        write_class_list(opened, place, options)
    if manifest:
        write_manifest(Manifest(shards), manifest, storage_options=options)
    left_out = dict(opened.left_out) if isinstance(opened, ImageFiles) else {}
    if left_out:
        told = ", ".join(f"{name} {count:,}" for name, count in sorted(left_out.items()))
        typer.echo(f"Left out, as files of other kinds: {printable(told)}", err=True)
    held = sum(not shard.is_new for shard in made)
    facts = {
        "samples": sum(info.samples for info in shards),
        "held": held,
        "classes": redact(place) or None,
        "manifest": redact(manifest) or None,
        "left_out": left_out,
    }
    report(shards if output != "-" else [], faults, as_json=as_json, **(facts if as_json else {}))
    for label, written in (("Classes", place), ("Manifest", manifest)):
        if written and not as_json and output != "-":
            sys.stdout.write(f"{label}: {printable(redact(written))}\n")
    if held and not as_json:
        sys.stdout.write(f"{held:,} of {len(shards):,} shards held already\n")


class Shown:
    """Shows a bar for the files that are looked at, and one for the shards that are written."""

    def __init__(self, samples: int, output: str) -> None:
        self._bars = ExitStack()
        self._shown = output != "-"
        self._meter = ProgressMeter("Looking at files", samples, shown=self._shown, unit="samples")

    def looked(self, samples: int, size: int) -> None:
        """Count what was looked at."""
        self._meter.add(samples=samples, size=size)

    def planned(self, shards: int, samples: int) -> None:  # noqa: ARG002  the bar counts shards
        """Begin to count shards."""
        self._bars.close()
        self._meter = self._bars.enter_context(ProgressMeter("Writing", shards, shown=self._shown))

    def wrote(self, shards: int, samples: int, size: int) -> None:
        """Count what was written."""
        self._meter.add(shards=shards, samples=samples, size=size)

    def __enter__(self) -> Self:
        self._bars.enter_context(self._meter)
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()
