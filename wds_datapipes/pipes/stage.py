"""What every stage needs: its functional name, and a place for what torch must not look into."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, TypeVar

from torch.utils.data import IterDataPipe

__all__ = ["OpaqueValue", "register_stage"]

T = TypeVar("T")
C = TypeVar("C", bound=type[IterDataPipe[Any]])


def register_stage(name: str) -> Callable[[C], C]:
    """Register a class as a stage, as torch's ``functional_datapipe`` does, but with all keywords left to the class.

    torch's own builds the stage in a function with parameters called ``cls`` and ``source_dp``, so a keyword of that
    name is a TypeError there; and ``cls`` is among the most common fields.

    Raises:
        ValueError: the name is taken.
    """

    def register(stage: C) -> C:
        if name in IterDataPipe.functions:
            raise ValueError(f"the stage name {name!r} is taken already, so {stage.__name__} cannot have it")

        construct: Callable[..., IterDataPipe[Any]] = stage

        def build(source: IterDataPipe[Any], /, *arguments: Any, **options: Any) -> IterDataPipe[Any]:
            return construct(source, *arguments, **options)

        IterDataPipe.register_function(name, update_wrapper(build, stage, assigned=("__doc__",), updated=()))
        return stage

    return register


class OpaqueValue(Generic[T]):
    """Holds a collection out of sight of torch.

    torch pickles every collection in an attribute to look for datapipes in it, again for each epoch. That takes long
    with a million URLs, and is an error with a lambda.

    Attributes:
        value: what is held.
    """

    def __init__(self, value: T) -> None:
        self.value = value
