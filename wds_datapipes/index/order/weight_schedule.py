"""Schedules of weights: integer weights from given steps on, constant or linearly interpolated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from wds_datapipes.arguments import check_integer
from wds_datapipes.index.order.draw_pattern import integer_weights
from wds_datapipes.index.order.phase import Phase

Weights: TypeAlias = "Mapping[str, float] | Sequence[Sequence[Any]]"
"""The weights of datasets, or a schedule of them by step."""
#: The maximum number of changes between two points of a linear schedule, and the sum of the integers in each.
STAIRS, RESOLUTION = 100, 1000


def check_schedule(weights: Weights, names: Sequence[str], batch: int | None) -> list[Sequence[Any]]:
    """Return weights as a schedule: points of a step and integer weights from there on, some of them ``"linear"``.

    Raises:
        ValueError: a weight is missing or invalid, the steps do not increase from 0, or steps have no fixed size.
        TypeError: the weights are neither a mapping nor such points.
    """
    if isinstance(weights, Mapping) or not isinstance(weights, list | tuple):
        return [[0, integer_weights(weights, names)]]  # type: ignore[arg-type]  # it checks the type
    found, last = list[Sequence[Any]](), -1
    for point in weights:
        if not isinstance(point, list | tuple) or len(point) not in (2, 3) or [*point[2:]] not in ([], ["linear"]):
            raise TypeError(f'a point of weights must be (step, weights) or (step, weights, "linear"), not {point!r}')
        step = check_integer("the step of a point of weights", point[0], 0)
        if step <= last or (not found and (step or point[2:])):
            raise ValueError(
                f"the steps of weights must increase, from 0 for a point that is not linear, but {step} follows {last}"
            )
        found.append([step, integer_weights(point[1], names), *point[2:]])
        last = step
    if not found:
        raise ValueError("weights must have a point for step 0")
    if batch is None:
        raise ValueError("weights by step require global_batch_size, which defines a step")
    return found


def weights_between(phase: Phase, end: int | None) -> list[tuple[int, dict[str, int]]]:
    """Return the integer weights of a phase, each with the first step to which they apply."""
    found = list[tuple[int, dict[str, int]]]()
    for step, weights in _stairs(phase.points):
        if step <= phase.step:
            found = [(phase.step, weights)]
        elif end is None or step < end:
            found.append((step, weights))
    return found


def _stairs(points: Sequence[Sequence[Any]] | None) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the steps of a schedule at which its weights change, and the integer weights from there on."""
    before: tuple[int, dict[str, int]] = 0, {}
    for step, weights, *kind in points or ():
        if kind:
            first, known = before
            stairs = min(step - first, STAIRS)
            for stair in range(stairs):
                part = (2 * stair + 1) / (2 * stairs)
                mixed = {
                    name: (1 - part) * known[name] / sum(known.values()) + part * weights[name] / sum(weights.values())
                    for name in weights
                }
                mixed = {name: max(round(weight * RESOLUTION), weight > 0) for name, weight in mixed.items()}
                yield first + stair * (step - first) // stairs, mixed
        before = step, weights
        yield before
