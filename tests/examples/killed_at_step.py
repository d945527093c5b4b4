"""Runs a script that trains on one rank of several, and kills a rank before a step of its optimizer.

The arguments are the rank, the step, the script and its arguments.
"""

import os
import runpy
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, step = sys.argv[1], int(sys.argv[2])
steps = count()


def die(*_: Any) -> None:
    if next(steps) == step:
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ["RANK"] == rank:
    register_optimizer_step_pre_hook(die)
sys.argv = sys.argv[3:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
