"""Replacing a function of torchdata, and recording by which."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Mend", "PatchRecord", "replace"]

_ISSUES = "https://github.com/meta-pytorch/data/issues/"

Mend = Callable[[], None]


class PatchRecord(list[tuple[Mend, str | None]]):
    """Functions that mend a fault each, and where others have reported it, or None."""

    def repair(self, issue: int | None) -> Callable[[Mend], Mend]:
        """Enter a function, with the number of the issue in meta-pytorch/data that reports the fault."""

        def enter(mend: Mend) -> Mend:
            self.append((mend, f"{_ISSUES}{issue}" if issue else None))
            return mend

        return enter


def replace(owner: object, name: str, replacement: object) -> None:
    """Put something in the place of a part of torchdata."""
    setattr(owner, name, replacement)
