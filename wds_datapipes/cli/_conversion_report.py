"""Reports about the shards of a conversion, as text and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from wds_datapipes.cli._app import on_one_line, printable
from wds_datapipes.cli._copy import print_skipped
from wds_datapipes.cli._meter import plural
from wds_datapipes.errors import WdsError
from wds_datapipes.io.openers import redact
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.convert import ConvertedShard

__all__ = ["facts_of", "message_of", "report"]


def message_of(error: BaseException) -> str:
    """Return the message of an error, with its notes if it is not an error of this package."""
    notes = () if isinstance(error, WdsError) else [str(note) for note in getattr(error, "__notes__", ())]
    return f"{error} ({'; '.join(notes)})" if notes else str(error)


def facts_of(
    done: Sequence[ConvertedShard], failures: Mapping[str, BaseException], skipped: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return the facts for JSON."""
    return {
        "shards": [
            {
                "source": redact(shard.source),
                "url": redact(shard.info.url),
                "read": shard.read,
                "skipped": shard.skipped,
                "samples": shard.info.samples,
                "bytes": shard.info.bytes,
                "sha256": shard.info.sha256,
                "new": shard.is_new,
            }
            for shard in done
        ],
        "failed": [
            {"source": redact(url), "kind": type(error).__name__, "message": message_of(error)}
            for url, error in failures.items()
        ],
        "skipped": [{"kind": kind, "message": message} for kind, message in skipped],
    }


def report(
    done: Sequence[ConvertedShard], failures: Mapping[str, BaseException], skipped: Sequence[tuple[str, str]]
) -> None:
    """Print the shards written, and the skipped and failed ones to standard error."""
    for shard in done:
        sys.stdout.write(
            f"{printable(redact(shard.info.url))}: {plural(shard.info.samples, 'sample')} of {shard.read:,} read, "
            f"{human_bytes(shard.info.bytes)}{'' if shard.is_new else ', already finished'}\n"
        )
    sys.stdout.flush()
    print_skipped(skipped)
    for url, failure in failures.items():
        described = f"{type(failure).__name__}: {message_of(failure)}"
        typer.echo(f"Error: {printable(redact(url))}: {on_one_line(described)}", err=True)
    if failures:
        total = len(done) + len(failures)
        typer.echo(
            f"Error: {len(failures):,} of {plural(total, 'shard')} failed. Run the same command "
            f"again to convert only the missing ones",
            err=True,
        )
