"""Pipelines, loaders, cuts and formats, drawn with a seed."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from pipeline_model import Steps, ends_early, others_of, population, shards_of, splits


class Topology(NamedTuple):
    """The numbers of ranks and of workers per rank that read; without workers, the ranks themselves read."""

    ranks: int
    workers: int


#: The formats in which the states of a loader are saved, apart from those of its reading service.
FORMATS = {
    "DataLoader2": ["pickle", "service", "service json"],
    "StatefulShards": ["pickle", "json"],
    "StatefulDataLoader": ["pickle"],
}


class Options(NamedTuple):
    """The prefetching of a loader, and the lifetime of its workers and snapshots."""

    prefetch: int = 2
    is_persistent: bool = False
    snapshot: int = 1


class Case(NamedTuple):
    """One case: a pipeline in a loader, the cuts at which it is interrupted, and how it is resumed.

    Attributes:
        broken: the numbers of items after which the loop leaves the first epochs, if at all.
        distributed: whether a single rank is said to be rank 0 of 1, when it saves and when it resumes.
    """

    seed: int
    steps: Steps
    loader: str
    topology: Topology
    batch: tuple[int, bool] | None
    cuts: tuple[tuple[int, int], ...]
    format: str
    resuming: str
    resumed: Topology
    is_merged: bool
    then: int
    second_format: str
    last: Topology
    broken: tuple[int, ...]
    options: Options
    distributed: tuple[bool, bool]


def names_of(steps: Steps) -> list[str]:
    """Return the names of all steps, including those of mixed pipelines."""
    return [
        name for step in steps for name in (step[0], *(each for other in others_of(step) for each in names_of(other)))
    ]


def holds(steps: Steps) -> bool:
    """Whether a stage buffers items without a state, so that a pipeline resumes by replay, if at all."""
    return bool({"compose", "unbatch", "mux", "zip", "torch_shuffle", "prefetch", "own"} & {*names_of(steps)})


#: Policies for damaged shards; those with two words and more are functions of webdataset.
HANDLERS = ["skip", "warn", "budget", "ignore_and_continue", "warn_and_continue", "ignore_and_stop", "warn_and_stop"]
#: The maximum number of workers per rank.
WORKERS = 3
#: Steps that read shards.
LOADERS = ("load", "load_records")


def must_resume(steps: Steps) -> bool:
    """Whether a pipeline has a state, according to the documentation."""
    names = [name for name, *_ in steps]
    if holds(steps):
        return False
    if "split" in names and any(name in LOADERS for name in names[: names.index("split")]):
        return False
    # Buffered items are read again through an earlier stage, whose state has changed since.
    if "sorted" in names and {"shuffle_samples", "buckets"} & {*names[names.index("sorted") :]}:
        return False
    mixed = [other for step in steps for other in others_of(step)]
    return all(must_resume(other) and "with_epoch" not in names_of(other) for other in mixed)


#: Steps of pipelines that other ranks and workers can resume.
RESHARDED = {
    "indexed", "list", "shuffle", "split", "load", "load_records", "shuffle_samples", "tag",
    "keep", "flaky", "draw", "decode", "select", "to_tuple", "key", "batch", "buckets", "mix", "sorted",
}  # fmt: skip


def must_reshard(steps: Steps) -> bool:
    """Whether other ranks or workers can resume in the middle of an epoch, according to the documentation."""
    names = {*names_of(steps)}
    # An error that ends the stage is not part of its state.
    is_left = not mixes_until(steps, "first", "never") and not ends_early(steps)
    return must_resume(steps) and splits(steps) and names <= RESHARDED and is_left


def mixes_until(steps: Steps, *stops: str) -> bool:
    """Whether one of the mixtures ends in such a way."""
    return any(
        (step[0] == "mix" and step[2] in stops) or any(mixes_until(other, *stops) for other in others_of(step))
        for step in steps
    )


def draw_case(seed: int) -> Case:
    """Draw a case."""
    rng = Random(seed)
    steps = draw_steps(rng)
    loader = rng.choice(["DataLoader2"] * 4 + ["StatefulShards"] * 4 + ["StatefulDataLoader"] * 2)
    loader = rng.choice([loader] * 7 + ["pipeline", "DataLoader"])
    ranks = 2 if loader != "pipeline" and rng.random() < 0.15 else 1
    topology = Topology(ranks, 0 if loader == "pipeline" else rng.choice([0, 1, 2, 2, 2, 3]))
    batch = None
    if (
        loader in ("StatefulShards", "StatefulDataLoader")
        and not {"batch", "buckets"} & {*names_of(steps)}
        and rng.random() < 0.4
    ):
        batch = (rng.randint(1, 6), rng.random() < 0.2)
    others = ["StatefulShards", "StatefulDataLoader"] if batch else ["DataLoader2", "StatefulShards"]
    resuming = rng.choice([loader, loader, *others])
    if resuming == "StatefulDataLoader" and loader != resuming:
        resuming = "StatefulShards"  # a StatefulDataLoader accepts only its own states
    resumed = topology
    if rng.random() < 0.35:
        resumed = Topology(rng.choice([1, ranks, 3 - ranks] if ranks > 1 else [1, 1, 1, 2]), rng.choice([0, 1, 2, 3]))
    form = rng.choice(FORMATS.get(loader, ["pickle"]))
    # A DataLoader2 saves a state in the format that it loaded.
    is_whole = loader == "DataLoader2" and not form.startswith("service")
    second = FORMATS.get(resuming, ["pickle"])
    if resuming == "DataLoader2":
        second = [each for each in second if each.startswith("service") != is_whole]
    cuts = {draw_cut(rng) for _ in range(rng.randint(1, 2))}
    if ranks > 1:  # states before the first step belong to no rank
        cuts = {(epoch, count or 1) for epoch, count in cuts}
    last = resumed
    if resuming != "StatefulDataLoader" and rng.random() < 0.2:
        last = Topology(1, rng.choice([0, 1, 2, 3]))
    # Only a StatefulDataLoader replays the steps since a snapshot.
    is_whole = resuming == loader == "StatefulDataLoader" and resumed == topology == last and ranks == 1
    options = Options(rng.choice([1, 2, 10]), rng.random() < 0.3, rng.choice([1, 3]) if is_whole else 1)
    return Case(
        seed=seed,
        steps=steps,
        loader=loader,
        topology=topology,
        batch=batch,
        cuts=tuple(sorted(cuts)),
        format=form,
        resuming=resuming,
        resumed=resumed,
        is_merged=max(ranks, resumed.ranks) > 1 or (options.snapshot == 1 and rng.random() < 0.2),
        then=rng.choice([0, 1, 3, 8, 1000]),
        second_format=rng.choice(second),
        last=last,
        broken=tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 2))) if rng.random() < 0.25 else (),
        options=options,
        distributed=(rng.random() < 0.3, rng.random() < 0.3),
    )


def draw_cut(rng: Random) -> tuple[int, int]:
    """Draw an epoch and a number of items; 1000 stands for all items and the end."""
    return rng.randrange(2), rng.choice([0, 1, rng.randint(2, 40), rng.randint(2, 15), 1000])


def draw_steps(rng: Random) -> Steps:
    steps = draw_source(rng, "a")
    if rng.random() < 0.25:
        is_endless = rng.random() < 0.3
        others = [draw_source(rng, name) for name in "bc"[: rng.randint(1, 2)]]
        # If one source is split, all are; otherwise, some parts would come once, and others in each worker.
        others = [other for other in others if is_split(other) == is_split(steps)]
        weights = tuple(rng.randint(1, 5) for _ in range(1 + len(others))) if rng.random() < 0.4 else None
        if others and rng.random() < 0.8 and all(has_each_pass(each) for each in (steps, *others)):
            stop = "never" if is_endless else rng.choice(["all", "all", "first"])
            steps = (*steps, ("mix", weights, stop, *others))
        elif others and not any(map(has_no_end, others)) and rng.random() < 0.7:
            steps = (*steps, (rng.choice(["mux", "zip"]), None, "first", *others))
    return steps + draw_later(rng, steps)


def is_split(steps: Steps) -> bool:
    return bool({"split", "resample", "indexed"} & {name for name, *_ in steps})


def has_each_pass(steps: Steps) -> bool:
    """Whether all passes over a source yield something, so that a stage that restarts it makes progress."""
    drops = any(step[0] in ("slice", "rsample", "mux", "zip") or step[::2] == ("batch", True) for step in steps)
    # Workers take whole batches, and the same ones in each pass.
    few = any(step[6] or sum(step[2]) < WORKERS * (step[3] or 2) for step in steps if step[0] == "indexed")
    is_uneven = "indexed" in names_of(steps) and "keep" in names_of(steps)
    is_uneven |= mixes_until(steps, "first")  # one of its sources may be empty
    return bool(population(steps)) and not (drops or few or is_uneven or ends_early(steps))


def draw_source(rng: Random, name: str) -> Steps:
    """Draw shards and the stages up to samples; one source may be mixed from two others."""
    if len(name) == 1 and rng.random() < 0.05:
        one, other = draw_source(rng, f"{name}x"), draw_source(rng, f"{name}y")
        if is_split(one) == is_split(other) and not has_no_end(other) and not has_no_end(one):
            return (*one, ("mix", None, rng.choice(["all", "first"]), other))
    sizes = tuple(rng.choice([0, 1, 3, 5, 12, rng.randint(0, 12)]) for _ in range(rng.randint(1, 8)))
    if rng.random() < 0.2:
        return draw_indexed(rng, name, sizes)
    kind = rng.choice(["pattern", "pattern", "urls", "IterableWrapper", "FileLister", "gz", "pipe", "records"])
    if kind == "records":
        sizes = tuple(size or 1 for size in sizes)  # since a record shard is never empty
    steps: Steps = (("list", kind, name, sizes),)
    is_filled = sum(map(bool, sizes)) * 2 > len(sizes)
    if is_filled and rng.random() < 0.1:
        count = rng.choice([None, rng.randint(1, 6)])
        return (*steps, ("resample", count, rng.randrange(3)), draw_loader(rng, kind))
    damaged = draw_damage(rng, sizes) if kind in ("pattern", "urls", "IterableWrapper", "FileLister") else ()
    if damaged:
        steps = (("list", kind, name, sizes, damaged),)
    steps += (("shuffle",),) if rng.random() < 0.6 else ()
    place = rng.choices(["urls", "samples", "nowhere"], [86, 9, 5])[0]
    steps += (("split",),) if place == "urls" else ()
    loader = draw_loader(rng, kind)
    if damaged:
        on_error = rng.choice(HANDLERS)
        # In turns, an error that ends the stage leaves parts of several shards.
        open_shards = 1 if on_error.endswith("stop") else (*loader, 1)[1]
        loader = ("load", open_shards, on_error)
    steps += (loader,)
    if place == "samples":
        steps += (("split",),)
    if rng.random() < 0.15:
        steps += draw_step(rng, rng.choice(["keep", "flaky", "shuffle_samples"]))
    return steps


def draw_indexed(rng: Random, name: str, sizes: tuple[int, ...]) -> Steps:
    """Draw a dataset that is read by its indexes, with at least one global batch for two ranks."""
    remainder, size = rng.choice(["drop", "drop", "pad", "keep"]), rng.choice([None, 2, 4, 6, 12])
    sizes = (*sizes, max((size or 2) - sum(sizes), 1))
    order, excluded = rng.choice(["global", "window", "sequential"]), list[str]()
    if remainder == "keep" and rng.random() < 0.6:  # in their places, others would come, and the model knows no order
        keys = [each["__key__"] for shard in shards_of(name, sizes) for each in shard]
        excluded = rng.sample(keys, rng.randint(0, len(keys) // 2))
    return (("indexed", name, sizes, size, remainder, order, tuple(excluded)),)


def draw_damage(rng: Random, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Draw the truncated shards and the number of samples before each cut; -1 means that a shard is not an archive."""
    if rng.random() < 0.85:
        return ()
    return tuple((shard, rng.choice([-1, rng.randrange(size)])) for shard, size in enumerate(sizes) if size % 3)


def draw_loader(rng: Random, kind: str) -> tuple[Any, ...]:
    """Draw the number of open shards."""
    name = "load_records" if kind == "records" else "load"
    return (name, rng.choice([2, 3, 9])) if rng.random() < 0.25 else (name,)


def draw_step(rng: Random, name: str) -> Steps:
    """Draw the arguments of a step."""
    size = rng.choice([1, 2, 4, 7, 30])
    arguments: dict[str, tuple[Any, ...]] = {
        "keep": (rng.randint(2, 4),),
        "shuffle_samples": (size, rng.randint(1, size)),
        "rsample": (rng.choice([0.3, 0.8]),),
        "slice": rng.choice([(rng.randint(1, 20),), (rng.randint(0, 3), rng.randint(3, 20), rng.randint(1, 3))]),
        "batch": (rng.randint(1, 6), rng.random() < 0.2),
        "buckets": (rng.randint(1, 4),),
        **dict.fromkeys(("torch_shuffle", "prefetch", "sorted"), (size,)),
    }
    return ((name, *arguments.get(name, ())),)


#: The stages after a source, in their order, each with its probability.
LATER = [
    ("tag", 0.2), ("flaky", 0.2), ("keep", 0.2), ("slice", 0.08), ("flaky", 0.1), ("shuffle_samples", 0.5),
    ("flaky", 0.1), ("sorted", 0.08), ("draw", 0.15), ("own", 0.04), ("torch_shuffle", 0.04), ("prefetch", 0.04),
    ("decode", 0.5), ("flaky", 0.1), ("shuffle_samples", 0.05), ("rsample", 0.05), ("flaky", 0.1), ("compose", 0.05),
    ("select", 0.1),
]  # fmt: skip


def draw_later(rng: Random, steps: Steps) -> Steps:
    """Draw the stages after the source."""
    later: Steps = ()
    for name, probability in LATER:
        later += draw_step(rng, name) if rng.random() < probability else ()
    kind = rng.choice(["sample", "key", "key", "to_tuple"])
    if kind == "to_tuple" and pads(steps):
        kind = "key"  # a tuple does not say that it is padding
    if kind != "sample":
        later += ((kind,),)
    if rng.random() < 0.4:
        ((name, size, *others),) = draw_step(rng, rng.choice(["batch", "batch", "buckets"]))
        is_declared = any(step[0] == "indexed" and step[3] for step in steps)
        if is_declared:  # other batches than the parts of one rank or two are refused, unless they are taken apart
            name, others = "batch", [False]
        later += ((name, size, *others),)
        if rng.random() < 0.2 or is_declared:
            later += (("unbatch",),)
    is_endless = has_no_end((*steps, *later))
    if is_endless:  # drop no items by position here, because they could be all that a process has
        later = tuple((*step[:2], False) if step[0] == "batch" else step for step in later)
        later = tuple(step for step in later if step[0] not in ("slice", "keep"))
    if is_endless or (rng.random() < 0.15 and has_each_pass((*steps, *later))):
        later += (("with_epoch", rng.randint(1, 40)),)
    elif rng.random() < 0.06:
        later += draw_step(rng, "slice")
    return later


def pads(steps: Steps) -> bool:
    """Whether some samples only pad a batch."""
    return any((step[0] == "indexed" and step[4] == "pad") or any(map(pads, others_of(step))) for step in steps)


def has_no_end(steps: Steps) -> bool:
    """Whether a pass over a pipeline is endless."""
    return any(
        step[:2] == ("resample", None) or (step[0] == "mix" and (step[2] == "never" or any(map(has_no_end, step[3:]))))
        for step in steps
    )
