"""Functions of pipelines that another process also imports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def texts_of(url: str) -> str:
    return f"texts-{url}"


def some(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "part": part} for part in range(int(sample["cls"]) % 3)]


def doubled(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for sample in samples:
        yield sample
        yield {**sample, "is_double": True}
