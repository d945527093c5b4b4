"""The targets are beside the tests, for a script that has no pytest, so this folder is one to import from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
