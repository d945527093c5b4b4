"""Options that all ``create`` commands share, and writing the shards."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

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
from wds_datapipes.index.manifest import Manifest, write_manifest
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.small_files import write_sidecar
from wds_datapipes.prepare.create import create_shards
from wds_datapipes.prepare.sample_spec import Source
from wds_datapipes.prepare.sources.image_folder import Faults, ImageFiles
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.writing.shard_names import NUMBER

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CreateOptions", "OpenSource", "add_create_options", "create_from"]

#: The ending of a shard's name.
ENDING = re.compile(r"\.(tar|tgz|tbz2?|txz|tzst)(\.\w+)?$")
#: The headings of options.
ORDER, MADE = {"rich_help_panel": "Order and keys"}, {"rich_help_panel": "A function of your own"}

OpenSource: TypeAlias = "Callable[[Faults, KeyRule, Mapping[str, Any] | None], Source]"
"""Opens a source, given an error policy, a key rule and storage options."""


@dataclass(frozen=True, kw_only=True)
class CreateOptions:
    """The options of all ``create`` commands."""

    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="TARGET",
            help="Files or URLs with %06d for the number of the shard; without it, one archive; 'pipe:COMMAND' or -.",
        ),
    ]
    maxcount: MaxCount = 100_000
    maxsize: MaxSize = "3GB"
    shuffle: Annotated[bool, typer.Option("--shuffle", help="In a random order.", **ORDER)] = False
    seed: Annotated[int, typer.Option(help="The same seed gives the same order.", **ORDER)] = 0
    rekey: Annotated[
        str,
        typer.Option(metavar="PATTERN", help="New keys, of {number}, {key} and {name}, as in '{number:08d}'.", **ORDER),
    ] = ""
    key_rule: KeyRuleOption = KeyRuleWord.first_dot
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
    ] = ""
    decode: Annotated[
        list[str] | None,
        typer.Option(
            "--decode",
            "-d",
            metavar="WORD",
            help="Decode fields before: basic, or with images too: pil, rgb8, torch ...; repeat it.",
            **MADE,
        ),
    ] = None
    encode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXT:OPTION=VALUE",
            help="How images that it returns are encoded, such as jpg:quality=90; repeat it.",
            **MADE,
        ),
    ] = None
    compress: Compression = None
    index: WithIndex = False
    manifest: Annotated[
        str, typer.Option(metavar="FILE", help="Write the manifest of all shards, with their SHA-256.")
    ] = ""
    remove_old: RemoveOld = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep a journal, and write only the shards that are missing.")
    ] = False
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The journal for shards that are not local.", show_default=False),
    ] = None
    workers: Workers = None
    skip_bad: SkipBad = False
    as_json: AsJson = False
    storage_options: StorageOptions = ""
    timeout: Timeout = None
    retries: Retries = None


def add_create_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``options`` of a command by the fields of `CreateOptions`, for typer to read."""
    hints = get_type_hints(command, include_extras=True)
    shared = get_type_hints(CreateOptions, include_extras=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = CreateOptions(**{name: given.pop(name) for name in shared})
        command(options=options, **given)

    kinds = {**hints, **shared}
    del kinds["options"]
    given = [*inspect.signature(command).parameters.values(), *inspect.signature(CreateOptions).parameters.values()]
    keywords = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kinds[each.name])
        for each in given
        if each.name != "options"
    ]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # inspect looks for it
    run.__annotations__ = kinds
    return run


def create_from(
    open_source: OpenSource,
    options: CreateOptions,
    class_list: str = "",
) -> None:
    """Write shards of a source, and print what was written.

    Args:
        open_source: opens it.
        options: those of the command.
        class_list: the path or URL for the list of classes, if not beside the shards.

    Raises:
        WrongUse: an option makes no sense.
    """
    output, function = options.output, options.function
    storage_options = options_of(options.storage_options, options.timeout, options.retries)
    if output == "-" and (options.as_json or sys.stdout.isatty()):
        raise WrongUse("The archive goes to standard output, and nothing else can. Name a file with --output")
    if not function and (options.decode is not None or options.encode is not None):
        raise WrongUse("--decode and --encode go with --function: without one, all files are copied as they are")
    making: dict[str, Any] = {}
    if function:
        making = {"function": function_named(function), "decode": decoders_of(options.decode)}
    if options.encode:
        making["encoder"] = encoders_of(options.encode)
    size, rule = parse_bytes(options.maxsize, "--maxsize"), key_rule_of(options.key_rule)
    faults: list[Exception] = []

    def skip(error: Exception) -> bool:
        if not options.skip_bad:
            raise error
        faults.append(error)
        return True

    try:
        with (
            closing(open_source(skip, rule, storage_options)) as source,
            ProgressBars(len(source), is_shown=output != "-") as bars,
        ):
            class_list = locate_class_list(output, source, class_list)
            made = create_shards(
                source,
                output,
                maxcount=options.maxcount,
                maxsize=size,
                **making,
                rekey=options.rekey,
                seed=options.seed if options.shuffle else None,
                key_rule=rule,
                on_error=skip if options.skip_bad else "raise",
                remove_old=options.remove_old,
                max_workers=0 if options.workers == 1 else options.workers,
                resume=options.resume,
                journal=options.journal,
                watcher=bars,
                compress=options.compress,
                index=options.index,
                digest=bool(options.manifest),
                storage_options=storage_options,
            )
    except ValueError as error:
        if type(error) is not ValueError:  # one of this package, with a text of its own
            raise
        raise WrongUse(str(error)) from None
    shards = [shard.info for shard in made]
    if class_list:
        write_class_list(source, class_list, storage_options)
    if options.manifest:
        write_manifest(Manifest(shards), options.manifest, storage_options=storage_options)
    left_out = dict(source.left_out) if isinstance(source, ImageFiles) else {}
    if left_out:
        told = ", ".join(f"{name} {count:,}" for name, count in sorted(left_out.items()))
        typer.echo(f"Left out, as files of other kinds: {printable(told)}", err=True)
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
        sys.stdout.write(f"{held:,} of {len(shards):,} shards held already\n")


def locate_class_list(output: str, source: Source, given: str) -> str:
    """Return the path or URL for the list of classes: beside the shards if none is given; "" if there is none.

    >>> locate_class_list("out/train-%06d.tar.gz", ImageFiles("", ["cat"]), "")
    'out/train-classes.json'
    >>> locate_class_list("s3://bucket/%d.tar", ImageFiles("", ["cat"]), "")
    's3://bucket/classes.json'
    """
    if not isinstance(source, ImageFiles) or source.classes is None:
        return ""
    if given or split_scheme(output)[0] in ("-", "pipe"):
        return given
    folder, slash, name = ENDING.sub("", output).rpartition("/")
    name = NUMBER.sub("classes", name) if NUMBER.search(name) else f"{name}-classes"
    return f"{folder}{slash}{name}.json"


def write_class_list(source: Source, place: str, storage_options: dict[str, Any] | None) -> None:
    """Write the names of classes in the order of their numbers."""
    assert isinstance(source, ImageFiles)  # noqa: S101  others have no list
    facts = {"classes": source.classes, **({"words": source.words} if source.words else {})}
    write_sidecar(place, (json.dumps(facts, indent=1) + "\n").encode(), storage_options)


class ProgressBars:
    """Shows a bar for the files that are looked at, and one for the shards that are written."""

    def __init__(self, samples: int, *, is_shown: bool) -> None:
        self._bars = ExitStack()
        self._is_shown = is_shown
        self._meter = ProgressMeter("Looking at files", samples, shown=is_shown, unit="samples")

    def looked(self, samples: int, size: int) -> None:
        """Count what was looked at."""
        self._meter.add(samples=samples, size=size)

    def planned(self, shards: int, samples: int) -> None:  # noqa: ARG002  the bar counts shards
        """Begin to count shards."""
        self._bars.close()
        self._meter = self._bars.enter_context(ProgressMeter("Writing", shards, shown=self._is_shown))

    def wrote(self, shards: int, samples: int, size: int) -> None:
        """Count what was written."""
        self._meter.add(shards=shards, samples=samples, size=size)

    def __enter__(self) -> Self:
        self._bars.enter_context(self._meter)
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()
