"""The pages about trainers run, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_blocks import ROOT
from page_runs import PAGES_OF_PEERS, run_page


@pytest.mark.timeout(900)  # each starts many processes, and Ray its own daemons
@pytest.mark.parametrize("page", PAGES_OF_PEERS["trainers"])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    run_page((ROOT / page).read_text(encoding="utf-8"), tmp_path)
