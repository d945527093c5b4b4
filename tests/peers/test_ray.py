"""The page about workers on other hosts runs, with a cluster whose nodes stand for hosts, one of which is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import PAGES_OF_PEERS, run_script


@pytest.mark.timeout(900)  # it starts many processes, and Ray its own daemons
@pytest.mark.parametrize("script", PAGES_OF_PEERS["ray"])
def test_a_page_runs(script: str, tmp_path: Path) -> None:
    run_script(script, tmp_path)
