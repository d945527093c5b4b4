"""The command ``bench``: measure how fast shards are read, decoded and delivered."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from wds_datapipes.benchmark.advice import facts_of, headroom, recommend
from wds_datapipes.benchmark.measure import BenchmarkOptions, ShardBenchmark, measure_shards
from wds_datapipes.cli._app import FAULT_FOUND, WrongUse, printable
from wds_datapipes.cli._declaration import Positive
from wds_datapipes.cli._options import LimitedArguments, load_function
from wds_datapipes.cli._report import plural, print_error, print_json, print_table
from wds_datapipes.codecs.images import IMAGE_SPECS
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.io.local import local_path
from wds_datapipes.parallel.progress import human_bytes

#: The minimum number of passes over the shards that the output mentions.
REPEATED = 2
#: The width of the longest bar, and of text that is not for a terminal.
WIDTH, TEXT_WIDTH = 30, 100


def bench(
    shards: list[str],
    options: LimitedArguments,
    num_workers: str = "",
    decode: str = "torchrgb8",
    crop: Positive | None = None,
    min_size: Positive | None = None,
    pipeline: str | None = None,
    batch_size: Positive = 64,
    step_time: float | None = None,
    seconds: float = 5.0,
    cold: bool = False,
) -> None:
    """Measure how fast shards are read, decoded and delivered.

    Prints the time of each stage in one process, the rate of each number of workers, and a recommendation. With
    --pipeline, it measures the pipeline of your training.

    Options:
        --num-workers LIST: Numbers of workers, such as 0,2,4; by default up to one per CPU.
        --decode SPEC: How images are decoded, such as rgb8 or pil; none: not at all.
        --crop PIXELS: Random resized crops of this size.
        --min-size PIXELS: Decode JPEG at a fraction of its size whose short side has this many.
        --pipeline MODULE:FUNCTION: Measure your own pipeline, which this function returns for the list of shards.
        --batch-size NUMBER: Samples in a batch.
        --step-time SECONDS: The time of a training step, to compare with.
        --seconds SECONDS: The duration of each measurement.
        --cold: Read from the disk, not from the page cache; for local shards.
    """
    if not 0 < seconds < float("inf") or (step_time is not None and not 0 < step_time < float("inf")):
        raise WrongUse("--seconds and --step-time must be positive numbers of seconds")
    cores = len(os.sched_getaffinity(0))
    counts = parse_workers(num_workers, cores)
    if decode not in (*IMAGE_SPECS, "none"):
        raise WrongUse(f"--decode must be none or one of {', '.join(IMAGE_SPECS)}, not {decode!r}")
    if pipeline is not None and (crop or min_size or cold or decode != "torchrgb8"):
        raise WrongUse("--pipeline measures your own pipeline, so --decode, --crop, --min-size and --cold do not apply")
    urls = options.list_shards(shards)
    remote = next((url for url in urls if local_path(url) is None), None)
    if cold and remote is not None:
        raise WrongUse(f"--cold drops local shards from the page cache, but {printable(remote)} is not a local file")
    if remote == "-":
        raise WrongUse("bench reads shards more than once, but standard input can be read only once")
    reading = options.reading
    del reading["key_rule"]
    setting = BenchmarkOptions(
        spec=None if decode == "none" else decode,
        crop=crop,
        min_size=min_size,
        batch_size=batch_size,
        seconds=seconds,
        cold=cold,
        reading=reading,
        key_rule=options.rule,
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
        if found.fields and options.json:
            print_json(facts_of(found, advice, step_s=step_time, batch_size=batch_size))
        elif found.fields:
            print_results(found, advice, step_time, batch_size, is_warm=remote is None and not cold)
        sys.stdout.flush()
        if found.skipped.total:
            reason = found.skipped.latest[-1].reason
            print_error(f"{plural(found.skipped.total, 'sample')} skipped, such as: {reason}")
    if found.skipped.total:
        raise SystemExit(FAULT_FOUND)


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
    """Parse ``--num-workers``; the default is 0, 1, 2, 4 and so on, up to the number of processors.

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
        raise WrongUse(f"--num-workers must be numbers of processes, such as 0,2,4, not {text!r}")
    return counts


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
