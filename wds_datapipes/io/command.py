"""Opener for the output of shell commands: ``pipe:COMMAND``."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import signal
import subprocess
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from wds_datapipes.errors import CommandError, ShardOpenError
from wds_datapipes.io.shell_process import ShellProcess, describe_exit
from wds_datapipes.io.urls import split_scheme

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["open_command"]

#: How much the command may write ahead, in bytes: the most that Linux allows everybody.
PIPE_BYTES = 1 << 20
#: Bytes of the command's last output that the error shows.
TOLD_BYTES = 2000
#: How often a command that has closed its output is asked whether it has ended, in milliseconds.
ASK_MS = 50


def open_command(url: str, /, **_options: object) -> BinaryIO:
    """Run a shell command, with ``pipefail``, and read its output."""
    _, command = split_scheme(url)
    if not command.strip():
        raise ShardOpenError(f"{url!r} holds no command. Write it after the colon, as in pipe:zcat 000.tar.gz")
    try:
        process = ShellProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        raise ShardOpenError(f"The command {command!r} cannot be started: {error}") from error
    return cast(BinaryIO, CommandStream(process, command))


class CommandStream(io.RawIOBase):
    """Reads the output of a command; raises at the end if the command has failed.

    What the command says on its standard error is passed on as it comes, and its last lines are kept for the error.
    Both are read by the one thread that reads the stream, so a command that says much waits for its reader.
    """

    def __init__(self, process: ShellProcess, command: str) -> None:
        self._process = process
        self._command = command
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
            raise CommandError(self._verdict())
        return 0

    def _pass_on(self) -> None:
        """Forward the messages of the command."""
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
        self._process.signal(signal.SIGTERM)

    def _verdict(self) -> str:
        """The error of a command that has failed."""
        status = self._process.wait()
        told = self._told.decode(errors="replace").strip()
        return f"The command {self._command!r} {describe_exit(status)} after {self._received} bytes. " + (
            f"It said last: {told}" if told else "It said nothing on its standard error."
        )

    def close(self) -> None:
        """Close the pipes, and end the command with its child processes if it still runs."""
        if self.closed:
            return
        super().close()
        self._output.close()
        self._errors.close()
        if self._process.returncode is None:
            self._process.end()
