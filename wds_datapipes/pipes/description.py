"""What a pipeline is, in words that are the same in every process: its stages and their arguments."""

from __future__ import annotations

import inspect
from hashlib import sha256
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.upstream import splits, upstream

__all__ = ["description", "descriptions"]


def descriptions(pipe: Any, *, without: tuple[type, ...] = ()) -> list[str]:
    """Describe the stages of a pipeline that decide on its items, from the last to the first."""
    deciding = (stage for stage in upstream(pipe) if not getattr(stage, "is_transparent", False))
    return [description(stage) for stage in deciding if not isinstance(stage, without)]


def description(stage: Any) -> str:
    """Describe a stage by its class and by its arguments, as far as they are the same in every process."""
    arguments = inspect.signature(type(stage).__init__).parameters
    facts = {} if splits(stage) else {name: vars(stage)[name] for name in arguments if name in vars(stage)}
    facts.update({name: value for name, value in vars(stage).items() if hasattr(value, "fingerprint")})
    if getattr(stage, "_enabled", True) is False:  # as DataLoader(shuffle=False) has it
        facts["enabled"] = False
    told = (f"{name}={_told(value)}" for name, value in facts.items() if not isinstance(value, IterDataPipe))
    return f"{type(stage).__name__}({', '.join(told)})"


def _told(value: Any) -> str:
    """Tell a value. What is within what it holds is told by its type: it may be large, and change."""
    if hasattr(value, "fingerprint"):
        return _digest(value.fingerprint())
    if isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, list | tuple):
        return f"{len(value)} items {_digest(repr([_named(each) for each in value]))}"
    return _named(value)


def _named(value: Any) -> str:
    if isinstance(value, str | int | float | bool | None):
        text = repr(value)
        return text if len(text) <= 40 else f"{len(text)} characters {_digest(text)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__name__


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
