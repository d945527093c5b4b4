"""The command ``show``: show one sample in the terminal, or a contact sheet of many as a web page."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import WrongUse, printable
from wds_datapipes.cli._declaration import Natural, Positive
from wds_datapipes.cli._options import ReadArguments
from wds_datapipes.cli._report import end_with_faults, plural, print_json
from wds_datapipes.cli.show_server import SampleServer
from wds_datapipes.cli.show_sheet import facts_of_dataset, sheet_as_html
from wds_datapipes.io.openers import redact
from wds_datapipes.io.small_files import write_sidecar
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.dataset_contents import DatasetContents
from wds_datapipes.prepare.preview import Preview, preview_field
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.types import Sample

#: The longest line of a field with its text beside it.
WIDTH = 80


def show(
    shards: list[str],
    options: ReadArguments,
    key: str | None = None,
    number: Natural = 0,
    characters: Natural = 2000,
    html: str | None = None,
    serve: bool = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    limit: Positive = 60,
    seed: int = 0,
    label: str = "",
    num_workers: Natural | None = None,
) -> None:
    """Show the fields of a sample, their sizes and contents.

    With --html, write a contact sheet of random samples from all shards. With --serve, browse all samples, and filter
    them by key and size, and with --label by class.
    Code in the shards is never run: pickles are not decoded.

    One sample:
        --key, -k KEY: Show the sample with this key.
        --number POSITION: Show the sample at this position, counted from 0.
        --characters COUNT: The most characters of a text to show.

    A contact sheet:
        --html FILE: Write a self-contained HTML page.
        --serve: Serve a page of all samples with filters, to this host.
        --port NUMBER: The port of --serve.
        --limit NUMBER: The number of samples to draw, or on a page.
        --seed NUMBER: The seed for drawing samples.
        --label FIELD: The field with the class, to filter by.
    """
    urls = options.list_shards(shards)
    if html is None and not serve:
        sample, position = find_sample(urls, key, number, options)
        fields = [preview_field(name, data, characters=characters) for name, data in sample.items() if name[:2] != "__"]
        if options.json:
            print_json(facts_of(sample, position, fields))
        else:
            print_sample(sample, position, fields)
        return
    if key is not None or number:
        raise WrongUse("--key and --number select a single sample for the terminal, not for a page")
    if "-" in urls:
        raise WrongUse(
            "A contact sheet reads shards twice, which is not possible with standard input. Write it to a file first"
        )
    if html is not None and serve:
        raise WrongUse("--serve shows a page, and --html writes one: use one of them")
    title = " ".join(redact(pattern) for pattern in shards)
    table = DatasetContents(urls, label=label.lower(), num_workers=num_workers, **options.reading)
    if serve:
        with SampleServer(table, title, count=limit, port=port) as server:
            sys.stdout.write(f"{plural(len(table), 'sample')} at {server.url} (Ctrl-C to stop)\n")
            sys.stdout.flush()
            server.serve_forever()
    drawn = table.draw(limit, seed=seed)
    page = sheet_as_html(drawn.samples, title, facts_of_dataset(table)).encode("utf-8", "replace")
    write_sidecar(str(html), page, options.store)
    if options.json:
        facts = {"file": redact(str(html)), "bytes": len(page), "shown": len(drawn.samples), "samples": len(table)}
        print_json({**facts, "faults": [fault._asdict() for fault in drawn.faults]})
    else:
        counts = f"{len(drawn.samples):,} of {plural(len(table), 'sample')}, {human_bytes(len(page))}"
        sys.stdout.write(f"{printable(redact(str(html)))}: {counts}\n")
    end_with_faults(drawn.faults, is_printed=not options.json)


def find_sample(urls: list[str], key: str | None, number: int, options: ReadArguments) -> tuple[Sample, int]:
    """Read shards up to a sample, and return it with its position."""
    shards = read_shards(urls, ReadOptions(end_marker=options.end_marker, storage_options=options.store))
    at = -1
    for at, sample in enumerate(
        group_samples(shards, key_rule=options.rule, on_duplicate="first", on_repeated_key="ignore")
    ):
        if (key is None and at == number) or (key is not None and sample["__key__"] == key):
            return sample, at
    requested = f"with the key {key!r}" if key is not None else f"at position {number}"
    there = f"there are {plural(at + 1, 'sample')}" if at >= 0 else "there are no samples"
    raise WrongUse(f"There is no sample {requested}: {there} in {', '.join(map(redact, urls[:3]))}")


def facts_of(sample: Sample, position: int, fields: Sequence[Preview]) -> dict[str, Any]:
    """Return the sample and its previews for JSON."""
    return {
        "shard": redact(sample["__url__"]),
        "key": sample["__key__"],
        "number": position,
        "bytes": sum(field.size for field in fields),
        "fields": [
            {"field": each.field, "bytes": each.size, "kind": each.kind, "text": each.text, "error": each.error}
            for each in fields
        ],
    }


def print_sample(sample: Sample, position: int, fields: Sequence[Preview]) -> None:
    """Print a line for each field, and its content next to it or below."""
    size = human_bytes(sum(field.size for field in fields))
    shard, key = printable(redact(sample["__url__"])), printable(sample["__key__"])
    sys.stdout.write(f"{shard}: sample {position:,}, {key}, {size}\n")
    names = [printable(field.field) for field in fields]
    sizes = [human_bytes(field.size) for field in fields]
    name_width, size_width = max(map(len, names), default=0), max(map(len, sizes), default=0)
    for field, name, size_text in zip(fields, names, sizes, strict=True):
        line = f"{name:{name_width}}  {size_text:>{size_width}}  {printable(field.kind)}"
        lines = list(plain_lines(field.text))
        if len(lines) == 1 and len(line) + len(lines[0]) < WIDTH:
            line, lines = f"{line}: {lines[0]}", []
        sys.stdout.write(f"{line}\n")
        for text in (*lines, *([printable(field.error)] if field.error else ())):
            sys.stdout.write(f"    {text}\n")


def plain_lines(text: str) -> Iterator[str]:
    """Yield the printable lines of a text."""
    for line in text.replace("\r\n", "\n").replace("\t", "    ").rstrip("\n").split("\n") if text else ():
        yield printable(line)
