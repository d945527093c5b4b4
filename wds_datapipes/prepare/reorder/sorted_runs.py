"""Sorted runs of samples in one temporary file. It has no name, and so is gone with the process, however that ends."""

from __future__ import annotations

import contextlib
import marshal
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wds_datapipes.errors import ShardWriteError
from wds_datapipes.types import Sample

__all__ = ["SortedRun", "SortedRunFile", "UnsortedSample", "check_room"]

#: Before each sample: how long its head is, and its data. The head is what it is sorted by, its key and its fields. It
#: is made by marshal, whose format may change with Python, and is read by this process alone.
LENGTHS = struct.Struct("<IQ")
#: The least that is read of a run at once, in bytes.
MIN_WINDOW = 4096
#: How much is collected before it is written, in bytes.
BUFFER_BYTES = 1 << 20


class SortedRun(NamedTuple):
    """Samples that are sorted: where they begin in the file, and where they end."""

    begin: int
    end: int


class SortedRunFile:
    """A temporary file of runs, with one descriptor for all of them.

    Args:
        folder: where it is; by default, where the system has temporary files.

    Raises:
        ShardWriteError: nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = os.fspath(folder or tempfile.gettempdir())
        self._end = 0
        try:
            self._stream = tempfile.TemporaryFile(dir=self._folder, buffering=BUFFER_BYTES)  # noqa: SIM115  see close
        except OSError as error:
            raise self._failure("written", error) from error

    def write(self, items: Iterable[tuple[Any, Sample]]) -> SortedRun:
        """Write samples in the order in which they come, each with what it is sorted by.

        Raises:
            ShardWriteError: the disk is full, for example.
        """
        begin = self._end
        write = self._stream.write
        try:
            for order, sample in items:
                fields = [(field, value) for field, value in sample.items() if field[:2] != "__"]
                sizes = [len(value) for _, value in fields]
                head = marshal.dumps((order, sample["__key__"], [field for field, _ in fields], sizes))
                write(LENGTHS.pack(len(head), sum(sizes)) + head)
                for _, value in fields:
                    write(value)
                self._end += LENGTHS.size + len(head) + sum(sizes)
            self._stream.flush()
        except ShardWriteError:  # of a file that the samples come from
            raise
        except OSError as error:
            raise self._failure("written", error) from error
        return SortedRun(begin, self._end)

    def read(self, run: SortedRun, window_bytes: int) -> Iterator[tuple[Any, UnsortedSample]]:
        """Yield what each sample of a run is sorted by, and what loads the sample before the next one is asked for.

        Args:
            run: what `write` has returned.
            window_bytes: how much is read at once; a larger field is read by itself when it is loaded.

        Raises:
            ShardWriteError: the disk has failed.
        """
        waiting = UnsortedSample(self, run, window_bytes)
        while waiting.advance():
            yield waiting.order, waiting

    def part(self, begin: int, size: int) -> bytes:
        """Return bytes of the file."""
        try:
            data = os.pread(self._stream.fileno(), size, begin)
            while len(data) < size:  # from 2 GiB on, they come in parts
                more = os.pread(self._stream.fileno(), size - len(data), begin + len(data))
                if not more:
                    raise OSError(f"it ends at byte {begin + len(data)}")
                data += more
        except OSError as error:
            raise self._failure("read", error) from error
        return data

    def close(self) -> None:
        """Give the room on the disk back."""
        with contextlib.suppress(OSError):  # of what could not be written before either
            self._stream.close()

    def _failure(self, what: str, error: OSError) -> ShardWriteError:
        return ShardWriteError(
            f"The temporary file in {self._folder!r} cannot be {what}, after {self._end} bytes: "
            f"{error.strerror or error}. Choose a folder with more room"
        )


class UnsortedSample:
    """The sample of a run that is next, and is read when it is its turn: its fields may be large.

    Attributes:
        order: what it is sorted by.
    """

    def __init__(self, file: SortedRunFile, run: SortedRun, window_bytes: int) -> None:
        self._file = file
        self._at, self._end = run
        self._window_bytes = max(window_bytes, MIN_WINDOW)
        self._window, self._used = b"", 0
        self.order: Any = None
        self._key = ""
        self._fields: list[str] = []
        self._sizes: list[int] = []

    def advance(self) -> bool:
        """Go to the next sample, if there is one. The one before has to be loaded."""
        if self._at == self._end and self._used == len(self._window):
            return False
        size, _ = LENGTHS.unpack(self._take(LENGTHS.size))
        self.order, self._key, self._fields, self._sizes = marshal.loads(self._take(size))  # noqa: S302  written above
        return True

    def load(self) -> Sample:
        """Return the sample, once."""
        sample: Sample = {"__key__": self._key}
        for field, size in zip(self._fields, self._sizes, strict=True):
            sample[field] = self._take(size)
        return sample

    def _take(self, size: int) -> bytes:
        """Return the next bytes of the run."""
        used, end = self._used, self._used + size
        if end <= len(self._window):
            self._used = end
            return self._window[used:end]
        begin = self._window[used:]
        needed = size - len(begin)
        if needed >= self._window_bytes:
            self._window, self._used = b"", 0
            rest = self._file.part(self._at, needed)
            self._at += needed
            return begin + rest if begin else rest
        self._window = self._file.part(self._at, min(self._window_bytes, self._end - self._at))
        self._at += len(self._window)
        self._used = needed
        return begin + self._window[:needed]


def check_room(needed: Mapping[str, int]) -> None:
    """Raise unless disks have room for what will be written.

    Args:
        needed: folders, and how many bytes will be written to each of them; some may be on one disk.

    Raises:
        ShardWriteError: a disk has not, or there is no such folder.
    """
    disks: dict[int, tuple[list[str], int]] = {}
    for folder, size in needed.items():
        try:
            disk = Path(folder).stat().st_dev
        except OSError as error:
            raise ShardWriteError(f"Nothing can be written to {folder!r}: {error.strerror}") from error
        folders, total = disks.get(disk, ([], 0))
        disks[disk] = [*folders, folder], total + size
    for folders, total in disks.values():
        free = shutil.disk_usage(folders[0]).free
        if total > free:
            places = " and ".join(map(repr, folders))
            raise ShardWriteError(
                f"At least {total} bytes will be written to {places}, and the disk has room for {free}. Nothing was "
                f"written. Choose a folder on another disk"
            )
