"""Shards are converted by the processes of an MPI job, with the executor of mpi4py.

This needs the packages of the dependency group ``mpi``, of which Open MPI is one; `nox -s "peers(mpi)"` has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from wds_datapipes import convert_shards
from wds_datapipes.testing import build_shard


def but_the_first(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if sample["__key__"].endswith("0") else sample


def test_the_processes_of_mpi_convert_shards(tmp_path: Path) -> None:
    shards = [
        build_shard(tmp_path / f"{number}.tar", [{"__key__": f"{number}-{n}", "cls": str(n)} for n in range(5)])
        for number in range(6)
    ]
    (tmp_path / "pids").mkdir()
    wanted = convert_shards(but_the_first, shards, f"{tmp_path}/wanted/", num_workers=0)
    script = Path(__file__).with_name("mpi_conversion.py")
    # Start the requested number of processes on any number of cores, and as root, the only user of a container.
    job = [str(Path(sys.executable).with_name("mpiexec")), "--oversubscribe", "-n", "3"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    finished = subprocess.run(
        [*job, sys.executable, "-m", "mpi4py.futures", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **allowed},
    )
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    assert told["failures"] == {"5.tar": "LookupError('no such label')"}
    assert told["first"] == ["0.tar", "1.tar", "2.tar", "3.tar", "4.tar"]
    assert told["second"] == [False, False, False, False, False, True]
    workers = set(os.listdir(tmp_path / "pids"))
    assert len(workers) == 2
    assert not workers & {str(told["this"]), str(os.getpid())}
    for result in wanted:
        assert (tmp_path / "out" / Path(result.info.url).name).read_bytes() == Path(result.info.url).read_bytes()
