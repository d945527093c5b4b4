"""What the results of a benchmark say about the number of workers, and about what to change."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from wds_datapipes.benchmark.measure import LOADER, Delivery, ShardBenchmark

#: The stages that decode.
DECODERS = (".wds_decode", ".decode_batch")
#: A rate counts as the best if it is at least this fraction of it.
NEARLY = 0.95
#: The headroom that keeps a loop from waiting at a slow shard.
ENOUGH = 1.2
#: A stage with this fraction of the time is the bottleneck.
MOST = 0.5
#: A main process that computes for this fraction of the time is the bottleneck.
BUSY = 0.9
#: Images with more pixels are worth decoding at a fraction of their size.
LARGE_IMAGE = 1_000_000


def headroom(delivery: Delivery, step_s: float, batch_size: int) -> float:
    """Return how many times as many samples arrive as training steps consume."""
    return delivery.samples_per_s * step_s / batch_size


def best_delivery(found: ShardBenchmark, *, step_s: float | None, batch_size: int) -> Delivery:
    """Return the one with the fewest workers that suffices for the steps, or else that is about as fast as the best.

    Without workers, the loop would load each batch between two steps, so that is chosen only if nothing else was
    measured.
    """
    fewest_first = sorted(each for each in found.deliveries if each.workers) or sorted(found.deliveries)
    if step_s is not None:
        enough = [each for each in fewest_first if headroom(each, step_s, batch_size) >= ENOUGH]
        if enough:
            return enough[0]
    best = max(each.samples_per_s for each in fewest_first)
    return next(each for each in fewest_first if each.samples_per_s >= NEARLY * best)


def recommend(
    found: ShardBenchmark,
    *,
    step_s: float | None = None,
    batch_size: int = 64,
    cores: int,
    urls_are_local: bool = True,
    has_turbo: bool | None = None,
) -> list[str]:
    """Return sentences on what to change, the most important first.

    Args:
        found: the results.
        step_s: the time of a training step in seconds, if it is known.
        batch_size: the number of samples in a step.
        cores: the number of processors.
        urls_are_local: whether all shards are local files.
        has_turbo: whether the extra ``turbo`` is installed; found out by default.
    """
    if not found.deliveries:
        return []
    best = best_delivery(found, step_s=step_s, batch_size=batch_size)
    names = f"{best.workers} worker{'s' * (best.workers != 1)}"
    if step_s is None:
        advice = [f"Use {names}: {best.samples_per_s:,.0f} samples per second."]
    else:
        times = headroom(best, step_s, batch_size)
        steps = f"{times:.1f} times as many samples as steps of {step_s:g} s consume"
        if times >= ENOUGH:
            return [f"{names} suffice{'s' * (best.workers == 1)}: {steps}."]
        advice = [f"The steps wait for data: at best, with {names}, {steps[0].lower()}{steps[1:]}."]
    if best.workers and best.loop_share >= BUSY:
        advice.append(
            f"The main process is busy receiving samples for {best.loop_share:.0%} of the time, so more workers do not "
            f"help: smaller samples do, such as crops, or fewer fields."
        )
    elif best.workers and best.workers == max(each.workers for each in found.deliveries) < cores:
        advice.append(f"More workers may be faster: this machine has {cores} processors.")
    if found.shards < best.workers:
        advice.append(
            f"There are fewer shards than workers, {found.shards} for {best.workers}: write smaller shards, at least "
            f"one for each worker of each rank."
        )
    return advice + _bottleneck(found, urls_are_local, _has_turbo() if has_turbo is None else has_turbo)


def _bottleneck(found: ShardBenchmark, urls_are_local: bool, has_turbo: bool) -> list[str]:
    """Return what to do about the stage that takes most of the time."""
    advice = []
    total = found.sample_s or 1.0
    if sum(found.stages.get(name, 0.0) for name in DECODERS) / total >= MOST:
        if not has_turbo and any(name.lower().rpartition(".")[2] in ("jpg", "jpeg") for name in found.images):
            advice.append('Decoding takes most of the time: the extra "turbo" decodes JPEG in two thirds of it.')
        if found.image_pixels > LARGE_IMAGE:
            advice.append(
                f"Images have {found.image_pixels / 1e6:.1f} megapixels on average: if the model needs fewer, decode "
                f"them at a fraction of their size with min_size, or write them smaller."
            )
        if not advice:
            advice.append("Decoding takes most of the time: only more processors, or smaller images, make it faster.")
    elif sum(found.stages.get(name, 0.0) for name in ("open", LOADER)) / total >= MOST and found.processor_share < MOST:
        where = "the disk" if urls_are_local else "the store"
        advice.append(f"Most of the time, one process waits for {where}: more workers read more at once.")
        if not urls_are_local:
            advice.append(".cache_wds_shards() keeps local copies for the next epochs.")
    unused = {name: size for name, size in found.fields.items() if name not in found.images}
    largest = max(unused, key=lambda name: unused[name], default=None)
    if largest is not None and unused[largest] > MOST * found.sample_bytes:
        share = unused[largest] / found.sample_bytes
        advice.append(f"The field {largest!r} has {share:.0%} of the bytes: if you do not need it, do not read it.")
    return advice


def _has_turbo() -> bool:
    return importlib.util.find_spec("simplejpeg") is not None


def facts_of(found: ShardBenchmark, advice: list[str], *, step_s: float | None, batch_size: int) -> Mapping[str, Any]:
    """Return the results for JSON."""
    total = found.sample_s or 1.0
    stages = {name: {"seconds_per_sample": seconds, "share": seconds / total} for name, seconds in found.stages.items()}
    deliveries = [
        {
            **each._asdict(),
            "loop_share": each.loop_share,
            "bytes_per_s": each.samples_per_s * found.sample_bytes,
            "headroom": None if step_s is None else headroom(each, step_s, batch_size),
        }
        for each in found.deliveries
    ]
    skipped = dict(found.skipped.counts)
    return {**vars(found), "stages": stages, "deliveries": deliveries, "skipped": skipped, "recommendation": advice}
