"""Balance of packed rows: which rows share a step, and which of them share a rank, by their costs."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from wds_datapipes.index.format.options import Balance
from wds_datapipes.index.order.permutation import Numbers, Permutation


def arrange_rows(costs: Numbers, *, first: int, step: int, balance: Balance, seed: int | None) -> Numbers:
    """Return the rows of a window in the order in which steps take them.

    Args:
        costs: the cost of each row.
        first: the number of earlier rows; the first rows of the window complete the step that these have begun.
        step: the number of rows in a step.
        balance: ``"mixed"`` for steps with rows of all costs, ``"similar"`` for steps with rows of similar cost.
        seed: shuffles the steps; None keeps their order.

    Examples:
        >>> costs = np.array([1, 2, 3, 4])
        >>> costs[arrange_rows(costs, first=0, step=2, balance="mixed", seed=None)].tolist()
        [4, 1, 3, 2]
        >>> costs[arrange_rows(costs, first=0, step=2, balance="similar", seed=None)].tolist()
        [4, 3, 2, 1]
    """
    count = len(costs)
    order = np.lexsort((np.arange(count), -costs))
    head = min(-first % step, count)
    steps, tail = divmod(count - head, step)
    shuffled = np.arange(steps) if seed is None else Permutation(steps, seed=seed)(np.arange(steps))
    arranged = np.empty(count, np.int64)
    if balance == "similar":
        # Rows of medium cost go to the steps that are shared with other windows, whose medium cost is about the same.
        middle = steps * step // 2 + np.arange(head + tail)
        is_middle = np.zeros(count, bool)
        is_middle[middle] = True
        whole = order[~is_middle].reshape(steps, step)[shuffled].ravel()
        return np.concatenate([order[middle[:head]], whole, order[middle[head:]]])
    sizes = np.array([head, *[step] * steps, tail], np.int64)
    own = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # Each step takes rows at equal distances in the order of their costs, in alternate directions.
    turn = np.concatenate([[steps], shuffled, [steps + 1]])[own]
    quantile = ((2 * place + 1) << 32) // (2 * sizes[own])
    arranged[np.lexsort((np.where(place % 2, -turn, turn), quantile))] = order
    return arranged


def balance_ranks(costs: Numbers) -> Numbers:
    """Return the order of the rows of a step in which equal contiguous parts cost about the same, for any ranks.

    Groups of rows are merged, the costliest with the cheapest, until one is left: as many at a time as the prime
    factors of the number of rows say, the smallest first. The part of a rank that has 1, 2, 4, 8 and so on rows is one
    group; other parts consist of several.

    Examples:
        >>> costs = np.array([9, 1, 8, 2, 3, 7])
        >>> costs[balance_ranks(costs)].reshape(3, 2).sum(axis=1).tolist()
        [10, 10, 10]
    """
    groups = np.arange(len(costs))[:, None]
    for factor in _prime_factors(len(costs)):
        sums = costs[groups].sum(axis=1)
        parts = np.lexsort((groups[:, 0], -sums)).reshape(factor, -1)
        merged, total = groups[parts[0]], sums[parts[0]]
        for part in parts[1:]:
            cheapest = np.lexsort((merged[:, 0], total))
            merged = np.concatenate([merged[cheapest], groups[part]], axis=1)
            total = total[cheapest] + sums[part]
        groups = merged
    return groups.reshape(-1)


@lru_cache(maxsize=64)
def _prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number in ascending order.

    >>> _prime_factors(12), _prime_factors(1)
    ((2, 2, 3), ())
    """
    found, divisor = list[int](), 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return (*found, number) if number > 1 else tuple(found)
