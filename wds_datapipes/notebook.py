"""Extension of IPython that shows samples as HTML: ``%load_ext wds_datapipes.notebook``."""

from __future__ import annotations

from typing import Any

from wds_datapipes.prepare.preview_html import samples_as_html

#: The most samples of a list that are shown.
SAMPLES = 24


def load_ipython_extension(shell: Any) -> None:
    """Show samples and lists of samples as HTML; IPython calls this. A `LoadingReport` needs no extension."""
    html = shell.display_formatter.formatters["text/html"]
    html.for_type(dict, _show_sample)
    html.for_type(list, _show_samples)


def unload_ipython_extension(shell: Any) -> None:
    """Undo `load_ipython_extension`; IPython calls this for ``%unload_ext``."""
    html = shell.display_formatter.formatters["text/html"]
    for kind in (dict, list):
        html.pop(kind, None)


def _show_sample(value: dict[Any, Any]) -> str | None:
    """Return a sample as HTML, or None for any other dict, which IPython shows as text."""
    return samples_as_html([value]) if "__key__" in value else None


def _show_samples(values: list[Any]) -> str | None:
    if not values or not all(isinstance(value, dict) and "__key__" in value for value in values):
        return None
    more = f"<div>and {len(values) - SAMPLES:,} more</div>" if len(values) > SAMPLES else ""
    return samples_as_html(values[:SAMPLES]) + more
