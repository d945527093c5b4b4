"""The output of shell commands: ``pipe:COMMAND``."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import select
import shutil
import signal
import subprocess
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from wds_datapipes.core.openers.schemes import split_scheme
from wds_datapipes.errors import CommandFailed, ShardNotOpened

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["open_command"]

#: How much the command may write ahead, in bytes: the most that Linux allows everybody.
PIPE_BYTES = 1 << 20
#: How much of what the command says last is told when it fails, in bytes.
TOLD_BYTES = 2000
#: How long a command that is no longer wanted gets to end by itself, in seconds.
GRACE_S = 0.5
#: How often a command that has closed its output is asked whether it has ended, in milliseconds.
ASK_MS = 50


def open_command(url: str, /, **_options: object) -> BinaryIO:
    """Run a command by a shell, in which a pipeline fails when any part of it does, and read what it writes."""
    _, command = split_scheme(url)
    if not command.strip():
        raise ShardNotOpened(f"{url!r} holds no command. Write it behind the colon, as in pipe:zcat 000.tar.gz")
    try:
        process = subprocess.Popen(  # noqa: S603  a pipe: URL is a command, by its meaning
            [*shell(), command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a process group of its own, which can be ended as one
        )
    except (OSError, ValueError) as error:
        raise ShardNotOpened(f"The command {command!r} cannot be started: {error}") from error
    return cast(BinaryIO, CommandStream(process, command))


@functools.cache
def shell() -> tuple[str, ...]:
    """The words in front of a command: a shell that can tell the failure of every part of a pipeline."""
    if bash := shutil.which("bash"):
        return (bash, "-o", "pipefail", "-c")
    if sh := shutil.which("sh"):
        words = (sh, "-o", "pipefail", "-c")
        probe = subprocess.run([*words, ":"], stderr=subprocess.DEVNULL, check=False)  # noqa: S603  all words are ours
        if probe.returncode == 0:
            return words
    raise ShardNotOpened(
        "A pipe: URL needs a shell that has the option pipefail, and this host has neither bash nor such an sh. "
        "Install bash"
    )


class CommandStream(io.RawIOBase):
    """Reads what a command writes; its end is the command's end, and an error if that was one.

    What the command says on its standard error is passed on as it comes, and its last lines are kept for the error.
    Both are read by the one thread that reads the stream, so a command that says much waits for its reader.
    """

    def __init__(self, process: subprocess.Popen[bytes], command: str) -> None:
        self._process = process
        self._command = command
        self._owner = os.getpid()
        self._received = 0
        self._told = b""
        # Both are pipes: open_command has asked for them.
        self._output = cast("IO[bytes]", process.stdout)
        self._errors = cast("IO[bytes]", process.stderr)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._poll.register(self._errors, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):  # not on this system, or beyond its limit: it stays small
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        while not self._output.closed:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._output.fileno():
                    self._pass_on()
                    continue
                size: int = cast(io.RawIOBase, self._output).readinto(buffer) or 0
                if size:
                    self._received += size
                    return size
                self._finish()
                break
        if self._process.returncode != 0:
            raise CommandFailed(self._verdict())
        return 0

    def _pass_on(self) -> None:
        """Hand on what the command has said."""
        said = os.read(self._errors.fileno(), 1 << 16)
        if not said:
            self._poll.unregister(self._errors)
            self._errors.close()
            return
        self._told = (self._told + said)[-TOLD_BYTES:]
        with contextlib.suppress(OSError):  # this process may have closed its own
            os.write(2, said)

    def _finish(self) -> None:
        """Wait for the command after its output has ended."""
        self._poll.unregister(self._output)
        self._output.close()
        while self._process.poll() is None:
            if self._errors.closed:
                self._process.wait()
            elif self._poll.poll(ASK_MS):
                self._pass_on()
        # A process that the command has left behind may hold the pipe open: take what is there, do not wait for more.
        while not self._errors.closed and self._poll.poll(0):
            self._pass_on()
        self._errors.close()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all that is left of the command and of what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _verdict(self) -> str:
        """What is wrong with how the command ended."""
        status = self._process.returncode
        told = self._told.decode(errors="replace").strip()
        return f"The command {self._command!r} {ending(status)} after {self._received} bytes. " + (
            f"It said last: {told}" if told else "It said nothing on its standard error."
        )

    def close(self) -> None:
        """Close the pipes and, where the command still runs, end it and all that it has started."""
        if self.closed:
            return
        super().close()
        self._output.close()
        self._errors.close()
        if os.getpid() != self._owner:
            # This is the copy of a forked process. The command is the child of the process that opened the stream.
            self._process.returncode = 0
        elif self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            self._signal(signal.SIGKILL)
            self._process.wait()


def ending(status: int) -> str:
    """A command's exit status in words.

    >>> ending(1), ending(127), ending(-9)
    ('ended with status 1', 'ended with status 127 (command not found)', 'was ended by SIGKILL')
    """
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    if status == 128 + signal.SIGPIPE:
        hint = "SIGPIPE: a later command of the pipeline stopped reading before an earlier one was done"
    elif status > 128:
        hint = signal_name(status - 128)
    else:
        hint = {126: "command not executable", 127: "command not found"}.get(status, "")
    return f"ended with status {status}" + (f" ({hint})" if hint else "")


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
