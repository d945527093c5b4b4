"""Shell commands that run in their own process group and never outlive this process."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import weakref
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.errors import ShardOpenError, ShardReadError
from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.streams import RawStream
from wds_datapipes.io.urls import split_scheme
from wds_datapipes.redaction import redact_command
from wds_datapipes.redaction.storage_options import redactor_of_command
from wds_datapipes.system import HAS_FORK

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: Seconds between SIGTERM and SIGKILL when a command is terminated.
GRACE_S = 0.5
#: Written to the watcher when the input of the command is complete.
WHOLE = b"whole\n"

#: Runs the command ("$@") next to a watcher in the same process group. The watcher blocks on a pipe whose write end is
#: open only in the process that runs the command: when that process ends, even by SIGKILL, the watcher reads the end of
#: the pipe and kills the group. Until then it also holds the write end of the command's input open, so that the command
#: never mistakes the death of its writer for the end of its input. SIGTERM must reach the command but neither the
#: watcher nor this shell, which waits for both so that neither becomes a zombie. The shell's own messages about killed
#: processes are discarded.
SUPERVISE = """
exec {errors}>&2 2>/dev/null
trap : TERM
(
  trap '' HUP INT TERM
  exec {errors}>&- >/dev/null </dev/null
  read -r word <&{watch}
  [ "$word" = whole ] || kill -KILL 0
) &
{close}
"$@" 2>&{errors} {errors}>&-
status=$?
kill -KILL $!
wait $!
exit $status
"""

#: The running processes. A fork inherits their pipes, so a fork hook closes the copies.
_running: weakref.WeakSet[ShellProcess] = weakref.WeakSet()


class ShellProcess:
    """A shell command in its own process group, which is killed when this process ends for any reason.

    The shell sets ``pipefail``: every command of a pipeline must succeed.

    Args:
        command: the command line for the shell.
        feeds: whether this process writes the command's standard input. If so, the command sees the end of its input
            only after `finish_input`; otherwise its standard input is empty.
        cwd: the working directory of the command.
        popen: standard output and standard error, as in ``subprocess.Popen``.

    Attributes:
        stdin: the unbuffered pipe to the command, or None.
        stdout: the unbuffered pipe from its standard output, or None.
        stderr: the unbuffered pipe from its standard error, or None.

    Raises:
        ShardOpenError: this host has no suitable shell.
        OSError: the command cannot be started.
        ValueError: the command contains a null byte.
    """

    def __init__(self, command: str, *, feeds: bool = False, cwd: str | None = None, **popen: Any) -> None:
        words = shell()
        self._owner = os.getpid()
        with contextlib.ExitStack() as opened:
            watch, owned = os.pipe()
            opened.callback(os.close, watch)
            self._watch_pipe: IO[bytes] = open(owned, "wb", buffering=0)  # noqa: PTH123, SIM115  closed with the stdin
            inherited = [watch]
            stdin: int = subprocess.DEVNULL
            self.stdin: IO[bytes] | None = None
            if feeds:
                stdin, feed = os.pipe()
                opened.callback(os.close, stdin)
                self.stdin = open(feed, "wb", buffering=0)  # noqa: PTH123, SIM115  `finish_input` or `close` closes it
                inherited.append(feed)
            script = SUPERVISE.format(
                errors=max(inherited) + 1,  # free: the shell inherits only these and the standard descriptors
                watch=watch,
                close="exec " + " ".join(f"{each}>&-" for each in inherited),
            )
            try:
                self._process = subprocess.Popen(  # noqa: S603  running a command is the purpose
                    [*words, script, words[0], *words, command],
                    stdin=stdin,
                    bufsize=0,
                    cwd=cwd,
                    pass_fds=inherited,
                    start_new_session=True,
                    **popen,
                )
            except BaseException:
                self._close_pipes()
                raise
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        _running.add(self)

    @property
    def returncode(self) -> int | None:
        """The exit status, or None if the command is running or has not been waited for."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return the exit status if the command has exited, otherwise None."""
        if self._process.poll() is not None:
            self._close_pipes()
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the command to exit and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the command is still running after ``timeout_s`` seconds.
        """
        status = self._process.wait(timeout_s)
        self._close_pipes()
        return status

    def finish_input(self) -> None:
        """Close the command's standard input, so that it sees the end of the data."""
        with contextlib.suppress(BrokenPipeError):  # the command has already exited
            self._watch_pipe.write(WHOLE)
        self._close_pipes()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the command."""
        if os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Terminate the process group of the command: by SIGTERM first, then by SIGKILL."""
        if os.getpid() == self._owner and self.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process group of the command; do nothing in a forked copy of this process."""
        if os.getpid() == self._owner:
            self.signal(signal.SIGKILL)
            self.wait()
        else:
            self._process.returncode = 0  # otherwise the copy warns that its command is still running

    def _close_pipes(self) -> None:
        self._watch_pipe.close()
        if self.stdin is not None:
            self.stdin.close()


def _close_copies() -> None:
    """Close a forked process's copies of the pipes, which would keep a command running after its owner ends."""
    for process in list(_running):
        process._close_pipes()


at_fork("commands", after_in_child=_close_copies)


@functools.cache
def shell() -> tuple[str, ...]:
    """Return the words that run a command line in the shell of this host, with ``pipefail``.

    Raises:
        ShardOpenError: there is no bash, or the system is not POSIX.
    """
    if not HAS_FORK:
        raise ShardOpenError(f"Commands run in process groups of POSIX, which {sys.platform} does not have")
    if bash := shutil.which("bash"):
        return (bash, "-o", "pipefail", "-c")
    raise ShardOpenError("Commands run in bash, but this host has no bash. Install it")


def describe_exit(status: int) -> str:
    """Describe a command's exit status; a status of 128 or more means that a signal killed it.

    >>> describe_exit(1), describe_exit(137), describe_exit(-9)
    ('exited with status 1', 'exited with status 137 (signal 9)', 'was killed by signal 9')
    """
    if status < 0:
        return f"was killed by signal {-status}"
    return f"exited with status {status}" + (f" (signal {status - 128})" if status > 128 else "")


def describe_failure(command: str, what: str, stderr: bytes) -> str:
    """Describe the failure of a command, without credentials.

    Args:
        command: the command.
        what: what happened, such as how it ended.
        stderr: the end of its standard error.
    """
    said = redactor_of_command(command)(stderr.decode(errors="replace").strip())
    end = f"Its standard error ends with: {said}" if said else "It wrote nothing to standard error."
    return f"The command {redact_command(command)!r} {what}. {end}"


#: Size of the pipe from the command, in bytes: the maximum for unprivileged processes on Linux.
PIPE_BYTES = 1 << 20
#: The error of a failed command quotes this many bytes from the end of its standard error.
STDERR_TAIL_BYTES = 2000
#: Interval for polling a command that has closed its output but not exited, in milliseconds.
POLL_MS = 50


def open_command(url: str, /, **_options: object) -> BinaryIO:
    """Run a shell command with ``pipefail`` and read its output."""
    _, command = split_scheme(url)
    if not command.strip():
        raise ShardOpenError(f"{url!r} contains no command. Write it after the colon, as in pipe:zcat 000.tar.gz")
    try:
        process = ShellProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except (OSError, ValueError) as error:
        raise ShardOpenError(f"The command {redact_command(command)!r} cannot be started: {error}") from error
    return cast(BinaryIO, _CommandStream(process, command))


class _CommandStream(RawStream):
    """Reads the output of a command; raises an error at the end if the command has failed.

    The command's standard error is forwarded as it arrives, and its last lines are quoted in the error. One thread
    reads both pipes, so a command that prints many messages waits for its reader.
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
        with contextlib.suppress(ImportError, OSError):  # unsupported or above the limit: keep the default size
            from fcntl import F_SETPIPE_SZ, fcntl  # Linux

            fcntl(self._output, F_SETPIPE_SZ, PIPE_BYTES)

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

    def _release(self) -> None:
        """Close the pipes, and terminate the command and its child processes if it is still running."""
        self._output.close()
        self._errors.close()
        if self._process.returncode is None:
            self._process.end()
