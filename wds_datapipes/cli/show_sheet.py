"""Contact sheets: samples with their pictures and texts, and facts about their dataset, as one HTML page.

The page is self-contained, and has no scripts and no external resources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import numpy as np

from wds_datapipes.cli._report import size_of_shards
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.dataset_contents import DatasetContents
from wds_datapipes.prepare.preview_html import escape_text, samples_as_html
from wds_datapipes.types import Sample

#: What browsers allow the page: no scripts, and nothing from elsewhere.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'"


def facts_of_dataset(table: DatasetContents) -> dict[str, str]:
    """Return facts about a dataset."""
    return {
        "samples": f"{len(table):,}",
        "shards": f"{table.shards:,}",
        "bytes of shards": size_of_shards(table.bytes, table.shards, table.unread_shards),
        "median sample": human_bytes(float(np.median(table.sizes))) if len(table) else "none",
    }


def sheet_as_html(
    samples: Sequence[Sample], title: str, facts: Mapping[str, str], *, controls: str = "", pages: str = ""
) -> str:
    """Return the HTML page of some samples, whose contents are never run, and cannot break the page.

    Args:
        samples: the samples.
        title: the title of the page.
        facts: names and values.
        controls: HTML above the samples.
        pages: HTML above and below the samples.
    """
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return page.substitute(
        policy=POLICY,
        title=escape_text(title),
        facts="".join(
            f"<div><dt>{escape_text(name)}</dt><dd>{escape_text(value)}</dd></div>" for name, value in facts.items()
        ),
        controls=controls,
        pages=pages,
        samples=samples_as_html(samples) if samples else "<p>There are no samples.</p>",
    )
