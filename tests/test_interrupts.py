"""Ctrl-C during `defer_interrupts` has its usual effect afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import wds_datapipes

#: This avoids importing the package, which takes seconds.
PROGRAM = """
import signal, types, sys
package = sys.modules["wds_datapipes"] = types.ModuleType("wds_datapipes")
package.__path__ = [{folder!r}]
from wds_datapipes.interrupts import defer_interrupts

signal.signal(signal.SIGINT, signal.{handler})
with defer_interrupts():
    signal.raise_signal(signal.SIGINT)
    print("in", flush=True)
print("after", flush=True)
"""


@pytest.mark.parametrize(
    ("handler", "status", "printed"),
    [("SIG_DFL", -signal.SIGINT, "in"), ("SIG_IGN", 0, "in after"), ("default_int_handler", -signal.SIGINT, "in")],
)
def test_an_interrupt_comes_after_the_block(handler: str, status: int, printed: str) -> None:
    program = PROGRAM.format(handler=handler, folder=str(Path(wds_datapipes.__file__).parent))
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.split()) == (status, printed.split())
