"""Does the package do on this system what the table of platforms promises? On Linux, macOS and Windows.

    python tests/checks/smoke.py

`nox -s smoke` runs this with the package and its dependencies only. It writes, indexes and verifies shards, reads them
from the disk and from a web server with the workers of PyTorch's loader, resumes, and compares the errors for what the
system lacks.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "support"), str(TESTS / "servers")]


def main() -> None:
    """Use the package, and print what was found."""
    import other_systems
    from web_server import QuietHandler, web_server

    class Handler(QuietHandler):
        """Sends files, or the requested part of them."""

        def do_GET(self) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            path = Path(self.translate_path(self.path))
            if asked is None or not path.is_file():
                super().do_GET()
                return
            content = path.read_bytes()
            part = content[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(part)

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, web_server(functools.partial(Handler, directory=folder)) as site:
        other_systems.main(folder, site)
        os.chdir(here)  # Windows removes no directory in which a process works
    found: dict[str, Any] = other_systems.FOUND
    other_systems.check(found, sys.platform)
    print(f"{sys.platform}: everything is as the table of platforms says")


if __name__ == "__main__":
    main()
