"""Sink that writes to the standard input of a shell command: ``pipe:COMMAND``."""

from __future__ import annotations

import io
import os
import tempfile
from typing import cast

from wds_datapipes.errors import CommandError, ShardWriteError
from wds_datapipes.io.command import TOLD_BYTES
from wds_datapipes.io.openers import split_scheme
from wds_datapipes.io.shell_process import ShellProcess, describe_exit

__all__ = ["CommandSink"]


class CommandSink:
    """Runs a shell command, with ``pipefail``, and writes to it.

    The shard is whole if the command ends with the status 0 after the end of its input. If the shard is discarded, the
    command and all that it has started are killed before they see that end, so that none of them takes what it has for
    the whole; the same holds if this process is killed. What they have written by then is not known here, and stays:
    let a command write to a temporary name, as in ``pipe:cat > x.part && mv x.part x``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        _, self._command = split_scheme(url)
        if not self._command.strip():
            raise ShardWriteError(f"{url!r} holds no command. Write it after the colon, as in pipe:cat > 000.tar")
        self._written = 0
        # A file takes the command's messages without a reader; the error of a failed command shows its end.
        self._told = tempfile.TemporaryFile()  # noqa: SIM115  closed with the command
        try:
            self._process = ShellProcess(self._command, feeds=True, stderr=self._told)
        except (OSError, ValueError) as error:
            self._told.close()
            raise ShardWriteError(f"The command {self._command!r} cannot be started: {error}") from error
        self._input = cast("io.RawIOBase", self._process.stdin)

    def write(self, data: bytes, /) -> None:
        """Write all of the bytes; a command that no longer reads has failed."""
        view = memoryview(data)
        try:
            while view:
                taken = self._input.write(view)
                self._written += taken
                view = view[taken:]
        except BrokenPipeError:
            self._end()
            raise CommandError(self._verdict("stopped reading and")) from None

    def finish(self) -> None:
        """Close the input of the command, and wait for its end."""
        self._end()
        if self._process.returncode != 0:
            raise CommandError(self._verdict(""))
        self._told.close()

    def discard(self) -> None:
        """Kill the command and its child processes."""
        if self._process.returncode is None:
            self._process.kill()
        self._told.close()

    def _end(self) -> None:
        self._process.finish_input()
        self._process.wait()

    def _verdict(self, what: str) -> str:
        """The error of a command that has failed."""
        size = self._told.seek(0, os.SEEK_END)
        self._told.seek(max(0, size - TOLD_BYTES))
        told = self._told.read().decode(errors="replace").strip()
        self._told.close()
        end = describe_exit(self._process.wait())
        return (
            f"The command {self._command!r} {what}{' ' if what else ''}{end} after it was sent {self._written} bytes. "
            + (f"It said last: {told}" if told else "It said nothing.")
        )
