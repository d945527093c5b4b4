"""Warnings that point at the user's code, however many stages and loaders lie between."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType

from wds_datapipes.hints import Message
from wds_datapipes.redaction import redact_text

#: Modules that run pipelines: a warning that points there would not identify the user's pipeline.
MACHINERY = frozenset(
    ["concurrent", "contextlib", "functools", "multiprocessing", "threading", "torch", "torchdata", "wds_datapipes"]
)


def callers() -> Iterator[FrameType]:
    """Yield the frames of the functions that called the caller of this function, from the innermost one."""
    return (frame for frame, _ in walk_stack(sys._getframe(2)))


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of user code, outside this package and the libraries that run it.

    A ``stacklevel`` cannot do so, because the number of frames depends on the pipeline and its loader. If there is no
    such line, as in a worker process or a thread, the warning points at the caller. Credentials in the text are hidden.
    """
    frames = list(callers())
    packages = ((frame, str(frame.f_globals.get("__name__", "")).partition(".")[0]) for frame in frames)
    frame = next((frame for frame, package in packages if package not in MACHINERY), frames[0])
    warnings.warn_explicit(
        text.replaced(redact_text) if isinstance(text, Message) else redact_text(text),
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
