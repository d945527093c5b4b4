"""Warnings that point at the user's code, however many stages and loaders lie between."""

from __future__ import annotations

import sys
import warnings
from traceback import walk_stack

from wds_datapipes.hints import Message
from wds_datapipes.redaction import redact_text

#: Modules that run pipelines: a warning that points there would not identify the user's pipeline.
MACHINERY = frozenset(
    ["concurrent", "contextlib", "functools", "multiprocessing", "threading", "torch", "torchdata", "wds_datapipes"]
)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of user code, outside this package and the libraries that run it.

    A ``stacklevel`` cannot do so, because the number of frames depends on the pipeline and its loader. If there is no
    such line, as in a worker process or a thread, the warning points at the caller. Credentials in the text are hidden.
    """
    caller = sys._getframe(1)
    packages = ((frame, str(frame.f_globals.get("__name__", "")).partition(".")[0]) for frame, _ in walk_stack(caller))
    frame = next((frame for frame, package in packages if package not in MACHINERY), caller)
    warnings.warn_explicit(
        text.replaced(redact_text) if isinstance(text, Message) else redact_text(text),
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
