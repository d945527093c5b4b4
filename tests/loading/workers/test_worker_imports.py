"""What a worker process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from wds_datapipes import pipes

#: Reads shards as a stream and by index, with each loader, and prints the modules of `tools` that a worker has.
PROGRAM = """
import sys
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2
import wds_datapipes
from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, StatefulShards, collate_samples
from wds_datapipes.testing import build_shard

def tools(sample):
    return {"tools": sorted(name for name in sys.modules if name.startswith("wds_datapipes.tools"))}

def pipelines():
    stream = ShardList(["a.tar"]).shuffle().sharding_filter().load_wds_shards().group_samples().wds_decode()
    indexed = IndexedSamples(["a.tar"]).wds_decode()
    return [each.shuffle_samples(10).map_samples(tools) for each in (stream, indexed)]

if __name__ == "__main__":
    assert not tools(None)["tools"]
    build_shard("a.tar", [{"__key__": "x", "cls": "1"}, {"__key__": "y", "cls": "2"}])
    for pipe in pipelines():
        loader = DataLoader2(pipe, reading_service=ShardReadingService(num_workers=1))
        print([sample["tools"] for sample in loader])
        loader.shutdown()
    for pipe in pipelines():
        print([sample["tools"] for sample in DataLoader(StatefulShards(pipe), batch_size=None, num_workers=1)])
    print(tools(None))
"""


def test_a_training_process_and_its_workers_import_nothing_of_the_tools(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.stderr) == ([*["[[], []]"] * 4, "{'tools': []}"], "")


#: Reads shards as a stream with a worker that inherits nothing, and prints the modules of the package that it has.
STREAM = """
import sys
from torchdata.dataloader2 import DataLoader2
from wds_datapipes import ShardList, ShardReadingService

def own(sample):
    return {"own": [name for name in sys.modules if name.partition(".")[0] == "wds_datapipes"]}

if __name__ == "__main__":
    from wds_datapipes.testing import build_shard
    build_shard("a.tar", [{"__key__": "x", "cls": "1"}])
    samples = ShardList(["a.tar"]).shuffle().sharding_filter().load_wds_shards().group_samples().wds_decode()
    pipe = samples.shuffle_samples(10).map_samples(own)
    service = ShardReadingService(num_workers=1, multiprocessing_context="spawn")
    loader = DataLoader2(pipe, reading_service=service)
    for sample in loader:
        print(*sample["own"])
    loader.shutdown()
"""


def test_a_worker_imports_only_the_stages_of_its_pipeline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STREAM)
    command = [sys.executable, "-W", "ignore", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    own = done.stdout.split()
    stages = {name for kind in pipes.__all__ for name in own if getattr(pipes, kind).__module__ == name}
    used = {"shard_list", "load_wds_shards", "group_samples", "wds_decode", "shuffle_samples", "map_samples"}
    assert {name.rpartition(".")[2] for name in stages} == {*used, "stage"}
    # Of 407, with 22,200 lines. Before you raise this, look whether a new module can be imported at first use.
    assert len(own) <= 157
