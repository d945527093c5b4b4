"""The program that measures a loader in a process, and in an environment, of its own."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from environments import environment_variables, python_of
from harness.crops import BATCH, SIZE
from harness.processes import TICKS_PER_S, cpu_seconds, descendants, memory
from harness.store import count_requests

from loaders.table import LOADERS
from loaders.tar import Source

__all__ = ["LoaderError", "Reading", "Run", "converted", "measure", "read_images"]

PROGRAMS = Path(__file__).resolve().parents[1]
PAGE = 4096
#: The time limit of a measurement in seconds, after which the loader counts as hanging.
TIME_LIMIT_S = 300
#: How long images are read from S3 at least, in seconds and whole passes, once that has worked.
MIN_S = 1.0


class Run(NamedTuple):
    """The results of one measurement."""

    samples_per_s: float
    cpu_s_per_sample: float
    seconds_to_first: float
    memory: int
    """The increase of the memory of all processes, in bytes."""
    worker_memory: int
    """The memory of the processes below the training process in bytes, divided by the number of workers."""
    mean: float
    """The mean of all pixels, if they are compared."""
    difference: float
    """The mean absolute difference of the compared samples to Pillow's pixels."""
    version: str
    """The version of the loader's package."""


class Reading(NamedTuple):
    """What it takes to read the images of shards from S3.

    Attributes:
        images: the number of images of a pass.
        bytes: their size.
        s: the time of a pass in seconds.
        cpu_s: its CPU time in seconds, with that of commands.
        requests: its requests.
        connections: the largest number of connections in use at the same time.
    """

    images: int
    bytes: int
    s: float
    cpu_s: float
    requests: float
    connections: int


class LoaderError(Exception):
    """A loader that does not take part, and why."""


def measure(name: str, source: Any, workers: int, samples: int, pixels: str | None) -> Run:
    """Load an epoch in a new process; ``pixels`` is a file with pixels to compare."""
    return Run(*_in_process("measure", name, source, workers, samples, pixels))


def read_images(name: str, source: Source) -> Reading:
    """Read the images of shards in S3 in a new process."""
    return Reading(*_in_process("images", name, source))


def converted(names: Iterable[str], urls: list[str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the folders with copies of shards in formats of loaders, and why other loaders have none.

    A copy that exists is used again.
    """
    copies: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if LOADERS[name].convert is None:
            continue
        copy = folder / f"{Path(urls[0]).stem}-{LOADERS[name].package.environment}"
        try:
            if not copy.exists():
                _in_process("convert", name, urls, f"{copy}.partial")
                Path(f"{copy}.partial").rename(copy)
            copies[name] = str(copy)
        except LoaderError as error:
            shutil.rmtree(f"{copy}.partial", ignore_errors=True)
            left_out[name] = str(error)
    return copies, left_out


def _in_process(action: str, name: str, *arguments: Any) -> Any:
    """Run this program in the loader's environment, return its result, and kill what is left of its processes."""
    environment = LOADERS[name].package.environment
    python = python_of(environment) if environment and python_of(environment).exists() else Path(sys.executable)
    with TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        command = [
            str(python),
            "-W",
            "ignore",
            "-m",
            "loaders.process",
            action,
            name,
            json.dumps(arguments),
            str(result),
        ]
        # For the copies that loaders make.
        variables = environment_variables(environment) | {"TMPDIR": folder, "HF_HOME": folder}
        variables["PYTHONPATH"] = os.pathsep.join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        try:
            process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise LoaderError(f"did not end within {TIME_LIMIT_S} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not result.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            raise LoaderError(next((line for line in reversed(lines) if line.strip()), "ended without a result"))
        return json.loads(result.read_text(encoding="utf-8"))


class Comparison:
    """Compares batches with pixels from Pillow, and counts the labels."""

    def __init__(self, path: str | None) -> None:
        self.expected = dict(zip(*np.load(path).values(), strict=True)) if path else {}
        self.labels: list[int] = []
        self.means: list[float] = []
        self.differences: list[float] = []

    def add(self, images: Any, labels: Any) -> None:
        """Compare a batch, and record its labels."""
        if images.shape != (len(labels), 3, SIZE, SIZE) or str(images.dtype) != "torch.uint8":
            raise AssertionError(f"a batch of {tuple(images.shape)} {images.dtype} and {len(labels)} labels")
        self.labels += labels.tolist()
        if self.expected:
            self.means.append(float(images.float().mean()))
            for image, label in zip(images, labels.tolist(), strict=True):
                if (expected := self.expected.get(label)) is not None:
                    self.differences.append(float(np.abs(image.numpy().astype(np.int16) - expected).mean()))


def _measure(name: str, source: Any, workers: int, samples: int, pixels: str | None) -> Run:
    """Load an epoch in this process."""
    loader = LOADERS[name]
    for module in loader.package.modules:
        importlib.import_module(module)
    assert loader.batches is not None
    comparison = Comparison(pixels)
    start_at, end_at = max(BATCH, samples // 4), max(2 * BATCH, samples - max(samples // 8, workers * BATCH))
    memory_before = memory(os.getpid())
    begin = time.perf_counter()
    batches = iter(loader.batches(source, workers))
    first = next(batches)
    to_first = time.perf_counter() - begin
    seen = 0
    start: tuple[int, float, float] | None = None
    end: tuple[int, float, float] | None = None
    all_memory = worker_memory = 0
    for images, labels in chain([first], batches):
        images.numpy().reshape(-1)[::PAGE].sum()
        comparison.add(images, labels)
        seen += len(labels)
        if start is None and seen >= start_at:
            start = seen, time.perf_counter(), cpu_seconds()
        elif end is None and seen >= end_at:
            end = seen, time.perf_counter(), cpu_seconds()
            sizes = [memory(pid) for pid in descendants()]
            all_memory = memory(os.getpid()) + sum(sizes) - memory_before
            worker_memory = sum(sizes) // max(workers, 1)
    if sorted(comparison.labels) != list(range(samples)):
        raise AssertionError(f"{len(comparison.labels)} samples, {len(set(comparison.labels))} different, of {samples}")
    assert start is not None
    assert end is not None
    count, elapsed, cpu = (after - before for before, after in zip(start, end, strict=True))
    mean, difference = (
        statistics.fmean(values) if values else 0.0 for values in (comparison.means, comparison.differences)
    )
    cpu = max(cpu, 1 / TICKS_PER_S)  # the resolution, which matters to short runs only
    number = version(loader.package.distribution)
    return Run(count / elapsed, cpu / count, to_first, all_memory, worker_memory, mean, difference, number)


def _read_images(name: str, source: Any) -> Reading:
    """Read all images in this process, and some times again, and return what that took."""
    read = LOADERS[name].images
    assert read is not None
    for _ in read(Source(*source)):  # imports, and makes clients
        pass
    address = os.environ["AWS_ENDPOINT_URL"]
    images = size = 0
    before, begin, cpu = count_requests(address), time.perf_counter(), cpu_seconds()
    passes, elapsed = 0, 0.0
    while elapsed < MIN_S:
        for image in read(Source(*source)):
            images, size = images + 1, size + len(image)
        passes, elapsed = passes + 1, time.perf_counter() - begin
    spent, after = cpu_seconds() - cpu, count_requests(address)
    requests = (after.requests - before.requests) / passes
    return Reading(images // passes, size // passes, elapsed / passes, spent / passes, requests, after.at_once)


def _convert(name: str, urls: list[str], target: str) -> None:
    converter = LOADERS[name].convert
    assert converter is not None
    converter(urls, Path(target))


def main() -> None:
    action, name, arguments, target = sys.argv[1:]
    actions: dict[str, Callable[..., Any]] = {"measure": _measure, "images": _read_images, "convert": _convert}
    Path(target).write_text(json.dumps(actions[action](name, *json.loads(arguments))), encoding="utf-8")
    os._exit(0)  # without waiting for workers and threads, which the caller kills


if __name__ == "__main__":
    main()
