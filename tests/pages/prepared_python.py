"""Runs scripts and the command line in forks of a process that has already imported torch.

A script, whose arguments are the path of a socket, and the names of further modules to import. It serves until its
standard input ends. A client sends its three standard streams, and as JSON the program, its arguments, folder and
environment; it receives the exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import socket
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

#: Modules that most scripts need, and that are slow to import.
IMPORTED = ("torchdata.datapipes.iter", "wds_datapipes.loading.service.service")


def serve(address: str) -> dict[str, Any] | None:
    """Fork for each request; return the request in the new process, and None at the end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                return None
            if key.data is not None:
                pid, channel = key.data
                channel.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                channel.close()
                selector.unregister(key.fd)
                os.close(key.fd)
                continue
            channel, _ = listener.accept()
            pid = os.fork()
            if not pid:
                for other in list(selector.get_map().values()):
                    if other.data is not None:
                        os.close(other.fd)
                        other.data[1].close()
                selector.close()
                listener.close()
                return taken_over(channel)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, channel))


def taken_over(channel: socket.socket) -> dict[str, Any]:
    """Set up the process that was requested, except for the code that it runs."""
    with channel:
        _, streams, *_ = socket.recv_fds(channel, 1, 3)
        asked: dict[str, Any] = json.loads(b"".join(iter(lambda: channel.recv(1 << 16), b"")))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    np.random.seed()  # as Python does by itself with its own
    return asked


def main() -> None:
    """Serve, or run the requested script or command."""
    sys.path.pop(0)  # the folder of this script
    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    from wds_datapipes.tools.cli.app import COMMANDS, find_command

    for name in COMMANDS:
        find_command(name)
    gc.freeze()  # otherwise each process would collect all imported modules at exit
    asked = serve(sys.argv[1])
    if asked is None:
        return
    if asked["command"] == "wds-datapipes":
        sys.argv = asked["argv"]
        importlib.import_module("wds_datapipes.tools.cli").main()
        return
    sys.argv = asked["argv"][1:]
    script = Path(sys.argv[0])
    sys.path.insert(0, str(script.absolute().parent))
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), script, "exec"), vars(module))


if __name__ == "__main__":
    main()
