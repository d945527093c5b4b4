"""Commands and the extra shards that an earlier, larger run has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.testing import build_shard


@pytest.mark.parametrize("command", ["cat", "split", "shuffle", "sort", "map"])
def test_shards_of_an_earlier_run_are_a_fault_until_they_are_removed(command: str, program: Any) -> None:
    inputs = [build_shard(f"in-{number}.tar", [{"__key__": f"k{number}", "txt": b"x"}]) for number in range(4)]
    options = ["--command", "true"] if command == "map" else ["--maxcount", "1"]
    if command == "sort":
        options += ["--by", "key"]
    target = ["-o", "out-%d.tar", *options]
    assert program(command, *inputs, *target).code == 0
    done = program(command, *inputs[:2], *target)
    assert done.code == (2 if command == "map" else 1)
    assert "Error: 'out-2.tar' and the shards up to 'out-3.tar' are from an earlier run" in done.err
    assert "use --remove-old" in done.err
    assert program(command, *inputs[:2], *target, "--remove-old").code == 0
    assert sorted(path.name for path in Path().glob("out-*.tar")) == ["out-0.tar", "out-1.tar"]
