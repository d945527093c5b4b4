"""Runs the command line, and then tells the most memory that the process had, in bytes, on standard error."""

from __future__ import annotations

import sys
from pathlib import Path

from wds_datapipes.cli import COMMANDS
from wds_datapipes.cli.program import build_program

build_program(COMMANDS)(prog_name="wds-datapipes", standalone_mode=False)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
sys.stderr.write(f"{int(status['VmHWM'].split()[0]) * 1024}\n")
