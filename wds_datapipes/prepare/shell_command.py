"""Shell commands that transform samples, with one temporary folder per sample and one file per field."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import IO, Any, cast

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.io.shell_process import ShellProcess, describe_exit
from wds_datapipes.parallel.executors import defer_exit
from wds_datapipes.prepare.sample_folder import describe_sample, read_many, read_one, write_sample
from wds_datapipes.redaction import redact_command
from wds_datapipes.redaction.storage_options import redactor_of_command
from wds_datapipes.types import Sample

__all__ = ["SampleCommand"]

#: How many of the last bytes of output an error message includes.
OUTPUT_BYTES = 2000
#: How often to check whether the command ended while its background processes keep its output open, in milliseconds.
POLL_MS = 50


class SampleCommand:
    """Transforms samples of bytes with a shell command, which runs in a temporary folder.

    The folder contains a file for each field, such as ``sample.jpg``, and ``sample.__key__`` with the key. The files
    named ``sample.*`` after the command ends are the new sample; if there are none, the sample is dropped. Other files
    are ignored. In a pipeline of commands, each must succeed.

    Args:
        command: the shell command.
        several: the command writes any number of samples, as ``sample-000000.jpg`` and so on. Their keys are in
            ``sample-000000.__key__``; by default, the number is appended to the key. The files ``sample.*`` are
            ignored.
        timeout_s: the time limit for each sample, in seconds.

    Raises:
        ValueError: the command is empty, or the time limit is not positive.

    Examples:
        >>> upper = SampleCommand("tr a-z A-Z < sample.txt > sample.upper; rm sample.txt")
        >>> upper({"__key__": "a", "__url__": "x.tar", "txt": b"a cat"})
        {'__key__': 'a', '__url__': 'x.tar', 'upper': b'A CAT'}
    """

    def __init__(self, command: str, *, several: bool = False, timeout_s: float | None = None) -> None:
        if not command.strip():
            raise ValueError("The command is empty")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"The time limit must be positive, not {timeout_s:g} s")
        self._command, self._several, self._timeout_s = command, several, timeout_s
        self._prefix = _prefix()

    def __call__(self, sample: Sample) -> Sample | list[Sample] | None:
        """Run the command on a sample, and return its results.

        Raises:
            SampleSourceError: the command failed, took too long, or wrote something other than a sample.
            EncodeError: the name of a field is not a valid file name.
        """
        with ExitStack() as opened:
            with defer_exit():
                folder = opened.enter_context(
                    tempfile.TemporaryDirectory(prefix=self._prefix, ignore_cleanup_errors=True)
                )
            write_sample(sample, folder)
            self._run(folder, sample)
            return read_many(sample, folder) if self._several else read_one(sample, folder)

    def remove_leftovers(self) -> None:
        """Remove the folders of killed processes, and kill the processes still working in them.

        Call this after all workers have ended.
        """
        for folder in Path(tempfile.gettempdir()).resolve().glob(f"{self._prefix}*"):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if (process / "cwd").readlink() == folder:
                        os.kill(int(process.name), signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: str, sample: Sample) -> None:
        with ExitStack() as opened:
            with defer_exit():
                process = ShellProcess(self._command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                opened.callback(process.end)
            output = opened.enter_context(cast("IO[bytes]", process.stdout))
            output_tail, is_done = _read_output(process, output, self._timeout_s)
        if is_done and process.returncode == 0:
            return
        how = describe_exit(process.wait()) if is_done else f"was stopped after its time limit of {self._timeout_s:g} s"
        message = redactor_of_command(self._command)(output_tail.decode(errors="replace").strip())
        raise SampleSourceError(
            f"The command {redact_command(self._command)!r} {how} for {describe_sample(sample)}. "
            + (f"Its last output is: {message}" if message else "It printed nothing.")
        )

    def __repr__(self) -> str:
        return f"SampleCommand({redact_command(self._command)!r})"

    # `convert_shards` uses this as the fingerprint of the function.
    def __getstate__(self) -> tuple[Any, ...]:
        return self._command, self._several, self._timeout_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._command, self._several, self._timeout_s = state
        self._prefix = _prefix()


def _prefix() -> str:
    return f"wds-map-{secrets.token_hex(6)}-"


def _read_output(process: ShellProcess, output: IO[bytes], timeout_s: float | None) -> tuple[bytes, bool]:
    """Read the output of a command, and return its tail and whether the command ended in time."""
    deadline = float("inf") if timeout_s is None else monotonic() + timeout_s
    tail = b""
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while process.poll() is None:
        remaining_s = deadline - monotonic()
        if remaining_s <= 0:
            return tail, False
        if poll.poll(min(POLL_MS, remaining_s * 1000)):
            chunk = os.read(output.fileno(), 1 << 16)
            if not chunk:  # the command has closed its output, but may still run
                try:
                    process.wait(None if timeout_s is None else max(0.0, deadline - monotonic()))
                except subprocess.TimeoutExpired:
                    return tail, False
                break
            tail = (tail + chunk)[-OUTPUT_BYTES:]
    # Background processes may keep the output open, so read only what is available.
    process.signal(signal.SIGKILL)
    if poll.poll(0):
        tail = (tail + os.read(output.fileno(), 1 << 16))[-OUTPUT_BYTES:]
    return tail, True
