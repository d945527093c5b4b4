"""Megatron Energon's database of sample keys: ``.nv-meta/index.sqlite``."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

from wds_datapipes.errors import MissingSidecarError, UnsupportedSidecarError
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.redaction import redact

#: The tables and columns that Energon queries.
TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, content_byte_size INTEGER
);
"""
#: Created after the rows, which is faster.
INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples (tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts (tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts (tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


class EnergonKeys:
    """The database of a dataset, with a row for each sample and each of its files."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.executescript(TABLES)

    def add(self, number: int, url: str, index: ShardIndex) -> None:
        """Add the shard at position ``number`` in ``.info.json``.

        Raises:
            UnsupportedSidecarError: a key occurs twice.
        """
        offsets = index.columns["sample_offsets"].tolist()
        for at, sample in enumerate(index):
            try:
                self._database.execute(
                    "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
                    (number, sample.key, at, offsets[at], offsets[at + 1] - offsets[at]),
                )
            except sqlite3.IntegrityError:
                raise UnsupportedSidecarError(
                    f"The key {sample.key!r} of {redact(url)} occurs twice, and Energon finds samples by their keys. "
                    f"Give each sample a unique key, or pass keys=False, which supports sequential reading only"
                ) from None
            parts = [(number, at, entry.field, entry.offset, entry.size) for entry in sample.entries]
            self._database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)


@contextlib.contextmanager
def energon_keys(folder: str) -> Iterator[EnergonKeys]:
    """Write ``index.sqlite`` and ``index.uuid``, which identifies it, to a local folder.

    They replace existing ones when they are complete.

    Raises:
        MissingSidecarError: they cannot be written.
    """
    part = f"{folder}index.sqlite.{secrets.token_hex(8)}.part"
    try:
        with contextlib.closing(sqlite3.connect(part)) as database:
            # An incomplete file is removed, so no rollback is needed.
            database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
            yield EnergonKeys(database)
            database.executescript(INDEXES)  # commits the rows first
        with open(part, "rb") as file:  # noqa: PTH123  a string
            os.fsync(file.fileno())
        Path(part).replace(f"{folder}index.sqlite")
        Path(f"{folder}index.uuid").write_text(str(uuid.uuid4()), encoding="ascii")
    except (OSError, sqlite3.OperationalError) as error:
        raise MissingSidecarError(f"{folder}index.sqlite cannot be written: {error}") from error
    finally:
        Path(part).unlink(missing_ok=True)


def remove_energon_keys(folder: str) -> None:
    """Remove the database, which may describe other shards or older versions of these."""
    for name in ("index.sqlite", "index.uuid"):
        Path(f"{folder}{name}").unlink(missing_ok=True)
