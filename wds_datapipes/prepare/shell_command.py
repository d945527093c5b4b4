"""A shell command as a function of a sample: the fields are files in a folder of its own, before and after."""

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

from wds_datapipes.errors import SampleCommandError
from wds_datapipes.io.shell_process import ShellProcess, describe_exit
from wds_datapipes.parallel.executors import ending_later
from wds_datapipes.prepare.sample_folder import place_of, read_many, read_one, write_sample
from wds_datapipes.types import Sample

__all__ = ["SampleCommand"]

#: How much of what the command says last is told when it fails, in bytes.
TOLD_BYTES = 2000
#: How often it is asked whether it has ended, where what it has left behind holds its output open, in milliseconds.
ASK_MS = 50


class SampleCommand:
    """Maps samples of bytes by a shell command, which runs in a temporary folder.

    The folder has a file for each field, such as ``sample.jpg``, and ``sample.__key__`` with the key. What is there as
    ``sample.`` when the command ends is the new sample; if there is nothing, the sample is left out. Other files are
    the command's own. In a pipeline of commands, each of them has to succeed.

    Args:
        command: what the shell runs.
        several: the command makes several samples of one, or none: ``sample-000000.jpg`` and so on. Their keys are in
            ``sample-000000.__key__``, or the key with the number. The files ``sample.`` are left out then.
        timeout_s: how long it may take for a sample, in seconds.

    Raises:
        ValueError: there is no command, or no time.

    Examples:
        >>> upper = SampleCommand("tr a-z A-Z < sample.txt > sample.upper; rm sample.txt")
        >>> upper({"__key__": "a", "__url__": "x.tar", "txt": b"a cat"})
        {'__key__': 'a', '__url__': 'x.tar', 'upper': b'A CAT'}
    """

    def __init__(self, command: str, *, several: bool = False, timeout_s: float | None = None) -> None:
        if not command.strip():
            raise ValueError("The command is empty")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"The time for a sample is above 0 seconds, and not {timeout_s:g}")
        self._command, self._several, self._timeout_s = command, several, timeout_s
        self._prefix = _prefix()

    def __call__(self, sample: Sample) -> Sample | list[Sample] | None:
        """Return what the command makes of a sample.

        Raises:
            SampleCommandError: it has failed, has taken too long, or has left what is no sample.
            UnwritableSampleError: a field has a name that no file can have.
        """
        with ExitStack() as opened:
            with ending_later():
                folder = opened.enter_context(
                    tempfile.TemporaryDirectory(prefix=self._prefix, ignore_cleanup_errors=True)
                )
            write_sample(sample, folder)
            self._run(folder, sample)
            return read_many(sample, folder) if self._several else read_one(sample, folder)

    def remove_leftovers(self) -> None:
        """Remove the folders of processes of this host that were killed, and end what works in them.

        To be called when all of them have ended.
        """
        for folder in Path(tempfile.gettempdir()).resolve().glob(f"{self._prefix}*"):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if (process / "cwd").readlink() == folder:
                        os.kill(int(process.name), signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: str, sample: Sample) -> None:
        with ExitStack() as opened:
            with ending_later():
                process = ShellProcess(self._command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                opened.callback(process.end)
            output = opened.enter_context(cast("IO[bytes]", process.stdout))
            told, is_done = _read_output(process, output, self._timeout_s)
        if is_done and process.returncode == 0:
            return
        how = describe_exit(process.wait()) if is_done else f"was ended, as it took longer than {self._timeout_s:g} s,"
        said = told.decode(errors="replace").strip()
        raise SampleCommandError(
            f"The command {self._command!r} {how} for {place_of(sample)}. "
            + (f"It said last: {said}" if said else "It said nothing.")
        )

    def __repr__(self) -> str:
        return f"SampleCommand({self._command!r})"

    # What tells it from another one: `convert_shards` takes this for the function's fingerprint.
    def __getstate__(self) -> tuple[Any, ...]:
        return self._command, self._several, self._timeout_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._command, self._several, self._timeout_s = state
        self._prefix = _prefix()


def _prefix() -> str:
    return f"wds-map-{secrets.token_hex(6)}-"


def _read_output(process: ShellProcess, output: IO[bytes], timeout_s: float | None) -> tuple[bytes, bool]:
    """Read what a command says until it ends, and return the end of that, and whether it has ended in time."""
    deadline = float("inf") if timeout_s is None else monotonic() + timeout_s
    told = b""
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while process.poll() is None:
        left_s = deadline - monotonic()
        if left_s <= 0:
            return told, False
        if poll.poll(min(ASK_MS, left_s * 1000)):
            said = os.read(output.fileno(), 1 << 16)
            if not said:  # it has ended, or is about to, or goes on in silence
                try:
                    process.wait(None if timeout_s is None else max(0.0, deadline - monotonic()))
                except subprocess.TimeoutExpired:
                    return told, False
                break
            told = (told + said)[-TOLD_BYTES:]
    # What it has left behind may hold its output open: take what is there, do not wait for more.
    process.signal(signal.SIGKILL)
    if poll.poll(0):
        told = (told + os.read(output.fileno(), 1 << 16))[-TOLD_BYTES:]
    return told, True
