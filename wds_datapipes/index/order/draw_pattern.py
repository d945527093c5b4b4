"""Patterns of draws from several datasets in exact proportions, and the integer weights that they follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from wds_datapipes.index.order.permutation import Numbers, hash_numbers
from wds_datapipes.samples.mixing import check_weights

#: The maximum number of draws in a period of a mixture; weights that need more are rounded.
MAX_PERIOD = 1 << 16


class DrawPattern:
    """Draws from several datasets in the proportions of integer weights.

    A period is the shortest sequence of draws with the exact proportions. After any number of draws, those from each
    dataset differ from their exact share by less than one. The key chooses the index in the pattern at which each
    period begins, among the indices that preserve this bound, so that no rank always reads the same dataset.

    Args:
        weights: the number of draws from each dataset in a period; 0 for a dataset that is not read.
        key: selects where the periods begin; None for the beginning of the pattern.

    Examples:
        >>> numbers = np.arange(6)
        >>> [each.tolist() for each in DrawPattern((1, 2)).draw(numbers, shifts=0)]
        [[1, 0, 1, 1, 0, 1], [0, 0, 1, 2, 1, 3]]
    """

    def __init__(self, weights: tuple[int, ...], key: int | None = None) -> None:
        self._weights = np.array(weights, np.int64)
        self._key = None if key is None else np.uint64(key)
        self._pattern, self._indices, self._beginnings = _pattern_of(weights)

    def draw(self, numbers: Numbers, shifts: Numbers | int) -> tuple[Numbers, Numbers]:
        """Return the dataset of each draw and the number of earlier draws from it.

        Args:
            numbers: the numbers of the draws, from 0.
            shifts: for each draw, how much later the pattern begins than the key says.
        """
        periods, begins, ends = self._locate(numbers, shifts)
        chosen = self._pattern[ends % len(self._pattern)]
        return chosen, self._count_of(chosen, periods, begins, ends)

    def count(self, numbers: Numbers, shifts: Numbers | int) -> Numbers:
        """Return how many of the first draws are from each dataset, as a row per dataset, for some numbers of draws."""
        return self._count_of(np.arange(len(self._weights))[:, None], *self._locate(numbers, shifts))

    def _locate(self, numbers: Numbers, shifts: Numbers | int) -> tuple[Numbers, Numbers, Numbers]:
        """Return the period of each draw, its beginning in the pattern, and the index of the draw in it or the next."""
        period = len(self._pattern)
        periods, draws = np.divmod(numbers, period)
        begins = shifts + np.zeros_like(periods)
        if self._key is not None:
            hashed = hash_numbers(periods.astype(np.uint64) ^ self._key) % np.uint64(len(self._beginnings))
            begins += self._beginnings[hashed.astype(np.int64)]
        begins %= period
        return periods, begins, begins + draws

    def _count_of(self, datasets: Numbers, periods: Numbers, begins: Numbers, ends: Numbers) -> Numbers:
        period, of_period = len(self._pattern), self._weights[datasets]
        first = np.searchsorted(self._indices, datasets * period + begins)
        last = np.searchsorted(self._indices, datasets * period + ends % period)
        counts: Numbers = (periods + ends // period) * of_period + last - first
        return counts


@lru_cache(maxsize=256)
def _pattern_of(weights: tuple[int, ...]) -> tuple[Numbers, Numbers, Numbers]:
    """Return the dataset of each index of a pattern, the indices by dataset, and those where a period may begin.

    The number of a dataset, times the length of the pattern, is added to its indices. The pattern is Tijdeman's
    solution of the chairman assignment problem: among the datasets that are due, the one with the earliest deadline is
    next.
    """
    period, drawn = sum(weights), [0] * len(weights)
    used = [number for number, weight in enumerate(weights) if weight]
    due = period / max(2 * len(used) - 2, 1)
    found = list[int]()
    for count in range(1, period + 1):
        lags = [(weights[number] * count - drawn[number] * period, number) for number in used]
        _, following = min((((period - due - lag) / weights[number], number) for lag, number in lags if lag >= due))
        drawn[following] += 1
        found.append(following)
    pattern = np.array(found, np.int64)
    indices = np.sort(np.arange(period) + pattern * period)
    is_beginning = np.ones(period, np.bool_)
    for number in used:
        ahead = np.cumsum(pattern == number) * period - np.arange(1, period + 1) * weights[number]
        before = np.concatenate([[0], ahead[:-1]])
        is_beginning &= (ahead.max() - before < period) & (before - ahead.min() < period)
    return pattern, indices, np.flatnonzero(is_beginning)


def integer_weights(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, int]:
    """Return integers in the proportions of weights, by name and in the order of the names.

    Decimal fractions are exact, such as 0.7 and 0.3. If the sum of the integers would exceed `MAX_PERIOD`, they are
    rounded to about that sum, and a positive weight stays positive.

    Raises:
        ValueError: a weight is missing, negative, not finite or for an unknown dataset, or all are 0.
        TypeError: the weights are not a mapping to numbers.

    Examples:
        >>> integer_weights({"web": 0.75, "books": 0.25}, ["web", "books"])
        {'web': 3, 'books': 1}
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f'weights must be a mapping, as in {{"{names[0]}": 2}}, not {weights!r}')
    if {*weights} != {*names}:
        raise ValueError(f"weights are for {sorted(weights, key=str)}, but the datasets are {sorted(names)}")
    check_weights({repr(name): weights[name] for name in names})
    given = [weights[name] for name in names]
    fractions = [Fraction(weight) if isinstance(weight, int) else Fraction(str(float(weight))) for weight in given]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    found = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*found)
    found = [number // divisor for number in found]
    if sum(found) > MAX_PERIOD:
        total = sum(found)
        found = [max(round(number * MAX_PERIOD / total), 1) if number else 0 for number in found]
    return dict(zip(names, found, strict=True))
