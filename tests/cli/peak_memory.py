"""Runs commands, separated by ``--``, and prints the peak memory of the process after each, in bytes."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from wds_datapipes.cli import COMMANDS
from wds_datapipes.cli._app import build_program

program = build_program(COMMANDS)
for is_mark, words in groupby(sys.argv[1:], lambda word: word == "--"):
    if not is_mark:
        program(list(words), standalone_mode=False)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sys.stderr.write(f"{int(status['VmHWM'].split()[0]) * 1024}\n")
