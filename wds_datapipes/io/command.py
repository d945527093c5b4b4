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

from wds_datapipes.errors import ShardOpenError, ShardReadError
from wds_datapipes.io.shell_process import ShellProcess, describe_exit, describe_failure
from wds_datapipes.io.urls import split_scheme
from wds_datapipes.redaction import redact_command

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: Size of the pipe from the command, in bytes: the maximum for unprivileged processes on Linux.
PIPE_BYTES = 1 << 20
#: The error of a failed command quotes this many bytes from the end of its standard error.
STDERR_TAIL_BYTES = 2000
#: Interval for polling a command that has closed its output but not exited, in milliseconds.
POLL_MS = 50


def open_command(url: str, /, **_options: object) -> BinaryIO:
    """Run a shell command, with ``pipefail``, and read its output."""
    _, command = split_scheme(url)
    if not command.strip():
        raise ShardOpenError(f"{url!r} holds no command. Write it after the colon, as in pipe:zcat 000.tar.gz")
    try:
        process = ShellProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        raise ShardOpenError(f"The command {redact_command(command)!r} cannot be started: {error}") from error
    return cast(BinaryIO, _CommandStream(process, command))


class _CommandStream(io.RawIOBase):
    """Reads the output of a command; raises at the end if the command has failed.

    The command's standard error is forwarded as it arrives, and its last lines are quoted in the error. The thread that
    reads the stream reads both pipes, so a command with many messages waits for its reader.
    """

    def __init__(self, process: ShellProcess, command: str) -> None:
        self._process = process
        self._command = command
        self._received = 0
        self._stderr_tail = b""
        self._output = cast("IO[bytes]", process.stdout)
        self._errors = cast("IO[bytes]", process.stderr)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._poll.register(self._errors, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):  # unsupported or above the limit: keep the default size
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        while not self._output.closed:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._output.fileno():
                    self._forward_stderr()
                    continue
                size: int = cast(io.RawIOBase, self._output).readinto(buffer) or 0
                if size:
                    self._received += size
                    return size
                self._finish()
                break
        if self._process.returncode != 0:
            what = f"{describe_exit(self._process.wait())} after {self._received} bytes"
            raise ShardReadError(describe_failure(self._command, what, self._stderr_tail))
        return 0

    def _forward_stderr(self) -> None:
        """Forward the standard error of the command."""
        data = os.read(self._errors.fileno(), 1 << 16)
        if not data:
            self._poll.unregister(self._errors)
            self._errors.close()
            return
        self._stderr_tail = (self._stderr_tail + data)[-STDERR_TAIL_BYTES:]
        with contextlib.suppress(OSError):  # standard error of this process may be closed
            os.write(2, data)

    def _finish(self) -> None:
        """Wait for the command to exit after the end of its output."""
        self._poll.unregister(self._output)
        self._output.close()
        while self._process.poll() is None:
            if self._errors.closed:
                self._process.wait()
            elif self._poll.poll(POLL_MS):
                self._forward_stderr()
        # A background process of the command may keep the pipe open: read the available bytes, do not wait for more.
        while not self._errors.closed and self._poll.poll(0):
            self._forward_stderr()
        self._errors.close()
        self._process.signal(signal.SIGTERM)

    def close(self) -> None:
        """Close the pipes, and terminate the command with its child processes if it is still running."""
        if self.closed:
            return
        super().close()
        self._output.close()
        self._errors.close()
        if self._process.returncode is None:
            self._process.end()
