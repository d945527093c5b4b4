"""Interrupts random loaders at random points, and resumes them in fresh processes. Prints the results as JSON.

    python randomised_cuts.py FOLDER --seed 0 --cuts 100 --ranks 2 --method fork

Each loader runs without interruption, then again with states saved at some points, then once for each state in a
process that has not read anything before. All runs must yield the same items, bit by bit, in that epoch and the next.
With several ranks, each rank is a process, and saves and loads its own states.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

# Silenced by the import above.
from torchdata.dataloader2 import DataLoader2  # isort: skip

#: The time limit of the processes of a trial, in seconds.
LIMIT_S = 300
CUTS_OF_A_TRIAL = 6

FORK = multiprocessing.get_context("fork")


class Trial(NamedTuple):
    """A loader whose parameters are drawn from one number."""

    urls: list[str]
    shuffled: bool
    resampled: int
    buffers: list[tuple[int, int]]
    filtered: bool
    batched: int
    drawing: bool
    workers: int
    method: str
    worker_prefetch: int
    main_prefetch: int
    seed: int | None


def drawn(rng: random.Random, number: int, method: str) -> Trial:
    """Draw a loader, and write its shards."""
    ending = rng.choice([".tar", ".tar", ".tar", ".tar.gz"])
    prefix = rng.choice(["", "", "", "pipe:cat "])
    urls = []
    for shard in range(rng.randint(1, 7)):
        name = f"{number}-{shard}{ending}"
        samples = [
            {"__key__": f"{shard}-{each}", "cls": str(each), "txt": "x" * rng.choice([0, 9, 600, 9000])}
            for each in range(rng.choice([0, 1, 5, 12, 20]))
        ]
        build_shard(name, samples)
        if ending == ".tar" and rng.random() < 0.1:  # the shard is truncated, and the rest of it is skipped
            os.truncate(name, rng.randrange(1, os.path.getsize(name)))
        urls.append(prefix + name)
    buffers = []
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        size = rng.choice([1, 2, 5, 16, 100])
        buffers.append((size, rng.randint(1, size)))
    return Trial(
        urls=urls,
        shuffled=rng.random() < 0.7,
        resampled=rng.choice([0, 0, 0, 0, 9]),
        buffers=buffers,
        filtered=rng.random() < 0.3,
        batched=rng.choice([0, 0, 3]),
        drawing=rng.random() < 0.3,
        workers=rng.choice([1, 2] if method == "spawn" else [0, 1, 2, 3]),
        method=method,
        worker_prefetch=rng.choice([0, 1, 10]),
        main_prefetch=rng.choice([0, 10]),
        seed=rng.randrange(1 << 30),
    )


def even(sample: dict[str, Any]) -> bool:
    return len(sample["txt"]) % 2 == 0


def augmented(sample: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return {**sample, "drawn": rng.random()}


def loader(trial: Trial, distributed: bool) -> Any:
    pipe: Any = ShardList(trial.urls)
    pipe = pipe.shuffle() if trial.shuffled else pipe
    pipe = pipe.resample_wds_shards(trial.resampled) if trial.resampled else pipe.sharding_filter()
    pipe = pipe.load_wds_shards(on_error="skip").group_samples()
    for number, (size, initial) in enumerate(trial.buffers):
        pipe = pipe.shuffle_samples(size, initial=initial)
        pipe = pipe.filter(even) if trial.filtered and number == 0 else pipe
    pipe = pipe.map_samples_with_rng(augmented) if trial.drawing else pipe
    pipe = pipe.batch(trial.batched) if trial.batched else pipe
    made = DataLoader2(pipe, reading_service=service(trial, distributed))
    made.seed(trial.seed)
    return made


def service(trial: Trial, distributed: bool) -> Any:
    return ShardReadingService(
        trial.workers,
        trial.method if trial.workers else None,
        worker_prefetch_cnt=trial.worker_prefetch,
        main_prefetch_cnt=trial.main_prefetch,
        distributed=distributed,
    )


def described(item: Any) -> str:
    """All values of an item by which it differs from others."""
    return hashlib.sha1(repr(item).encode()).hexdigest()


def uninterrupted(trial: Trial, rank: int, ranks: int) -> list[list[str]]:
    with loader(trial, ranks > 1) as made:
        return [[described(item) for item in made] for _ in range(3)]


def interrupted(trial: Trial, cuts: list[tuple[int, int]], rank: int, ranks: int) -> list[Any]:
    """Return the state at each cut; a cut is a number of items within two epochs."""
    states = []
    with loader(trial, ranks > 1) as made:
        for epoch in range(2):
            items = iter(made)
            for number in itertools.count():
                states += [((epoch, number), made.state_dict()) for cut in cuts if cut == (epoch, number)]
                if next(items, None) is None:
                    break
    return states


def resumed(trial: Trial, states: list[Any], rank: int, ranks: int) -> list[list[str]]:
    with loader(trial, ranks > 1) as made:
        made.load_state_dict(states[rank])
        return [[described(item) for item in made] for _ in range(2)]


def run_on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in a fresh process for each rank, and return its result on each."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=run_rank, args=(theirs, folder, rank, ranks, function, arguments))
            process.start()
            theirs.close()
            started.append((process, ours))
        deadline = time.monotonic() + LIMIT_S
        returned = []
        for process, ours in started:
            try:
                there = ours.poll(max(deadline - time.monotonic(), 0))
                returned.append(ours.recv() if there else f"nothing came within {LIMIT_S} s")
            except EOFError:
                returned.append("the process died")
            if isinstance(returned[-1], str):
                process.kill()
            process.join()
            ours.close()
    if errors := [each for each in returned if isinstance(each, str)]:
        raise RuntimeError("\n".join(errors))
    return returned


def run_rank(
    answers: Any, folder: str, rank: int, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        if ranks > 1:
            store = f"file://{folder}/store"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S)
            )
        answers.send(function(*arguments, rank, ranks))
    except Exception:
        answers.send(traceback.format_exc())
    finally:
        answers.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def run_trial(rng: random.Random, number: int, ranks: int, method: str) -> tuple[int, list[str], Trial]:
    """Draw one loader; return the number of cuts and the errors found."""
    trial = drawn(rng, number, method)
    whole = run_on_ranks(ranks, uninterrupted, trial)
    longest = max(len(epoch) for rank in whole for epoch in rank[:2])
    cuts = {(rng.randrange(2), rng.choice([0, longest, *range(longest + 1)])) for _ in range(CUTS_OF_A_TRIAL)}
    found = run_on_ranks(ranks, interrupted, trial, sorted(cuts))
    wrong = []
    tried = 0
    for cut in sorted(cuts):
        states = [dict(states).get(cut) for states in found]
        if None in states:  # the other rank has fewer items
            continue
        tried += 1
        epoch, count = cut
        for rank, tail in enumerate(run_on_ranks(ranks, resumed, trial, states)):
            # A run that has reached the end resumes with the next epoch.
            expected = [whole[rank][epoch][count:], whole[rank][epoch + 1]]
            if tail != expected:
                wrong.append(f"trial {number}, cut {cut}, rank {rank}: {[len(each) for each in tail]} items, {trial}")
    return tried, wrong, trial


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--method", default="fork")
    asked = parser.parse_args()
    gc.freeze()  # skip collecting imported modules in each process
    os.chdir(asked.folder)
    warnings.simplefilter("ignore")
    logging.disable()
    rng = random.Random(asked.seed)
    done, wrong, kinds = 0, list[str](), Counter[str]()
    for number in itertools.count():
        if done >= asked.cuts or len(wrong) > 5:
            break
        before = rng.getstate()
        try:
            tried, bad, trial = run_trial(rng, number, asked.ranks, asked.method)
        except Exception as error:
            rng.setstate(before)
            wrong.append(f"trial {number}: {error}, {drawn(rng, number, asked.method)}")
            continue
        done += tried
        wrong += bad
        kinds[f"{trial.workers} workers"] += tried
        kinds[f"{len(trial.buffers)} shuffles"] += tried
        kinds["resampled" if trial.resampled else "split"] += tried
    json.dump({"cuts": done, "trials": number, "wrong": wrong, "kinds": kinds}, sys.stdout)


if __name__ == "__main__":
    main()
