"""Shell commands in a process group of their own, which never outlive this process."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import weakref
from typing import IO, Any

from wds_datapipes.errors import ShardOpenError

__all__ = ["ShellProcess", "describe_exit", "shell"]

#: How long a command that is no longer needed may take to end after SIGTERM, in seconds.
GRACE_S = 0.5
#: What the watcher reads when the command may see the end of its input.
WHOLE = b"whole\n"

#: Runs the command ("$@") next to a watcher in the same process group. The watcher blocks on the lifeline, a pipe whose
#: other end only the process that runs the command has open: when that process ends, even by SIGKILL, the watcher reads
#: the end of the pipe and kills the group. It also keeps the write end of the command's input open until then, so that
#: the command never takes the death of its writer for the end of its data. SIGTERM must reach the command, and leave
#: the watcher and this shell, which waits for both so that neither is left as a zombie. The shell's own messages about
#: killed processes are not the command's, and go nowhere.
SUPERVISE = """
exec {errors}>&2 2>/dev/null
trap : TERM
(
  trap '' HUP INT TERM
  exec {errors}>&- >/dev/null </dev/null
  read -r word <&{lifeline}
  [ "$word" = whole ] || kill -KILL 0
) &
{close}
"$@" 2>&{errors} {errors}>&-
status=$?
kill -KILL $!
wait $!
exit $status
"""

#: The processes that run; a forked process closes its copies of their pipes.
_running: weakref.WeakSet[ShellProcess] = weakref.WeakSet()


class ShellProcess:
    """A shell command in a process group of its own, killed as a group when this process ends for any reason.

    In a pipeline of commands, each of them has to succeed.

    Args:
        command: what the shell runs.
        feeds: whether this process writes the command's standard input. If so, the command sees the end of its input
            only after `finish_input`; otherwise its standard input is empty.
        cwd: the working directory of the command.
        popen: standard output and standard error, as for ``subprocess.Popen``.

    Attributes:
        stdin: the unbuffered pipe to the command, or None.
        stdout: the unbuffered pipe from its standard output, or None.
        stderr: the unbuffered pipe from its standard error, or None.

    Raises:
        ShardOpenError: there is no suitable shell.
        OSError: the command cannot be started.
        ValueError: the command contains a null byte.
    """

    def __init__(self, command: str, *, feeds: bool = False, cwd: str | None = None, **popen: Any) -> None:
        words = shell()
        self._owner = os.getpid()
        with contextlib.ExitStack() as opened:
            lifeline, far = os.pipe()
            opened.callback(os.close, lifeline)
            self._lifeline: IO[bytes] = open(far, "wb", buffering=0)  # noqa: PTH123, SIM115  `close` closes it
            passed = [lifeline]
            stdin: int = subprocess.DEVNULL
            self.stdin: IO[bytes] | None = None
            if feeds:
                stdin, feed = os.pipe()
                opened.callback(os.close, stdin)
                self.stdin = open(feed, "wb", buffering=0)  # noqa: PTH123, SIM115  `finish_input` or `close` closes it
                passed.append(feed)
            script = SUPERVISE.format(
                errors=max(passed) + 1,  # free: the shell has no descriptors but the standard ones and these
                lifeline=lifeline,
                close="exec " + " ".join(f"{each}>&-" for each in passed),
            )
            try:
                self._process = subprocess.Popen(  # noqa: S603  running a command is the purpose
                    [*words, script, words[0], *words, command],
                    stdin=stdin,
                    bufsize=0,
                    cwd=cwd,
                    pass_fds=passed,
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
        """The exit status, or None if the command has not ended or has not been waited for."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return the exit status if the command has ended, and None otherwise."""
        if self._process.poll() is not None:
            self._close_pipes()
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the command and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout_s`` seconds.
        """
        status = self._process.wait(timeout_s)
        self._close_pipes()
        return status

    def finish_input(self) -> None:
        """Let the command see the end of its standard input."""
        with contextlib.suppress(BrokenPipeError):  # the command has ended before
            self._lifeline.write(WHOLE)
        self._close_pipes()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command and to everything that it has started in its process group."""
        if os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End the command and everything that it has started: first by SIGTERM, then by SIGKILL."""
        if os.getpid() == self._owner and self.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the command and everything that it has started; in a forked process, forget the copy."""
        if os.getpid() == self._owner:
            self.signal(signal.SIGKILL)
            self.wait()
        else:
            self._process.returncode = 0  # or the copy would warn that its command still runs

    def _close_pipes(self) -> None:
        self._lifeline.close()
        if self.stdin is not None:
            self.stdin.close()


def _close_copies() -> None:
    """Close, in a forked process, what would keep a command running after the process that it belongs to."""
    for process in list(_running):
        process._close_pipes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


@functools.cache
def shell() -> tuple[str, ...]:
    """Return the command line of a shell with ``pipefail``.

    Raises:
        ShardOpenError: this host has none.
    """
    if bash := shutil.which("bash"):
        return (bash, "-o", "pipefail", "-c")
    if sh := shutil.which("sh"):
        words = (sh, "-o", "pipefail", "-c")
        # Numbers of descriptors above 9 are another thing that not every sh takes.
        probe = subprocess.run([*words, "exec 12</dev/null"], stderr=subprocess.DEVNULL, check=False)  # noqa: S603
        if probe.returncode == 0:
            return words
    raise ShardOpenError(
        "A command needs a shell that has the option pipefail, and this host has neither bash nor such an sh. "
        "Install bash"
    )


def describe_exit(status: int) -> str:
    """A command's exit status in words.

    >>> describe_exit(1), describe_exit(127), describe_exit(-9)
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
