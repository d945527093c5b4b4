"""A function of the user's own, by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from wds_datapipes.cli.program import WrongUse

__all__ = ["function_named"]


def function_named(reference: str) -> Callable[..., Any]:
    """Import a function, also from a module in the current folder.

    An error in the module itself is raised as it is, with its traceback.

    >>> function_named("os.path:basename")("a/b")
    'b'

    Args:
        reference: ``module:function``, or ``package.module:Class.method``.

    Raises:
        WrongUse: there is no such module or function.
    """
    module_name, _, path = reference.partition(":")
    if not path or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise WrongUse(f"--function is MODULE:FUNCTION, as in convert:smaller, not {reference!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for python -m
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and needs one that is not
        raise WrongUse(f"There is no module {error.name!r}, neither installed nor in {folder}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            name = getattr(found, "__name__", reference)
            raise WrongUse(f"{name!r} ({getattr(found, '__file__', 'no file')}) has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise WrongUse(f"{reference!r} is no function, but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function
