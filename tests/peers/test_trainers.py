"""The pages about trainers run, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import PAGES_OF_PEERS, run_script


@pytest.mark.timeout(900)  # each starts many processes, and Ray its own daemons
@pytest.mark.parametrize("script", PAGES_OF_PEERS["trainers"])
def test_a_page_runs(script: str, tmp_path: Path) -> None:
    run_script(script, tmp_path)
