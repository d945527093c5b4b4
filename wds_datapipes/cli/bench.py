"""The command ``bench``: measure how fast shards are read, decoded and delivered."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from wds_datapipes.benchmark.advice import facts_of, headroom, recommend
from wds_datapipes.benchmark.measure import BenchmarkOptions, ShardBenchmark, measure_shards
from wds_datapipes.benchmark.page_cache import find_remote
from wds_datapipes.benchmark.plot import plot_results, require_matplotlib
from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, on_one_line, printable
from wds_datapipes.cli._functions import load_function
from wds_datapipes.cli._meter import plural
from wds_datapipes.cli._options import LimitedOptions, Shards
from wds_datapipes.cli.stats import print_table
from wds_datapipes.codecs.images import IMAGE_SPECS
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.parallel.progress import human_bytes

__all__ = ["bench"]

#: The minimum number of passes over the shards that the output mentions.
REPEATED = 2
#: The width of the longest bar, and of text that is not for a terminal.
WIDTH, TEXT_WIDTH = 30, 100

PLOT_EXTENSIONS = (".png", ".svg", ".pdf")


def bench(
    shards: Shards,
    options: LimitedOptions,
    workers: Annotated[
        str,
        typer.Option(
            "--workers", metavar="LIST", help="Numbers of workers, such as 0,2,4; by default up to one per CPU."
        ),
    ] = "",
    decode: Annotated[
        str,
        typer.Option("--decode", metavar="SPEC", help="How images are decoded, such as rgb8 or pil; none: not at all."),
    ] = "torchrgb8",
    crop: Annotated[
        int | None,
        typer.Option("--crop", min=1, metavar="PIXELS", help="Random resized crops of this size.", show_default=False),
    ] = None,
    min_size: Annotated[
        int | None,
        typer.Option(
            "--min-size",
            min=1,
            metavar="PIXELS",
            help="Decode JPEG at a fraction of its size whose short side has this many.",
            show_default=False,
        ),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            "--pipeline",
            metavar="MODULE:FUNCTION",
            help="Measure your own pipeline, which this function returns for the list of shards.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, metavar="NUMBER", help="Samples in a batch.")] = 64,
    step_time: Annotated[
        float | None,
        typer.Option(
            "--step-time", metavar="SECONDS", help="The time of a training step, to compare with.", show_default=False
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", help="The duration of each measurement.")
    ] = 5.0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Read from the disk, not from the page cache; for local shards.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Plot the results, as PNG, SVG or PDF.", show_default=False),
    ] = None,
) -> None:
    """Measure how fast shards are read, decoded and delivered.

    Prints the time of each stage in one process, the rate of each number of workers, and a recommendation. With
    --pipeline, it measures the pipeline of your training.
    """
    if not 0 < seconds < float("inf") or (step_time is not None and not 0 < step_time < float("inf")):
        raise WrongUse("--seconds and --step-time must be positive numbers of seconds")
    cores = len(os.sched_getaffinity(0))
    counts = parse_workers(workers, cores)
    if plot is not None:
        check_plot(plot)
    if decode not in (*IMAGE_SPECS, "none"):
        raise WrongUse(f"--decode must be none or one of {', '.join(IMAGE_SPECS)}, not {decode!r}")
    if pipeline is not None and (crop or min_size or cold or decode != "torchrgb8"):
        raise WrongUse("--pipeline measures your own pipeline, so --decode, --crop, --min-size and --cold do not apply")
    urls = options.list_shards(shards)
    remote = find_remote(urls)
    if cold and remote is not None:
        raise WrongUse(f"--cold drops local shards from the page cache, but {printable(remote)} is not a local file")
    if remote == "-":
        raise WrongUse("bench reads shards more than once, but standard input can be read only once")
    reading = options.reading
    key_rule = reading.pop("key_rule")
    setting = BenchmarkOptions(
        spec=None if decode == "none" else decode,
        crop=crop,
        min_size=min_size,
        batch_size=batch_size,
        seconds=seconds,
        cold=cold,
        reading=reading,
        grouping={"key_rule": key_rule},
        pipeline=None if pipeline is None else load_pipeline(pipeline),
    )
    found = ShardBenchmark(len(urls))
    try:
        for step, found in enumerate(measure_shards(urls, counts, setting), 1):  # noqa: B007 - shown below, even if interrupted
            if sys.stderr.isatty():
                sys.stderr.write(f"\rMeasuring {min(step, len(counts) + 2)} of {len(counts) + 2} ")
                sys.stderr.flush()
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        advice = recommend(found, step_s=step_time, batch_size=batch_size, cores=cores, urls_are_local=remote is None)
        if found.fields and options.as_json:
            facts = facts_of(found, advice, step_s=step_time, batch_size=batch_size)
            sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        elif found.fields:
            print_results(found, advice, step_time, batch_size, is_warm=remote is None and not cold)
        sys.stdout.flush()
        if found.skipped.total:
            reason = on_one_line(found.skipped.latest[-1].reason)
            typer.echo(f"Error: {plural(found.skipped.total, 'sample')} skipped, such as: {reason}", err=True)
    if plot is not None:
        plot_results(plot, found)
    if found.skipped.total:
        raise typer.Exit(FAULT_FOUND)


def load_pipeline(reference: str) -> Callable[[list[str]], IterDataPipe[Any]]:
    """Import the function that returns a pipeline."""
    function = load_function(reference, "--pipeline")

    def build(urls: list[str]) -> IterDataPipe[Any]:
        pipe = function(urls)
        if not isinstance(pipe, IterDataPipe):
            raise WrongUse(f"{reference} must return a pipeline, an IterDataPipe, not {type(pipe).__name__}")
        return pipe

    return build


def parse_workers(text: str, cores: int) -> list[int]:
    """Parse ``--workers``; the default is 0, 1, 2, 4 and so on, up to the number of processors.

    >>> parse_workers("4,0", 2), parse_workers("", 6)
    ([0, 4], [0, 1, 2, 4, 6])
    """
    if not text:
        return sorted({0, cores, *(2**power for power in range(cores.bit_length()))})
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [-1]
    if counts[0] < 0:
        raise WrongUse(f"--workers must be numbers of processes, such as 0,2,4, not {text!r}")
    return counts


def check_plot(path: Path) -> None:
    """Check that a plot can be written, before anything is measured.

    Raises:
        WrongUse: the file has an unknown extension, or its directory does not exist.
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    if path.suffix.lower() not in PLOT_EXTENSIONS:
        raise WrongUse(f"--plot must end in {', '.join(PLOT_EXTENSIONS)}, unlike {str(path)!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise WrongUse(f"--plot cannot write {str(path)!r}: name a file in a directory that exists and can be written")


def print_results(
    found: ShardBenchmark, advice: list[str], step_s: float | None, batch_size: int, *, is_warm: bool
) -> None:
    """Print the results and the recommendation."""
    fields = ", ".join(f"{printable(name)} ({human_bytes(size)})" for name, size in found.fields.items())
    lines = [f"{plural(found.shards, 'shard')}; a sample has {fields}"]
    if found.raw_bytes_per_s:
        source = ", perhaps from the page cache (--cold reads from the disk)" if is_warm else ""
        lines.append(f"Reading without parsing: {human_bytes(found.raw_bytes_per_s)}/s{source}")
        repeated = f"; all shards were read {found.passes:,.0f} times" if found.passes >= REPEATED else ""
        lines.append(f"Opening a shard: {1e3 * found.open_s:.3g} ms{repeated}")
    print_wrapped(lines)
    if found.stages:
        sys.stdout.write("\n")
        total = found.sample_s
        rows: list[tuple[str, ...]] = [("in one process", "ms/sample", "share")]
        for name, seconds in (*found.stages.items(), ("all", total)):
            share = seconds / total if total else 0.0
            rows.append((name, f"{1e3 * seconds:.3f}", f"{share:.1%}"))
        print_with_bars(
            rows, [*(seconds / total if total else 0.0 for seconds in found.stages.values()), 0.0], left=(0,)
        )
    if found.deliveries:
        sys.stdout.write("\n")
        most = max(each.samples_per_s for each in found.deliveries)
        heading = ["workers", "samples/s", "MB/s", "of raw", "first batch", "loop busy", "memory"]
        rows = [(*heading, *(["headroom"] if step_s is not None else []))]
        for each in found.deliveries:
            rate = each.samples_per_s * found.sample_bytes
            memory = "" if each.worker_bytes is None else human_bytes(each.worker_bytes)
            cells = [
                f"{each.workers}",
                f"{each.samples_per_s:,.0f}",
                f"{rate / 1e6:,.1f}",
                f"{rate / found.raw_bytes_per_s:.1%}" if found.raw_bytes_per_s else "",
                f"{each.first_batch_s:.2f} s",
                f"{each.loop_share:.0%}" if each.workers else "",
                memory,
            ]
            if step_s is not None:
                cells.append(f"{headroom(each, step_s, batch_size):.1f} x")
            rows.append(tuple(cells))
        print_with_bars(rows, [each.samples_per_s / most for each in found.deliveries], left=())
    if advice:
        sys.stdout.write("\n")
        print_wrapped(advice)


def print_wrapped(sentences: Sequence[str]) -> None:
    """Print each sentence in lines that fit into the terminal."""
    for sentence in sentences:
        lines = textwrap.wrap(sentence, line_width(), break_long_words=False, break_on_hyphens=False)
        sys.stdout.write("\n".join(lines) + "\n")


def print_with_bars(rows: Sequence[tuple[str, ...]], shares: Sequence[float], left: tuple[int, ...]) -> None:
    """Print a table with a heading, and a bar for each row below it, as long as the terminal has room for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(0, min(WIDTH, line_width() - sum(widths) - 2 * len(widths)))
    bars = ["", *("#" * round(share * room) for share in shares)]
    print_table([(*row, bar) for row, bar in zip(rows, bars, strict=True)], left=(*left, len(widths)))


def line_width() -> int:
    """Return the width of the terminal, or of text for files and other programs."""
    return shutil.get_terminal_size((TEXT_WIDTH, 0)).columns
