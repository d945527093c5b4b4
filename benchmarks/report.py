"""Write the tables and plots of docs/explanation/benchmarks.md from the JSON files of the benchmarks.

    python benchmarks/report.py benchmarks/results/*.json
    python benchmarks/report.py --check benchmarks/results/*.json

A file is named after the question that its program answers. Most have a section in the page, between two comments,
which is replaced; sections without a file stay as they are. Plots that the page shows go to ``docs/images``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness import loader_sections, sections
from harness.sections import Section

__all__ = ["SECTIONS", "write_page"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"

#: What makes a section of results, by the name of the question.
SECTIONS: dict[str, Callable[[Any], Section]] = {
    "end_to_end": loader_sections.section_of_loaders,
    "reading": sections.section_of_contests,
    "memory": sections.section_of_memory,
    "indexed": sections.section_of_indexes,
    "remote": sections.section_of_contests,
    "parts": loader_sections.section_of_parts,
    "stores": sections.section_of_contests,
    "s3": loader_sections.section_of_s3,
    "decoding": sections.section_of_contests,
    "delivery": loader_sections.section_of_deliveries,
    "stages": sections.section_of_stages,
    "writing": sections.section_of_contests,
    "state": sections.section_of_states,
    "merged_state": sections.section_of_merged_states,
    "runs": sections.section_of_runs,
    "growth": sections.section_of_growth,
    "hosts": sections.section_of_hosts,
    "shuffle_quality": sections.section_of_shuffles,
    "bucketing": sections.section_of_buckets,
    "packing": sections.section_of_packing,
    "planning": sections.section_of_planning,
    "training": loader_sections.section_of_training,
    "gpu": loader_sections.section_of_gpu,
    "ranks": sections.section_of_ranks,
    "other_hosts": sections.section_of_other_hosts,
    "own_code": sections.section_of_own_code,
}


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return where and with what results were measured."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    return (
        f"Measured on {cores} ({machine.get('processor') or 'unknown processor'}) with a load of "
        f"{machine['load'][0]:.1f}, Python {machine['python']}, {versions}."
    )


def with_results(text: str, name: str, section: Section, machine: Mapping[str, Any]) -> str:
    """Return the text of a page with another content of a section."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page lacks the comments {begin} and {end}")
    return f"{before}{begin}\n\n{section.text}\n\n{machine_line(machine)}\n\n{end}{after}"


def write_page(files: Iterable[Path], page: Path, images: Path | None) -> bool:
    """Replace the sections of a page for which there are results, and draw its plots; return whether it changed.

    Without a folder for plots, nothing is written.
    """
    text = old = page.read_text(encoding="utf-8")
    for file in files:
        if f"<!-- begin {file.stem} -->" not in text:
            print(f"{file}: the page has no section for it")
            continue
        results = json.loads(file.read_text(encoding="utf-8"))
        section = SECTIONS[file.stem](results["results"])
        text = with_results(text, file.stem, section, results["machine"])
        image = f"benchmarks-{file.stem.replace('_', '-')}.svg"
        if images is not None and image in text:
            section.plot(images / image)
    if images is not None:
        page.write_text(text, encoding="utf-8")
    return text != old


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="the results in JSON")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to change (docs/explanation/benchmarks.md)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="the folder for plots (docs/images)")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page has other figures")
    arguments = parser.parse_args()
    is_changed = write_page(arguments.files, arguments.page, None if arguments.check else arguments.images)
    if arguments.check and is_changed:
        sys.exit(f"{arguments.page} has other figures than the results: run this without --check")


if __name__ == "__main__":
    main()
