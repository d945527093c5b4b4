"""The command ``show``: show one sample in the terminal, or write a contact sheet of many."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from wds_datapipes.cli._app import FAULT_FOUND, WRONG_USE, WrongUse, on_one_line, printable
from wds_datapipes.cli._meter import new_console, plural
from wds_datapipes.cli._options import ReadingOptions, Shards, Workers
from wds_datapipes.cli.show_server import SampleServer
from wds_datapipes.cli.show_sheet import LABELS, make_sheet
from wds_datapipes.cli.show_sheet_html import sheet_as_html
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import write_sidecar
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.dataset_contents import DatasetContents
from wds_datapipes.prepare.preview import Preview, preview_field
from wds_datapipes.prepare.shard_contents import ShardFault
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.types import Sample

__all__ = ["show"]

#: The help panels of options.
ONE, SHEET = {"rich_help_panel": "One sample"}, {"rich_help_panel": "A contact sheet"}
INDENT = "    "
#: The size of a picture in a terminal, in characters and lines.
WIDTH, HEIGHT = 64, 24
#: A half block: the upper pixel is drawn in the text color, the lower one in the background color.
UPPER = "\N{UPPER HALF BLOCK}"
#: The background of transparent pixels.
BACKGROUND = (128, 128, 128)


def show(
    shards: Shards,
    options: ReadingOptions,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="Show the sample with this key.", **ONE)
    ] = None,
    number: Annotated[
        int,
        typer.Option(
            "--number", min=0, metavar="POSITION", help="Show the sample at this position, counted from 0.", **ONE
        ),
    ] = 0,
    characters: Annotated[
        int, typer.Option("--characters", min=0, metavar="COUNT", help="The most characters of a text to show.", **ONE)
    ] = 2000,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page.", **SHEET),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page of all samples with filters, to this host.", **SHEET)
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="NUMBER", help="The port of --serve.", **SHEET)
    ] = 8000,
    limit: Annotated[
        int,
        typer.Option("--limit", min=1, metavar="NUMBER", help="The number of samples to draw, or on a page.", **SHEET),
    ] = 60,
    seed: Annotated[int, typer.Option("--seed", metavar="NUMBER", help="The seed for drawing samples.", **SHEET)] = 0,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="FIELD", help="The field with the class; by default cls, class or label.", **SHEET
        ),
    ] = None,
    workers: Workers = None,
) -> None:
    """Show the fields of a sample, their sizes and contents, with pictures if the terminal supports color.

    With --html, write a contact sheet of random samples from all shards, with their classes, and a histogram of the
    sizes of all samples. With --serve, browse all samples, and filter them by key and size, and with --label by class.
    Code in the shards is never run: pickles are not decoded.
    """
    urls = options.list_shards(shards)
    if html is None and not serve:
        sample, position = find_sample(urls, key, number, options)
        previews = [
            preview_field(name, data, characters=characters) for name, data in sample.items() if name[:2] != "__"
        ]
        if options.as_json:
            sys.stdout.write(json.dumps(facts_of(sample, position, previews), indent=1) + "\n")
        else:
            print_sample(new_console(), sample, position, previews)
        return
    if key is not None or number:
        raise WrongUse("--key and --number select a single sample for the terminal, not for a page")
    if "-" in urls:
        raise WrongUse(
            "A contact sheet reads shards twice, which is not possible with standard input. Write it to a file first"
        )
    title = " ".join(redact(pattern) for pattern in shards)
    label_fields = [name.lower() for name in label] if label else LABELS
    if serve:
        if html is not None:
            raise WrongUse("--serve shows a page, and --html writes one: use one of them")
        serve_samples(urls, title, options, label_fields, label[0].lower() if label else "", limit, port, workers)
        return
    table = DatasetContents(urls, title="Drawing", num_workers=workers, **options.reading)
    random = table.draw(limit, seed=seed)
    sheet = make_sheet(random, title, label_fields=label_fields)
    assert html is not None  # noqa: S101  as it is not served
    page = sheet_as_html(sheet).encode("utf-8", "replace")
    write_sidecar(html, page, options.store)
    report(html, len(page), len(sheet.cards), len(random.sizes), random.faults, as_json=options.as_json)


def serve_samples(
    urls: list[str],
    title: str,
    options: ReadingOptions,
    label_fields: Sequence[str],
    label: str,
    count: int,
    port: int,
    workers: int | None,
) -> None:
    """Serve a page of all samples until Ctrl-C."""
    table = DatasetContents(urls, label=label, num_workers=workers, **options.reading)
    with SampleServer(table, title, label_fields=label_fields, count=count, port=port) as server:
        sys.stdout.write(f"{plural(len(table), 'sample')} at {server.url} (Ctrl-C to stop)\n")
        sys.stdout.flush()
        server.serve_forever()


def find_sample(urls: list[str], key: str | None, number: int, options: ReadingOptions) -> tuple[Sample, int]:
    """Read shards up to a sample, and return it with its position."""
    shards = read_shards(urls, ReadOptions(end_marker=options.end_marker.value, storage_options=options.store))
    at = -1
    for at, sample in enumerate(
        group_samples(shards, key_rule=options.rule, on_duplicate="first", on_repeated_key="ignore")
    ):
        if (key is None and at == number) or (key is not None and sample["__key__"] == key):
            return sample, at
    requested = f"with the key {key!r}" if key is not None else f"at position {number}"
    there = f"there are {plural(at + 1, 'sample')}" if at >= 0 else "there are no samples"
    raise WrongUse(f"There is no sample {requested}: {there} in {', '.join(map(redact, urls[:3]))}")


def facts_of(sample: Sample, position: int, previews: list[Preview]) -> dict[str, Any]:
    """Return the sample and its previews for JSON."""
    return {
        "shard": redact(sample["__url__"]),
        "key": sample["__key__"],
        "number": position,
        "bytes": sum(field.size for field in previews),
        "fields": [
            {"field": each.field, "bytes": each.size, "kind": each.kind, "text": each.text, "error": each.error}
            for each in previews
        ],
    }


def print_sample(console: Console, sample: Sample, position: int, previews: list[Preview]) -> None:
    """Print a line for each field, and its content next to it or below."""
    size = human_bytes(sum(field.size for field in previews))
    console.print(
        f"{printable(redact(sample['__url__']))}: sample {position:,}, {printable(sample['__key__'])}, {size}"
    )
    names = [printable(field.field) for field in previews]
    sizes = [human_bytes(field.size) for field in previews]
    name_width, size_width = max(map(len, names)), max(map(len, sizes))
    for field, name, size_text in zip(previews, names, sizes, strict=True):
        line = Text(f"{name:{name_width}}  {size_text:>{size_width}}  ")
        line.stylize("bold", 0, len(name))
        line.append(printable(field.kind), "cyan")
        lines = list(plain_lines(field.text))
        fits = len(lines) == 1 and len(line) + len(lines[0]) < max(console.width, 60)
        if fits:
            line.append(f": {lines[0]}")
        console.print(line)
        below = [] if fits else [Text(each) for each in lines]
        if field.error:
            below.append(Text(printable(field.error), "red"))
        if field.picture is not None and console.is_terminal and console.color_system is not None:
            below += half_blocks(field.picture, max(1, min(WIDTH, console.width - len(INDENT))), HEIGHT)
        for each in below:
            console.print(Text(INDENT).append_text(each))


def plain_lines(text: str) -> Iterator[str]:
    """Yield the printable lines of a text."""
    for line in text.replace("\r\n", "\n").replace("\t", "    ").rstrip("\n").split("\n") if text else ():
        yield printable(line)


def report(page: str, size: int, shown: int, samples: int, faults: list[ShardFault], *, as_json: bool) -> None:
    """Report the page, and print the faults of shards to standard error."""
    if as_json:
        facts = {"file": redact(page), "bytes": size, "shown": shown, "samples": samples}
        sys.stdout.write(json.dumps({**facts, "faults": [fault._asdict() for fault in faults]}, indent=1) + "\n")
    else:
        sys.stdout.write(f"{printable(redact(page))}: {shown:,} of {plural(samples, 'sample')}, {human_bytes(size)}\n")
        sys.stdout.flush()
        for fault in faults:
            typer.echo(f"Error: {on_one_line(fault.message)}", err=True)
    if faults:
        exists = all(fault.kind != "ShardOpenError" for fault in faults)
        raise typer.Exit(FAULT_FOUND if exists else WRONG_USE)


def half_blocks(picture: Image.Image, width: int, height: int) -> list[Text]:
    """Convert a picture to lines of colored characters.

    Args:
        picture: ``"RGB"`` or ``"RGBA"``.
        width: the maximum width in characters.
        height: the maximum height in lines.
    """
    if picture.mode == "RGBA":
        ground = Image.new("RGB", picture.size, BACKGROUND)
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
