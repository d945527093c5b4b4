"""The command ``show``: one sample in the terminal, or a contact sheet of many."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from wds_datapipes.cli._app import FAULT_FOUND, WRONG_USE, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import ProgressMeter, human_bytes, new_console, plural
from wds_datapipes.cli._options import (
    AsJson,
    EndMarkerOption,
    KeyRuleOption,
    KeyRuleWord,
    Presence,
    Retries,
    Shards,
    StorageOptions,
    Timeout,
    Workers,
    key_rule_of,
    list_shards,
    options_of,
)
from wds_datapipes.cli.show_sheet import LABELS, make_sheet
from wds_datapipes.cli.show_sheet_html import sheet_as_html
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import write_sidecar
from wds_datapipes.prepare.preview import Preview, glance
from wds_datapipes.prepare.random_samples import draw_samples
from wds_datapipes.prepare.shard_contents import ShardFault
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Sample

__all__ = ["show"]

#: The headings of options.
ONE, SHEET = {"rich_help_panel": "One sample"}, {"rich_help_panel": "A contact sheet"}
INDENT = "    "
#: How large a picture is in a terminal, in characters and lines.
WIDTH, HEIGHT = 64, 24
#: The upper half of a character, in the colour of the text; the rest has that of the background.
UPPER = "\N{UPPER HALF BLOCK}"
#: What shows behind transparent pixels.
BEHIND = (128, 128, 128)


def show(
    shards: Shards,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The sample of this key.", **ONE)] = None,
    number: Annotated[
        int, typer.Option("--number", "-n", min=0, help="The sample at this place, counted from 0.", **ONE)
    ] = 0,
    characters: Annotated[
        int, typer.Option("--characters", min=0, metavar="COUNT", help="How much of a text is shown.", **ONE)
    ] = 2000,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write an HTML page that needs no other file.", **SHEET),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="How many samples to draw, of all shards.", **SHEET)
    ] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Another one draws others.", **SHEET)] = 0,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="FIELD", help="The field of the class; cls, class or label by default.", **SHEET
        ),
    ] = None,
    workers: Workers = None,
    as_json: AsJson = False,
    key_rule: KeyRuleOption = KeyRuleWord.first_dot,
    end_marker: EndMarkerOption = Presence.required,
    storage_options: StorageOptions = "",
    timeout: Timeout = None,
    retries: Retries = None,
) -> None:
    """Show a sample: its fields, their sizes, and what they hold, with pictures where the terminal has colours.

    With --html, a contact sheet of samples that are drawn from all shards, with their classes, and a histogram
    of the sizes of all samples. Nothing in the shards is ever run: pickles are not decoded.
    """
    options, rule = options_of(storage_options, timeout, retries), key_rule_of(key_rule)
    urls = list_shards(shards, options)
    if html is None:
        sample, place = sample_at(urls, key, number, rule, end_marker.value, options)
        seen = [glance(name, data, characters=characters) for name, data in sample.items() if name[:2] != "__"]
        if as_json:
            sys.stdout.write(json.dumps(facts_of(sample, place, seen), indent=1) + "\n")
        else:
            print_sample(new_console(), sample, place, seen)
        return
    if key is not None or number:
        raise WrongUse("--key and --number are for one sample in the terminal, and not for a contact sheet")
    if "-" in urls:
        raise WrongUse("A contact sheet reads shards twice, which standard input cannot be. Write it to a file first")
    with ProgressMeter("Drawing", len(urls)) as meter:
        drawn = draw_samples(
            urls,
            limit,
            seed=seed,
            max_workers=workers,
            on_shard=lambda samples, size: meter.add(shards=1, samples=samples, size=size),
            key_rule=rule,
            end_marker=end_marker.value,
            storage_options=options,
        )
    title = " ".join(redact(pattern) for pattern in shards)
    sheet = make_sheet(drawn, title, label_fields=[name.lower() for name in label] if label else LABELS)
    page = sheet_as_html(sheet).encode("utf-8", "replace")
    write_sidecar(html, page, options)
    report(html, len(page), len(sheet.cards), len(drawn.sizes), drawn.faults, as_json=as_json)


def sample_at(
    urls: list[str],
    key: str | None,
    number: int,
    key_rule: KeyRule,
    end_marker: EndMarker,
    storage_options: dict[str, Any] | None,
) -> tuple[Sample, int]:
    """Read shards up to a sample, and return it with its place among all."""
    shards = read_shards(urls, ReadOptions(end_marker=end_marker, storage_options=storage_options))
    at = -1
    for at, sample in enumerate(
        group_samples(shards, key_rule=key_rule, on_duplicate="first", on_repeated_key="ignore")
    ):
        if (key is None and at == number) or (key is not None and sample["__key__"] == key):
            return sample, at
    wanted = f"of the key {key!r}" if key is not None else f"at the place {number}"
    there = f"there are {plural(at + 1, 'sample')}" if at >= 0 else "there are no samples"
    raise WrongUse(f"There is no sample {wanted}: {there} in {', '.join(map(redact, urls[:3]))}")


def facts_of(sample: Sample, place: int, seen: list[Preview]) -> dict[str, Any]:
    """Return all facts for JSON."""
    return {
        "shard": redact(sample["__url__"]),
        "key": sample["__key__"],
        "number": place,
        "bytes": sum(field.size for field in seen),
        "fields": [
            {"field": each.field, "bytes": each.size, "kind": each.kind, "text": each.text, "error": each.error}
            for each in seen
        ],
    }


def print_sample(console: Console, sample: Sample, place: int, seen: list[Preview]) -> None:
    """Print a line for each field, and what it holds beside it or below."""
    size = human_bytes(sum(field.size for field in seen))
    console.print(f"{printable(redact(sample['__url__']))}: sample {place:,}, {printable(sample['__key__'])}, {size}")
    names = [printable(field.field) for field in seen]
    sizes = [human_bytes(field.size) for field in seen]
    name_width, size_width = max(map(len, names)), max(map(len, sizes))
    for field, name, told in zip(seen, names, sizes, strict=True):
        line = Text(f"{name:{name_width}}  {told:>{size_width}}  ")
        line.stylize("bold", 0, len(name))
        line.append(printable(field.kind), "cyan")
        lines = list(plain_lines(field.text))
        beside = len(lines) == 1 and len(line) + len(lines[0]) < max(console.width, 60)
        if beside:
            line.append(f": {lines[0]}")
        console.print(line)
        below = [] if beside else [Text(each) for each in lines]
        if field.error:
            below.append(Text(printable(field.error), "red"))
        if field.picture is not None and console.is_terminal and console.color_system is not None:
            below += half_blocks(field.picture, max(1, min(WIDTH, console.width - len(INDENT))), HEIGHT)
        for each in below:
            console.print(Text(INDENT).append_text(each))


def plain_lines(text: str) -> Iterator[str]:
    """Return the lines of a text, as they may be printed."""
    for line in text.replace("\r\n", "\n").replace("\t", "    ").rstrip("\n").split("\n") if text else ():
        yield printable(line)


def report(page: str, size: int, shown: int, samples: int, faults: list[ShardFault], *, as_json: bool) -> None:
    """Print the page that was written, and what is wrong with shards to standard error."""
    if as_json:
        facts = {"file": redact(page), "bytes": size, "shown": shown, "samples": samples}
        sys.stdout.write(json.dumps({**facts, "faults": [fault._asdict() for fault in faults]}, indent=1) + "\n")
    else:
        sys.stdout.write(f"{printable(redact(page))}: {shown:,} of {plural(samples, 'sample')}, {human_bytes(size)}\n")
        sys.stdout.flush()
        for fault in faults:
            typer.echo(f"Error: {on_one_line(fault.message)}", err=True)
    if faults:
        is_there = all(fault.kind != "ShardOpenError" for fault in faults)
        raise typer.Exit(FAULT_FOUND if is_there else WRONG_USE)


def half_blocks(picture: Image.Image, width: int, height: int) -> list[Text]:
    """Return a picture as lines of coloured characters.

    Args:
        picture: ``"RGB"`` or ``"RGBA"``.
        width: how many characters it may be wide.
        height: how many lines it may be high.
    """
    if picture.mode == "RGBA":
        ground = Image.new("RGB", picture.size, BEHIND)
        ground.paste(picture, mask=picture)
        picture = ground
    scale = min(width / picture.width, 2 * height / picture.height)
    size = max(1, round(picture.width * scale)), 2 * max(1, round(picture.height * scale / 2))
    method = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    pixels = np.asarray(picture.convert("RGB").resize(size, method)).tolist()
    lines = []
    for row in range(0, size[1], 2):
        line = Text()
        for upper, lower in zip(pixels[row], pixels[row + 1], strict=True):
            line.append(UPPER, Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        lines.append(line)
    return lines
