"""Drawings of pipelines as HTML, for notebooks."""

from __future__ import annotations

import inspect
import re
from html import escape
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.fingerprint import format_value
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import count_yielded, functional_name_of, sources_of
from wds_datapipes.pipes.state.description import arguments_of

ROW = "display:flex;flex-wrap:wrap;align-items:center;gap:4px;font:13px/1.35 system-ui,sans-serif;text-align:left"
COLUMN = (
    "display:flex;flex-direction:column;gap:4px;padding:4px;border-left:2px solid #8886;border-right:2px solid #8886"
)
BOX = "border:1px solid #8886;border-radius:6px;padding:4px 8px;max-width:22em"
NAME = "font:600 13px ui-monospace,monospace"
FAINT = "opacity:.65;font-size:12px;overflow-wrap:anywhere"
ARROW = '<span style="opacity:.65">&rarr;</span>'

#: The longest text of an argument, in characters.
LENGTH = 100
#: A fingerprint in the text of a value.
_FINGERPRINT = re.compile(r" ?#[0-9a-f]{8,}")


def draw_pipeline(pipe: IterDataPipe[Any]) -> str:
    """Draw the stages of a pipeline: their arguments, and how many items they have yielded and skipped.

    The numbers are those of the latest epoch in this process. A loader with workers iterates over copies; its report
    counts those.

    >>> from torch.utils.data.datapipes.iter import IterableWrapper
    >>> "load_wds_shards" in draw_pipeline(IterableWrapper(["a.tar"]).load_wds_shards())
    True
    """
    return f'<div style="{ROW}">{ARROW.join(_draw(pipe))}</div>'


def _draw(stage: Any) -> list[str]:
    """Return the boxes of the stages up to this one."""
    sources = list(sources_of(stage))
    if len(sources) == 1:
        before = _draw(sources[0])
    elif sources:
        rows = "".join(f'<div style="{ROW}">{ARROW.join(_draw(source))}</div>' for source in sources)
        before = [f'<div style="{COLUMN}">{rows}</div>']
    else:
        before = []
    return [*before, _box(stage)]


def _box(stage: Any) -> str:
    parts = [f'<span style="{NAME}">{escape(functional_name_of(stage))}</span>']
    if arguments := _changed_arguments(stage):
        parts.append(f'<div style="{FAINT}">{escape(arguments)}</div>')
    if counts := _counts(stage):
        parts.append(f"<div>{counts}</div>")
    return f'<div style="{BOX}">{"".join(parts)}</div>'


def _changed_arguments(stage: Any) -> str:
    """Return the arguments of a stage that differ from the defaults, without credentials."""
    parameters = inspect.signature(type(stage)).parameters
    shown = []
    for name, value in arguments_of(stage).items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if value is not default and not (type(value) is type(default) and value == default):
            text = getattr(value, "__name__", None) or _FINGERPRINT.sub("", format_value(value, ()))
            shown.append(f"{name}={text[:LENGTH]}{'...' if len(text) > LENGTH else ''}")
    return ", ".join(shown)


def _counts(stage: Any) -> str:
    yielded, skipped = count_yielded(stage), declared(stage).counters.skipped().total
    counts = [f"{yielded:,} yielded"] if yielded else []
    if skipped and declared(stage).on_error != "raise":
        counts.append(f'<span style="color:#b3261e">{skipped:,} skipped</span>')
    return ", ".join(counts)
