"""Random pipelines, loaders, ranks, cuts and formats, compared with a plain model and with an undisturbed run.

Each number determines one case. A failure prints the command that repeats it.
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from built_pipelines import write_shards
from drawn_loaders import Run, packed, unpacked
from drawn_pipelines import Case, Topology, draw_case, must_reshard, must_resume, names_of
from drawn_runs import Answer, Refused, run_on_ranks
from pipeline_model import (
    Place,
    Steps,
    batched,
    ends_early,
    epochs_of,
    flat,
    frozen,
    in_turn,
    is_padding,
    known,
    one_pass,
    others_of,
    population,
    splits,
)

from wds_datapipes import merge_states

SECONDS = float(os.environ.get("RANDOM_PIPELINES_SECONDS", "0"))
#: The number of cases if no time is given, so that a faster machine tries the same cases.
CASES = 1 if "RANDOM_PIPELINES_SECONDS" in os.environ else 8
EPOCHS = 4
STATEFUL = ("DataLoader2", "StatefulShards", "StatefulDataLoader")


@pytest.mark.timeout(SECONDS + 1200)
def test_drawn_loaders_yield_what_the_model_does_and_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = first = int(os.environ.get("RANDOM_PIPELINES_SEED", "1"))
    failures = list[str]()
    kinds = Counter[str]()
    deadline = time.monotonic() + SECONDS
    while seed < first + CASES or (time.monotonic() < deadline and len(failures) < 20):
        case = draw_case(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_shards(case.steps)
        try:
            kinds[check_case(case, folder)] += 1
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            failures.append(
                f"{what}\n{case}\nRANDOM_PIPELINES_SEED={seed} RANDOM_PIPELINES_SECONDS=0 pytest "
                "tests/properties/test_random_pipelines.py"
            )
            print(failures[-1], flush=True)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
        seed += 1
        if (seed - first) % 100 == 0:
            print(progress_of(seed - first, first, failures, kinds), flush=True)
    print(progress_of(seed - first, first, failures, kinds), flush=True)
    assert not failures, "\n\n".join(failures)


def progress_of(count: int, first: int, failures: list[str], kinds: Counter[str]) -> str:
    return f"{count} cases from {first}, {len(failures)} failures: {dict(kinds.most_common())}"


def check_case(case: Case, folder: Path) -> str:
    """Check everything about a case; return a summary of it."""
    is_stateful = case.loader in STATEFUL
    undisturbed = case.resuming if is_stateful and must_resume(case.steps) else case.loader
    run = Run(case.steps, undisturbed, case.topology, case.batch, case.seed, case.options, EPOCHS)
    whole = run_on_ranks(run, folder)
    if refused := [each.refusal for each in whole if each.refusal]:
        check(not must_resume(case.steps), f"the pipeline was refused: {refused[0]}")
        return "refused pipelines"
    check_epochs(case, case.topology, [answer.epochs for answer in whole], "an undisturbed run")
    saving = replace(run, loader=case.loader, cuts=case.cuts if is_stateful else (), format=case.format)
    saving = replace(saving, is_distributed=case.distributed[0])
    again = run_on_ranks(saving, folder)
    for rank, (first, second) in enumerate(zip(whole, again, strict=True)):
        same(second.epochs, first.epochs, f"rank {rank} of a second run by {case.loader}")
    if case.broken and case.loader != "pipeline":
        check_broken(case, replace(run, loader=case.loader), whole, folder)
    if not is_stateful:
        return "loaders without a state"
    return "/".join(check_cut(case, cut, saving, whole, again, folder) for cut in case.cuts)


def check_broken(case: Case, run: Run, whole: list[Answer], folder: Path) -> None:
    """Check that the epoch after those that the loop left is the next one, or continues the stream; and its state."""
    is_stream = "with_epoch" in names_of(case.steps)
    keeps_place = case.topology.workers == 0 or (case.loader == "StatefulShards" and case.topology.workers == 1)
    if is_stream and not (keeps_place and case.batch is None):
        return
    count = len(case.broken)
    cut, is_cut = (count, 1 + case.then % 7), case.loader in STATEFUL and must_resume(case.steps) and not is_stream
    cuts = (cut,) if is_cut else ()
    run = replace(run, epochs=count + 1, broken=case.broken, cuts=cuts, format=case.format)
    broken = run_on_ranks(run, folder)
    for rank, answer in enumerate(broken):
        seen = 0
        for number, found in enumerate(answer.epochs):
            expected = whole[rank].epochs[number]
            if is_stream:
                expected = [item for epoch in whole[rank].epochs for item in epoch][seen:][: len(found)]
            elif number < count:
                expected = expected[: case.broken[number]]
            same(found, expected, f"rank {rank} in epoch {number}, after breaks")
            seen += len(found)
    if is_cut:
        files, form = [answer.states[cut] for answer in broken], case.format
        if case.topology.ranks > 1:
            merged = merge_states([unpacked(file, form) for file in files])
            files, form = [packed(merged, "pickle")] * case.topology.ranks, "pickle"
        resuming = case.loader if case.topology.ranks == 1 else case.resuming
        run = replace(run, loader=resuming, epochs=1, broken=(), cuts=(), files=files, loaded=form)
        resumed = run_on_ranks(run, folder)
        for rank, rest in enumerate(rests(whole, broken, cut)):
            check(not resumed[rank].refusal, f"a state after breaks was not loaded: {resumed[rank].refusal}")
            same(resumed[rank].epochs, rest[:1], f"rank {rank} resumed from {cut} after breaks")


def check_cut(
    case: Case, cut: tuple[int, int], saving: Run, whole: list[Answer], again: list[Answer], folder: Path
) -> str:
    """Check the state saved at a cut, or that there is none; it may resume by replay."""
    files = [answer.states[cut] for answer in again]
    if refused := [file.message for file in files if isinstance(file, Refused)]:
        check(not must_resume(case.steps), f"a state was refused: {refused[0]}")
        return "refused states"
    form, is_resharded = case.format, case.resumed != case.topology
    if is_resharded or case.is_merged:
        merged = merge_states([unpacked(file, form) for file in files])
        files, form = [packed(merged, "pickle")] * case.resumed.ranks, "pickle"
    then = (0, case.then)
    run = replace(saving, loader=case.resuming, topology=case.resumed, epochs=2, cuts=(then,), files=files)
    run = replace(run, loaded=form, format=case.second_format, is_resharded=is_resharded)
    run = replace(run, is_distributed=case.distributed[1])
    resumed = run_on_ranks(run, folder)
    if refused := [each.refusal for each in resumed if each.refusal]:
        may_refuse = not must_reshard(case.steps) if is_resharded else not must_resume(case.steps)
        check(may_refuse, f"a state was not loaded: {refused[0]}")
        return "refused other workers"
    rest = rests(whole, again, cut)
    is_begun = cut[1] > 0 and not all(cut in answer.ended for answer in again)
    if is_resharded:
        check_resharded(case, case.topology, case.resumed, rest, [answer.epochs for answer in resumed], is_begun)
    else:
        for rank, answer in enumerate(resumed):
            same(answer.epochs, rest[rank][:2], f"rank {rank} resumed from {cut}")
    check_second(case, run, resumed, folder, is_begun)
    return "other workers" if is_resharded else "resumed"


def check_second(case: Case, run: Run, resumed: list[Answer], folder: Path, is_begun: bool) -> None:
    """Check a state saved by a resumed run."""
    then, form = run.cuts[0], run.format
    files = [answer.states[then] for answer in resumed]
    if refused := [file.message for file in files if isinstance(file, Refused)]:
        check(not must_resume(case.steps), f"no state after a resume: {refused[0]}")
        return
    is_resharded = case.last != case.resumed
    if (case.is_merged and case.then > 0) or is_resharded:  # a state that was only loaded already covers all ranks
        merged = merge_states([unpacked(file, form) for file in files])
        files, form = [packed(merged, "pickle")] * case.last.ranks, "pickle"
    run = replace(run, topology=case.last, files=files, loaded=form, is_resharded=is_resharded, cuts=())
    third = run_on_ranks(run, folder)
    if refused := [each.refusal for each in third if each.refusal]:
        check(is_resharded and not must_reshard(case.steps), f"a second state was not loaded: {refused[0]}")
        return
    expected = rests(resumed, resumed, then)
    if is_resharded:
        if then[1]:
            is_begun = not all(then in answer.ended for answer in resumed)
        check_resharded(case, case.resumed, case.last, expected, [answer.epochs for answer in third], is_begun)
        return
    for rank, answer in enumerate(third):
        count = len(expected[rank])
        same(answer.epochs[:count], expected[rank][:2], f"rank {rank} resumed a second time")


def rests(whole: list[Answer], saving: list[Answer], cut: tuple[int, int]) -> list[list[Any]]:
    """Return the remaining items of each rank after a cut; an epoch ends when it has ended on all ranks."""
    epoch, count = cut
    if all(cut in answer.ended for answer in saving):
        return [answer.epochs[epoch + 1 :] for answer in whole]
    return [[answer.epochs[epoch][count:], *answer.epochs[epoch + 1 :]] for answer in whole]


def check_epochs(case: Case, topology: Topology, ranks: list[list[list[Any]]], what: str, before: int = 0) -> None:
    """Check epochs of all ranks against the model; rank 0 has read some samples before them."""
    steps, degree = case.steps, known_of(case)
    if degree == "drawn":
        check_drawn(case, topology, ranks, what, before)
        return
    expected = model_epochs(case, topology, len(ranks[0]))
    for epoch in range(len(ranks[0])):
        if degree == "order":
            for rank, found in enumerate(ranks):
                same(modelled(found[epoch]), modelled(expected[rank][epoch]), f"epoch {epoch} of rank {rank} of {what}")
            continue
        came = Counter(each for found in ranks for each in flat(found[epoch]))
        bag = Counter(each for of_rank in expected for each in flat(of_rank[epoch]))
        if degree == "bag":
            same_bag(came, bag, f"epoch {epoch} of {what}")
        elif not drops(case) and "keep" not in names_of(steps):
            for counts, kind in ((real(came.elements()), "samples"), (came, "items")):
                due = real(bag.elements()) if kind == "samples" else bag
                same(counts.total(), due.total(), f"the number of {kind} in epoch {epoch} of {what}")
        if degree == "within":
            copies = 1 if splits(steps) else topology.ranks * max(topology.workers, 1)
            most = Counter({each: count * copies for each, count in population(steps).items()})
            check(came <= most, f"epoch {epoch} of {what} has too many of {came - most}")


def check_drawn(case: Case, topology: Topology, ranks: list[list[list[Any]]], what: str, before: int) -> None:
    """Check only the number of items of epochs."""
    steps, allowed = case.steps, population(case.steps)
    for rank, found in enumerate(ranks):
        for epoch, items in enumerate(found):
            strange = Counter(flat(items)).keys() - allowed.keys()
            check(not strange, f"epoch {epoch} of rank {rank} of {what} has {strange}")
            if steps[-1][0] == "with_epoch" and case.batch is None:
                readers = 1 if splits(steps) else max(topology.workers, 1)
                same(len(items), steps[-1][1] * readers, f"the length of epoch {epoch} of rank {rank} of {what}")
    source = steps[:-1]
    is_alone = topology.ranks * max(topology.workers, 1) == 1
    if steps[-1][0] == "with_epoch" and is_alone and known(source) == "bag" and case.batch is None:
        stream = list(flat(item for items in ranks[0] for item in items))
        size = Counter(flat(one_pass(source, Place(), 0))).total()  # without the rest that batches drop
        first = -before % size  # where the next pass begins, as epochs end within passes
        for start, end in pairwise([0, *range(first, len(stream), size), len(stream)]):
            came = Counter(stream[start:end])
            check(came <= allowed, f"the pass from item {start} of {what} has too many of {came - allowed}")


def check_resharded(
    case: Case,
    before: Topology,
    topology: Topology,
    rest: list[list[Any]],
    ranks: list[list[list[Any]]],
    is_begun: bool,
) -> None:
    """Check that other ranks and workers together yield the rest, and then a whole epoch."""
    # Without a split, all ranks read everything, from a state of the beginning or the end.
    if splits(case.steps) and known_of(case) != "drawn":
        came, left = (real(each for epochs in some for each in flat(epochs[0])) for some in (ranks, rest))
        if not drops(case) and (is_begun or not is_sized_by_ranks(case.steps)):
            same_bag(came, left, f"what {topology} resumed")
            has_next = min(len(epochs) for some in (ranks, rest) for epochs in some) > 1
            if has_next and not is_sized_by_ranks(case.steps):
                came, left = (real(each for epochs in some for each in flat(epochs[1])) for some in (ranks, rest))
                same_bag(came, left, f"the epoch after {topology} resumed")
        else:
            most = population(case.steps)
            check(came <= most, f"what {topology} resumed has too many of {came - most}")
    following, seen = [found[1:] for found in ranks], len([*flat(ranks[0][0])])
    check_epochs(case, topology, following, f"the epochs after {topology} resumed", seen)


def drops(case: Case) -> bool:
    """Whether the items depend on how the data is split, or on random numbers of each process."""
    return has_drops(case.steps) or (case.batch is not None and case.batch[1])


def has_drops(steps: Steps) -> bool:
    return ends_early(steps) or any(
        step[0] in ("slice", "rsample", "mux", "zip")
        or (step[0] == "batch" and step[2])
        or (step[0] == "mix" and step[2] != "all")
        or any(map(has_drops, others_of(step)))
        for step in steps
    )


def is_sized_by_ranks(steps: Steps) -> bool:
    """Whether the number of ranks determines a global batch, and so which samples an epoch drops."""
    return any(
        (step[0] == "indexed" and step[3] is None) or any(map(is_sized_by_ranks, others_of(step))) for step in steps
    )


def real(items: Iterable[Hashable]) -> Counter[Hashable]:
    """Count items without padding; an epoch that is interrupted within a batch may need less of it."""
    return Counter(each for each in items if not is_padding(each))


def known_of(case: Case) -> str:
    degree = known(case.steps)
    return "within" if degree == "bag" and case.batch and case.batch[1] else degree


def model_epochs(case: Case, topology: Topology, count: int) -> list[list[list[Any]]]:
    """Return the items of each rank in some epochs, according to the model."""
    workers = max(topology.workers, 1)
    ranks = []
    for rank in range(topology.ranks):
        each = [epochs_of(case.steps, Place(rank, topology.ranks, worker, workers), count) for worker in range(workers)]
        if case.batch:
            each = [[list(batched(epoch, *case.batch)) for epoch in epochs] for epochs in each]
        ranks.append([list(in_turn(of_workers)) for of_workers in zip(*each, strict=True)])
    return ranks


def modelled(items: list[Any]) -> list[Any]:
    return [frozen(item) for item in items]


def check(is_right: bool, message: str) -> None:
    if not is_right:
        raise AssertionError(message)


def same_bag(found: Counter[Any], expected: Counter[Any], what: str) -> None:
    check(found == expected, f"{what} lacks {expected - found}, and has too many of {found - expected}")


def same(found: Any, expected: Any, what: str) -> None:
    check(found == expected, f"{what} is not as expected:\nfound    {found}\nexpected {expected}")
