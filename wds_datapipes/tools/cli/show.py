"""The command ``show``: show one sample in the terminal, or a contact sheet of many as a web page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import median
from string import Template
from typing import Annotated, Any

from cyclopts import Group, Parameter

from wds_datapipes.errors import plural
from wds_datapipes.io.openers import redact
from wds_datapipes.io.sidecars import write_sidecar
from wds_datapipes.parallel.progress import ProgressMeter, human_bytes
from wds_datapipes.tools.cli.errors import WrongUse, printable
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards
from wds_datapipes.tools.cli.options.values import FileOrUrl, Natural, Positive, metavar
from wds_datapipes.tools.cli.printing import end_with_faults, print_json
from wds_datapipes.tools.prepare.preview import Preview, escape_text, preview_field, sample_as_html
from wds_datapipes.tools.prepare.read_options import ReadOptions, read_samples
from wds_datapipes.tools.prepare.shard_contents import ShardFault
from wds_datapipes.types import Sample

SAMPLE, SHEET = Group("One sample", sort_key=1), Group("A contact sheet", sort_key=2)
#: What browsers allow the page to do: no scripts, nothing from elsewhere.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
#: The longest line of a field with its text beside it.
WIDTH = 80


def show(
    *shards: Shards,
    key: Annotated[str | None, metavar("KEY", alias="-k", group=SAMPLE)] = None,
    number: Annotated[Natural, Parameter(group=SAMPLE)] = 0,
    html: Annotated[FileOrUrl | None, metavar("FILE", group=SHEET)] = None,
    count: Annotated[Positive, Parameter(alias="-n", group=SHEET)] = 60,
    seed: Annotated[int, metavar("NUMBER", group=SHEET)] = 0,
    options: ReadArguments = READ,
) -> None:
    """Show the fields of a sample with their sizes and contents.

    With --html, writes a contact sheet of random samples, for which all shards are read to the end.
    Code in the shards is never run: pickles are not decoded.

    Args:
        key: Show the sample with this key.
        number: Show the sample at this position, counted from 0.
        html: Write a self-contained HTML page.
        count: The number of samples to draw.
        seed: The seed for drawing samples.
    """
    urls = options.list_shards(shards)
    if html is None:
        sample, position = find_sample(urls, key, number, options)
        fields = [preview_field(name, data) for name, data in sample.items() if name[:2] != "__"]
        if options.json:
            print_json(facts_of(sample, position, fields))
        else:
            print_sample(sample, position, fields)
        return
    if key is not None or number:
        raise WrongUse("--key and --number select a single sample for the terminal, not for a page")
    faults: list[ShardFault] = []
    with ProgressMeter("Reading", len(urls)) as meter:
        drawn, sizes = draw_samples(read_all(urls, options, faults, meter), count, seed)
    facts = {
        "samples": f"{len(sizes):,}",
        "shards": f"{len(urls):,}",
        "bytes of samples": human_bytes(sum(sizes)),
        "median sample": human_bytes(median(sizes)) if sizes else "none",
    }
    page = sheet_as_html(drawn, " ".join(map(redact, shards)), facts).encode("utf-8", "replace")
    write_sidecar(html, page, options.store)
    if options.json:
        told = {"file": redact(html), "bytes": len(page), "shown": len(drawn), "samples": len(sizes)}
        print_json({**told, "faults": [fault._asdict() for fault in faults]})
    else:
        counts = f"{len(drawn):,} of {plural(len(sizes), 'sample')}, {human_bytes(len(page))}"
        sys.stdout.write(f"{printable(redact(html))}: {counts}\n")
    end_with_faults(faults, is_printed=not options.json)


def read_all(
    urls: list[str], options: ReadArguments, faults: list[ShardFault], meter: ProgressMeter
) -> Iterator[Sample]:
    """Yield the samples of shards; their faults are collected."""
    scan = ReadOptions(**options.reading)
    for url in urls:

        def record(error: Exception, url: str = url) -> bool:
            faults.append(ShardFault(redact(url), type(error).__name__, "", "", str(error)))
            return True

        for sample in read_samples([url], scan, on_error=record, on_duplicate="first", on_repeated_key="ignore"):
            meter.add(samples=1)
            yield sample
        meter.add(shards=1)


def draw_samples(samples: Iterable[Sample], count: int, seed: int) -> tuple[list[Sample], list[int]]:
    """Draw samples uniformly without replacement; return them in order, with the sizes of all samples.

    >>> draw_samples(({"__key__": f"{number}", "txt": b"x"} for number in range(9)), 2, seed=0)
    ([{'__key__': '2', 'txt': b'x'}, {'__key__': '4', 'txt': b'x'}], [1, 1, 1, 1, 1, 1, 1, 1, 1])
    """
    rng = Random(seed)
    drawn: dict[int, tuple[int, Sample]] = {}
    sizes: list[int] = []
    for number, sample in enumerate(samples):
        sizes.append(sum(len(value) for name, value in sample.items() if name[:2] != "__"))
        place = number if number < count else rng.randrange(number + 1)
        if place < count:
            drawn[place] = number, sample
    return [sample for _, sample in sorted(drawn.values(), key=itemgetter(0))], sizes


def sheet_as_html(samples: Sequence[Sample], title: str, facts: Mapping[str, str]) -> str:
    """Return a self-contained page of samples, whose contents can neither run code nor break the page.

    Args:
        samples: the samples.
        title: the title of the page.
        facts: names and values.
    """
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return page.substitute(
        policy=POLICY,
        title=escape_text(title),
        facts="".join(
            f"<div><dt>{escape_text(name)}</dt><dd>{escape_text(value)}</dd></div>" for name, value in facts.items()
        ),
        samples=f"<div>{''.join(map(sample_as_html, samples))}</div>" if samples else "<p>There are no samples.</p>",
    )


def find_sample(urls: list[str], key: str | None, number: int, options: ReadArguments) -> tuple[Sample, int]:
    """Read shards up to a sample and return it with its position."""
    at, scan = -1, ReadOptions(**options.reading)
    for at, sample in enumerate(read_samples(urls, scan, on_duplicate="first", on_repeated_key="ignore")):
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
    """Print a line for each field, with its content next to it or below."""
    size = human_bytes(sum(field.size for field in fields))
    shard, key = printable(redact(sample["__url__"])), printable(sample["__key__"])
    sys.stdout.write(f"{shard}: sample {position:,}, {key}, {size}\n")
    names = [printable(field.field) for field in fields]
    sizes = [human_bytes(field.size) for field in fields]
    name_width, size_width = max(map(len, names), default=0), max(map(len, sizes), default=0)
    for field, name, size_text in zip(fields, names, sizes, strict=True):
        line = f"{name:{name_width}}  {size_text:>{size_width}}  {printable(field.kind)}"
        text = field.text.replace("\r\n", "\n").replace("\t", "    ").rstrip("\n")
        lines = [printable(each) for each in text.split("\n")] if field.text else []
        if len(lines) == 1 and len(line) + len(lines[0]) < WIDTH:
            line, lines = f"{line}: {lines[0]}", []
        sys.stdout.write(f"{line}\n")
        for text in (*lines, *([printable(field.error)] if field.error else ())):
            sys.stdout.write(f"    {text}\n")
