"""Plans of requests: how much each of them reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from wds_datapipes.index import build_index
from wds_datapipes.index.read.plan import ReadLimit, plan_reading
from wds_datapipes.tar.headers import BLOCK
from wds_datapipes.testing import build_shard

SIZES = [300 * number for number in range(20)]


@pytest.mark.parametrize("max_bytes", [1024, 5000, 20_000, 1 << 20])
def test_a_request_reads_at_most_max_bytes_before_its_last_field(tmp_path: Path, max_bytes: int) -> None:
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"{number:02}", "bin": bytes(size), "cls": "1"} for number, size in enumerate(SIZES)
    ]
    index = build_index(build_shard(tmp_path / "a.tar", samples))
    groups = np.zeros(len(SIZES), np.int64)
    plan = plan_reading(index, np.arange(len(SIZES)), groups=groups, limit=ReadLimit(max_bytes, max_gap=1 << 20))
    fields = np.array(plan.starts)[plan.ranges] + plan.begins - BLOCK  # where their headers begin
    for first, end in pairwise(plan.firsts):
        begins = fields[(np.array(plan.ranges) >= first) & (np.array(plan.ranges) < end)]
        assert begins.min() == plan.starts[first]
        assert begins.max() - plan.starts[first] < max_bytes
    assert len(plan.firsts) - 1 <= 1 + 2 * (fields.max() - fields.min()) // max_bytes
