"""The command ``bench``: measure how fast shards are read, decoded and delivered."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from wds_datapipes.codecs.images import IMAGE_SPECS
from wds_datapipes.errors import plural
from wds_datapipes.hints import Message
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.system import processor_count
from wds_datapipes.tools.bench.measure import BenchmarkOptions, ShardBenchmark, measure_shards
from wds_datapipes.tools.cli.errors import FAULT_FOUND, WrongUse, printable
from wds_datapipes.tools.cli.options.read import READ, ReadArguments, Shards
from wds_datapipes.tools.cli.options.values import Positive, load_function, metavar
from wds_datapipes.tools.cli.printing import print_error, print_json, print_table


def bench(
    *shards: Shards,
    num_workers: Annotated[str, metavar("LIST")] = "",
    decode: Annotated[str, metavar("SPEC")] = "torchrgb8",
    crop: Annotated[Positive | None, metavar("PIXELS")] = None,
    pipeline: Annotated[str | None, metavar("MODULE:FUNCTION")] = None,
    batch_size: Positive = 64,
    step_time: Annotated[float | None, metavar("SECONDS")] = None,
    seconds: Annotated[float, metavar("SECONDS")] = 5.0,
    options: ReadArguments = READ,
) -> None:
    """Measure how fast shards are read, decoded and delivered.

    Prints the time of each stage in one process and the rate for each number of workers. With --pipeline, measures
    the pipeline of your training, whose items are batches of --batch-size samples.

    Args:
        num_workers: The numbers of workers to measure, such as 0,2,4; by default, up to one per CPU.
        decode: How to decode images, such as rgb8 or pil; none does not decode them.
        crop: Take random resized crops of this size.
        pipeline: Measure the pipeline that this function returns for a list of shards.
        batch_size: The number of samples in a batch.
        step_time: The duration of a training step, to compare with.
        seconds: The duration of each measurement.
    """
    if not 0 < seconds < float("inf") or (step_time is not None and not 0 < step_time < float("inf")):
        raise WrongUse("--seconds and --step-time must be positive numbers of seconds")
    counts = parse_workers(num_workers, processor_count())
    if decode not in (*IMAGE_SPECS, "none"):
        raise WrongUse(f"--decode must be none or one of {', '.join(IMAGE_SPECS)}, not {decode!r}")
    if pipeline is not None and (crop or decode != "torchrgb8"):
        raise WrongUse("--pipeline measures your own pipeline, so --decode and --crop do not apply")
    urls = options.list_shards(shards)
    if "-" in urls:
        raise WrongUse("bench reads shards more than once, but standard input can be read only once")
    reading = options.reading
    del reading["key_rule"]
    setting = BenchmarkOptions(
        spec=None if decode == "none" else decode,
        crop=crop,
        batch_size=batch_size,
        seconds=seconds,
        reading=reading,
        key_rule=options.rule,
        pipeline=None if pipeline is None else load_function(pipeline, "--pipeline"),
    )
    found = ShardBenchmark(len(urls))
    try:
        for found in measure_shards(urls, counts, setting):  # noqa: B007  shown below, even if interrupted
            pass
    finally:
        if found.fields and options.json:
            print_json(facts_of(found, step_time, batch_size))
        elif found.fields:
            print_results(found, step_time, batch_size)
        if found.skipped.total:
            reason = found.skipped.latest[-1].reason
            print_error(Message(f"{plural(found.skipped.total, 'sample')} skipped, such as: ", reason))
    if found.skipped.total:
        raise SystemExit(FAULT_FOUND)


def parse_workers(text: str, cores: int) -> list[int]:
    """Parse ``--num-workers``; the default is 0, 1, 2, 4 and so on, up to the number of processors.

    >>> parse_workers("4,0", 2), parse_workers("", 6)
    ([0, 4], [0, 1, 2, 4, 6])
    """
    if not text:
        return sorted({0, cores, *(2**power for power in range(cores.bit_length()))})
    words = [word.strip() for word in text.split(",")]
    if not all(map(str.isdecimal, words)):
        raise WrongUse(f"--num-workers must be numbers of processes, such as 0,2,4, not {text!r}")
    return sorted(set(map(int, words)))


def facts_of(found: ShardBenchmark, step_s: float | None, batch_size: int) -> dict[str, Any]:
    """Return the results for JSON."""
    shares = found.shares
    stages = {name: {"seconds_per_sample": value, "share": shares[name]} for name, value in found.stages.items()}
    deliveries = [
        {**each._asdict(), "headroom": None if step_s is None else each.headroom(step_s, batch_size)}
        for each in found.deliveries
    ]
    return {**vars(found), "stages": stages, "deliveries": deliveries, "skipped": dict(found.skipped.counts)}


def print_results(found: ShardBenchmark, step_s: float | None, batch_size: int) -> None:
    """Print the results."""
    fields = ", ".join(f"{printable(name)} ({human_bytes(size)})" for name, size in found.fields.items())
    sys.stdout.write(f"{plural(found.shards, 'shard')}; a sample has {fields}\n")
    if found.stages:
        rows = [
            (name, f"{1e3 * seconds:.3f}", f"{found.shares[name]:.1%}", "#" * round(30 * found.shares[name]))
            for name, seconds in found.stages.items()
        ]
        sys.stdout.write("\n")
        print_table([("in one process", "ms/sample", "share", ""), *rows], left=(0, 3))
    if found.deliveries:
        sys.stdout.write("\n")
        lines = [
            (
                f"{each.workers}",
                f"{each.samples_per_s:,.0f}",
                f"{each.samples_per_s * found.sample_bytes / 1e6:,.1f}",
                f"{each.first_batch_s:.2f} s",
                f"{each.loop_share:.0%}" if each.workers else "",
                "" if step_s is None else f"{each.headroom(step_s, batch_size):.1f} x",
            )
            for each in found.deliveries
        ]
        headings = ("workers", "samples/s", "MB/s", "first batch", "loop busy", "headroom" if step_s else "")
        print_table([headings, *lines], left=())
