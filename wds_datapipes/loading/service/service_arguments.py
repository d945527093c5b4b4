"""Arguments of reading services: their checks, and the default start method."""

from __future__ import annotations

import math
import multiprocessing
from numbers import Real


def check_start_method(method: str | None) -> None:
    """Check the method by which a service starts its processes.

    Raises:
        ValueError: this system has no such method.
    """
    methods = multiprocessing.get_all_start_methods()
    if method not in (None, *methods):
        raise ValueError(f"multiprocessing_context must be one of {methods}, not {method!r}")


def start_method(method: str | None) -> str:
    """Return the method by which a service starts its processes, given the one that was passed to it."""
    known = multiprocessing.get_all_start_methods()
    return method or ("fork" if "fork" in known else multiprocessing.get_start_method())


def check_seconds(name: str, seconds: float | None, *, is_optional: bool = False) -> None:
    """Check a positive number of seconds.

    Raises:
        ValueError: it is none.
    """
    if seconds is None and is_optional:
        return
    if not (isinstance(seconds, Real) and 0 < seconds < math.inf):
        none = " or None" if is_optional else ""
        raise ValueError(f"{name} must be a positive number of seconds{none}, not {seconds!r}")


def check_functions(**functions: object) -> None:
    """Check that some arguments are functions or None.

    Raises:
        TypeError: one is neither.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function or None, not {function!r}")
