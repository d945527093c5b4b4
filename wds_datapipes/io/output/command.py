"""Command sink: writes to the standard input of a shell command."""

from __future__ import annotations

import os
import tempfile

from wds_datapipes.errors import ShardWriteError
from wds_datapipes.io.openers import split_scheme
from wds_datapipes.io.output.stream import StreamSink
from wds_datapipes.io.shell_process import STDERR_TAIL_BYTES, ShellProcess, describe_exit, describe_failure
from wds_datapipes.redaction import redact_command


class CommandSink(StreamSink):
    """Runs a shell command with ``pipefail`` and writes to its standard input.

    The shard is complete if the command exits with status 0 after the end of its input. If the shard is discarded, or
    this process is killed, the process group of the command is killed before it sees the end of its input, so that it
    never mistakes a part for the whole. The files that the command has written remain; let it write to a temporary
    name, as in ``pipe:cat > x.part && mv x.part x``.
    """

    def __init__(self, url: str) -> None:
        _, self._command = split_scheme(url)
        if not self._command.strip():
            raise ShardWriteError(f"{url!r} contains no command. Write it after the colon, as in pipe:cat > 000.tar")
        # A file, unlike a pipe, needs no reader. The error of a failed command quotes its end.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the command
        try:
            self._process = ShellProcess(self._command, feeds=True, stderr=self._stderr)
        except (OSError, ValueError) as error:
            self._stderr.close()
            raise ShardWriteError(
                f"The command {redact_command(self._command)!r} cannot be started: {error}"
            ) from error
        super().__init__(self._process.stdin, url)

    def write(self, *chunks: bytes) -> None:
        """Write all chunks; raise an error if the command stops reading."""
        try:
            super().write(*chunks)
        except BrokenPipeError:
            self._end()
            raise ShardWriteError(self._failure_text("stopped reading and ")) from None

    def finish(self) -> None:
        """Close the input of the command and wait for it to exit."""
        self._end()
        if self._process.returncode != 0:
            raise ShardWriteError(self._failure_text())
        self._stderr.close()

    def discard(self) -> None:
        """Kill the command and its child processes."""
        if self._process.returncode is None:
            self._process.kill()
        self._stderr.close()

    def _end(self) -> None:
        self._process.finish_input()
        self._process.wait()

    def _failure_text(self, before: str = "") -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        stderr = self._stderr.read()
        self._stderr.close()
        what = f"{before}{describe_exit(self._process.wait())} after it was sent {self._written} bytes"
        return describe_failure(self._command, what, stderr)
