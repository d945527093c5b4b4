"""Programs that start immediately, because they are forks of a process that has imported torch and this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

#: Runs programs in processes that need not import torch again, which takes seconds.
SERVER = Path(__file__).with_name("prepared_python.py")
#: Asks the script `SERVER` to run a command, and exits with its exit code. It imports almost nothing.
PROGRAM = """\
#!{python} -ISE
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    asked = {{"command": {command!r}, "argv": sys.argv, "folder": os.getcwd(), "environ": dict(os.environ)}}
    server.sendall(json.dumps(asked).encode())
    server.shutdown(socket.SHUT_WR)
    code = int(server.recv(10))
if code < 0:
    if -code in (signal.SIGINT, signal.SIGPIPE):  # of which Python makes exceptions
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def prepared_programs(folder: Path, environ: Mapping[str, str], *modules: str) -> Iterator[Path]:
    """Yield the folder with ``page``, which runs a script, and ``wds-datapipes``.

    Args:
        folder: an empty folder.
        environ: the environment in which modules are imported.
        modules: other modules that most scripts import.
    """
    address = str(folder / "socket")
    for command in ("page", "wds-datapipes"):
        program = folder / command
        program.write_text(PROGRAM.format(python=sys.executable, address=address, command=command))
        program.chmod(0o755)
    arguments: list[str | Path] = [sys.executable, SERVER, address, *modules]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield folder
        server.communicate()
    assert server.returncode == 0
