"""The model of random pipelines notices faults: samples that are lost, doubled or swapped in each part of the package.

Each fault replaces a function of the package, and the processes of a run are forked with it. Without it, the same cases
are right.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drawn_pipelines import Case, draw_case, must_reshard, must_resume, names_of
from pipeline_model import known
from test_random_pipelines import check_case, write_in

from wds_datapipes.index.order.batch_share import BatchShare
from wds_datapipes.loading.progress import LoopPosition
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.pipes import SampleBucketer, SampleShuffler
from wds_datapipes.pipes.state import pipeline_state
from wds_datapipes.samples.grouping import SampleGrouping

#: Look for each fault from the first case on, not from one nearby, which takes some minutes.
IS_WHOLE = bool(os.environ.get("WHOLE_SWEEPS"))
#: Within how many drawn cases that run the replaced function a fault is noticed.
WITHIN = 15

Items = Callable[..., Iterator[Any]]


def lose_third(items: Items) -> Items:
    def lossy(*arguments: Any, **options: Any) -> Iterator[Any]:
        return (item for number, item in enumerate(items(*arguments, **options)) if number != 2)

    return lossy


def double_third(items: Items) -> Items:
    def doubling(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, item in enumerate(items(*arguments, **options)):
            yield item
            if number == 2:
                yield item

    return doubling


def swap_in_batches(batches: Items) -> Items:
    return lambda *arguments, **options: (batch[::-1] for batch in batches(*arguments, **options))


def lose_last(batches: Items) -> Items:
    def lossy(*arguments: Any, **options: Any) -> Iterator[Any]:
        held: list[Any] = []
        for batch in batches(*arguments, **options):
            yield from held
            held = [batch]

    return lossy


def swap_fields(samples: Items) -> Items:
    def mixed(*arguments: Any) -> Iterator[Any]:
        before: dict[str, Any] = {}
        for number, sample in enumerate(samples(*arguments)):
            yield {**sample, **before} if number == 2 else sample
            before = {"txt": sample["txt"], "cls": sample["cls"]}

    return mixed


def repeat_in_place(items: Items) -> Items:
    """Yield the second item of a worker again, in the place of the third."""
    seen: dict[int, list[Any]] = {}

    def doubling(self: Receiver, message: Any) -> Iterator[Any]:
        own = seen.setdefault(id(self), [])
        for item in items(self, message):
            own.append(item)
            yield own[1] if len(own) == 3 else item

    return doubling


def shifted(by: int) -> Callable[[Any], Any]:
    """Save the position of the loop after another item."""

    def plant(state: Callable[[LoopPosition], Any]) -> Callable[[LoopPosition], Any]:
        def shifted_state(self: LoopPosition) -> Any:
            delivered = self.delivered
            self.delivered = min(max(delivered + by, 0), self._received)
            try:
                return state(self)
            finally:
                self.delivered = delivered

        return shifted_state

    return plant


def lose_first(waiting: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda part: waiting(part)[1:]


def lose_rest(part: Callable[[BatchShare], range]) -> Callable[[BatchShare], range]:
    return lambda self: part(self)[:0] if self.remainder == "drop" else part(self)


class Fault(NamedTuple):
    """A fault of one function.

    Attributes:
        owner: the module or the class that has the function.
        name: its name.
        plant: returns the faulty function for the right one.
        concerns: whether the function runs in a case.
        near: the number of the case from which the fault is looked for, unless from the first. The output names it.
    """

    owner: Any
    name: str
    plant: Callable[[Any], Any]
    concerns: Callable[[Case], bool]
    near: int


def has(*names: str) -> Callable[[Case], bool]:
    return lambda case: {*names} <= {*names_of(case.steps)}


def resumes(case: Case) -> bool:
    return (
        case.loader in ("DataLoader2", "StatefulShards") and must_resume(case.steps) and case.resumed == case.topology
    )


def reshards(case: Case) -> bool:
    is_stateful = case.loader in ("DataLoader2", "StatefulShards")
    return is_stateful and must_reshard(case.steps) and case.resumed != case.topology


FAULTS = {
    "a sample lost in a shuffle buffer": Fault(SampleShuffler, "function", lose_third, has("shuffle_samples"), 1),
    "a sample doubled in a shuffle buffer": Fault(SampleShuffler, "function", double_third, has("shuffle_samples"), 1),
    "samples swapped in batches": Fault(
        SampleBucketer,
        "function",
        swap_in_batches,
        lambda case: "buckets" in names_of(case.steps) and known(case.steps) == "order",
        211,
    ),
    "the last batch lost": Fault(SampleBucketer, "function", lose_last, has("buckets"), 1),
    "fields of another sample": Fault(SampleGrouping, "group", swap_fields, has("load"), 3),
    "an item of a worker doubled, and another lost": Fault(
        Receiver,
        "items",
        repeat_in_place,
        lambda case: case.loader == "DataLoader2" and case.topology.workers > 0,
        4,
    ),
    "a sample lost at a resume": Fault(
        LoopPosition,
        "state",
        shifted(1),
        lambda case: resumes(case) and case.loader == "DataLoader2" and case.topology.workers > 0,
        1,
    ),
    "a sample doubled at a resume": Fault(LoopPosition, "state", shifted(-1), resumes, 14),
    "a waiting sample lost at a reshard": Fault(
        pipeline_state,
        "_waiting_positions",
        lose_first,
        lambda case: reshards(case) and "shuffle_samples" in names_of(case.steps),
        185,
    ),
    "the rest of an index lost at a reshard": Fault(
        BatchShare,
        "_part_of_rest",
        lose_rest,
        lambda case: reshards(case) and any(step[0] == "indexed" and step[4] == "drop" for step in case.steps),
        1591,
    ),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    tried = 0
    for seed in range(1 if IS_WHOLE else fault.near, 1 << 20):
        case = draw_case(seed)
        if not fault.concerns(case):
            continue
        tried += 1
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_in(folder, case.steps)
        with monkeypatch.context() as patch:
            planted = fault.plant(getattr(fault.owner, fault.name))
            is_static = isinstance(inspect.getattr_static(fault.owner, fault.name), staticmethod)
            patch.setattr(fault.owner, fault.name, staticmethod(planted) if is_static else planted)
            try:
                check_case(case, folder)
            except (AssertionError, RuntimeError) as error:
                print(f"{name}: noticed by case {seed}, the number {tried}: {error!s:.300}")
                break
        assert tried < WITHIN, f"nothing was noticed in {tried} cases up to {seed}"
    check_case(case, folder)
