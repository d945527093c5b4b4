"""Workers on a shared cluster: what they leave, how far ahead they run, where they are, and what they cannot do."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from error_facts import naming
from loader_kinds import Service, items_of
from pipeline_table import as_it_is
from ray_hosts import (
    FOLDERS,
    LIMIT_S,
    Hosts,
    Remote,
    arrays,
    count_made,
    hang,
    keys,
    large,
    running_hosts,
    samples,
    write_shards,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import RayReadingService
from wds_datapipes.errors import ShardOpenError, WorkerTimeoutError
from wds_datapipes.loading.service.pinning import MemoryPinner
from wds_datapipes.loading.transport.flow_control import AHEAD_BYTES, CALLS_AHEAD, MAX_TOGETHER

cluster, hosts = running_hosts()
HOST = socket.gethostname()
SHARDS, SAMPLES = 4, 30


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(SHARDS, SAMPLES)


#: A program that trains, and does what its argument says after some items.
PROGRAM = """
import os, signal, sys, time
import ray
from torchdata.dataloader2 import DataLoader2
from pipeline_table import as_it_is
from ray_hosts import FOLDERS, arrays
from wds_datapipes import RayReadingService

environment = {{"env_vars": {{"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}}}}
ray.init(address={address!r}, log_to_driver=False, configure_logging=False, runtime_env=environment)
with DataLoader2(arrays({shards}), reading_service=RayReadingService(2)) as loader:
    for number, item in enumerate(loader):
        if number == 5:
            print("reads", flush=True)
            {act}
"""


@pytest.mark.parametrize(
    ("act", "number"),
    [
        ("time.sleep(1000)", signal.SIGKILL),
        ("time.sleep(1000)", signal.SIGTERM),
        ("time.sleep(1000)", signal.SIGINT),
        ("os._exit(3)", None),
        ("raise ValueError('in the loop')", None),
        ("sys.exit()", None),
    ],
)
def test_a_program_leaves_nothing_however_it_ends(hosts: Hosts, act: str, number: int | None) -> None:
    program = PROGRAM.format(address=hosts.cluster.address, shards=SHARDS, act=act)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reads\n"
        if number is not None:
            process.send_signal(number)
        process.wait(LIMIT_S)
    hosts.await_idle()


def test_a_loop_that_ends_early_leaves_nothing(hosts: Hosts) -> None:
    loader = DataLoader2(arrays(SHARDS), reading_service=RayReadingService(2))
    for _ in loader:
        break
    assert hosts.used()["CPU"] == 2
    loader.shutdown()
    hosts.await_idle()
    del loader
    with closing(Remote(partial(arrays, SHARDS), 1)) as run, pytest.raises(ZeroDivisionError):
        items_of(1 // 0 for _ in run.epoch())


def test_items_remain_after_the_loader_and_can_be_changed(hosts: Hosts) -> None:
    with closing(Remote(partial(arrays, SHARDS), 2)) as run:
        kept = [*run.epoch()]
    hosts.await_idle()
    assert len(kept) == SHARDS * SAMPLES
    for item in kept:
        assert {*item["array"]} == {int(item["key"].split("-")[1])}
        item["array"] += 1


@pytest.mark.parametrize(("size", "ahead"), [(20_000_000, 4), (1_000_000, CALLS_AHEAD + 1), (70_000_000, 2)])
def test_bytes_limit_how_far_workers_run_ahead(hosts: Hosts, size: int, ahead: int) -> None:
    with closing(Remote(lambda: large(SHARDS, size).map(count_made), 1)) as run:
        items = run.epoch()
        for taken in (1, 2, 3):
            next(items)
            made = await_still()
            assert made - taken <= ahead
            assert made - taken == 2 or (made - taken) * size < AHEAD_BYTES + size
            assert made - taken >= 2  # it does run ahead


def await_still() -> int:
    """Return the number of items that were made, once no more are made for a while."""
    made, since = 0, time.monotonic()
    while time.monotonic() - since < 1.0:
        if (now := Path("made").stat().st_size) != made:
            made, since = now, time.monotonic()
        time.sleep(0.05)
    return made


def test_workers_are_where_their_options_say_and_reports_have_their_host(hosts: Hosts) -> None:
    options = {"num_cpus": 2, "resources": {"b": 1}}
    with closing(Remote(partial(keys, SHARDS), 2, worker_options=options)) as run:
        count = len(items_of(run.epoch()))
        assert hosts.used()["CPU"] == 4
        report = run.loader.reading_service.report()
        assert [(each.name, each.host) for each in report.workers] == [("Worker 0", HOST), ("Worker 1", HOST)]
        assert {each.pid for each in report.workers} == {each.pid for each in hosts.actors()}
        assert report.items == report.total.received == count
        assert report.total.bytes > 0
        assert report.total.making_s > 0


def test_two_loaders_share_the_cluster(hosts: Hosts) -> None:
    with closing(Service(partial(keys, SHARDS), 2)) as run:
        whole = items_of(run.epoch())
    with closing(Remote(partial(keys, SHARDS), 2)) as one, closing(Remote(partial(keys, SHARDS), 2)) as other:
        pairs = [*zip(one.epoch(), other.epoch(), strict=True)]
    assert pairs == [(item, item) for item in whole]


def test_a_shard_that_a_host_lacks_is_an_error_that_names_the_host(hosts: Hosts) -> None:
    """The shard is missing for all, as it is on a host without the file system of the training process."""
    Path("2.tar").unlink()
    where = naming(f"on host {HOST}", "2.tar", "This host has no", "reachable from each")
    with closing(Remote(partial(keys, SHARDS), 1)) as run, pytest.raises(ShardOpenError, match=where):
        items_of(run.epoch())


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle")
def test_functions_of_the_main_program_are_sent_by_value_and_others_name_their_stage(hosts: Hosts) -> None:
    offset = 7
    with closing(Remote(lambda: keys(SHARDS).map(lambda key: (key, offset)), 1)) as run:
        assert {second for _, second in items_of(run.epoch())} == {offset}
    lock = threading.Lock()
    with (
        closing(Remote(lambda: keys(SHARDS).map(lambda key: (key, lock)).batch(2), 1)) as run,
        pytest.raises(pickle.PicklingError, match=naming(".map()", "fn", "lock", "worker_init_fn")),
    ):
        run.epoch()
    with (
        closing(Remote(partial(keys, SHARDS), 1, worker_init_fn=lambda pipe, _: (pipe, lock)[0])) as run,
        pytest.raises(pickle.PicklingError, match=naming("worker_init_fn cannot be sent", "lock")),
    ):
        run.epoch()


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle")
@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_classes_of_the_main_program_arrive_as_they_are(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Those of items and of errors; multiprocessing gives the second name to the main program in a new process."""
    monkeypatch.setattr(sys.modules["__main__"], "__name__", module)
    monkeypatch.setitem(sys.modules, module, sys.modules["__main__"])
    item, error = (
        type(name, (base,), {"__module__": module}) for name, base in (("Item", dict), ("OddError", ValueError))
    )
    for each in (item, error):
        monkeypatch.setattr(sys.modules["__main__"], each.__name__, each, raising=False)

    def make(sample: Any) -> Any:
        if sample["__key__"] == "2-17":
            raise error(sample["__key__"])
        return item(sample)

    with closing(Remote(lambda: samples(SHARDS).map(make), 1)) as run:
        items = run.epoch()
        assert {type(next(items)) for _ in range(3)} == {item}
        with pytest.raises(error, match=naming(f"on host {HOST}", "2-17")):
            items_of(items)


def add_worker(pipe: Any, info: Any) -> Any:
    return pipe.map(lambda key: (info.worker_id, info.num_workers, key))


def test_functions_that_prepare_workers_are_called_there(hosts: Hosts) -> None:
    with closing(Remote(partial(keys, SHARDS), 2, worker_init_fn=add_worker)) as run:
        assert {item[:2] for item in run.epoch()} == {(0, 2), (1, 2)}


def test_a_worker_that_sends_nothing_for_too_long_is_an_error(hosts: Hosts) -> None:
    with (
        closing(Remote(lambda: keys(SHARDS).map(hang), 2, timeout_s=45)) as run,
        pytest.raises(WorkerTimeoutError, match=naming("timeout_s=45", f"runs on host {HOST}", ".tar")),
    ):
        items_of(run.epoch())


def test_workers_for_which_there_is_no_room_are_an_error(hosts: Hosts) -> None:
    options = {"resources": {"nowhere": 1}}
    with (
        closing(Remote(partial(keys, SHARDS), 1, timeout_s=1, worker_options=options)) as run,
        pytest.raises(WorkerTimeoutError, match=naming("has not started", "worker_options", "ray status")),
    ):
        next(run.epoch())


@pytest.mark.parametrize(
    "name", ["allow_out_of_order_execution", "lifetime", "max_concurrency", "max_pending_calls", "max_restarts", "name"]
)
def test_options_that_would_change_the_order_are_refused(hosts: Hosts, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RayReadingService(1, worker_options={name: 2})


def test_stages_that_dispatch_are_refused(hosts: Hosts) -> None:
    pipe = IterableWrapper(range(9)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    loader: Any = DataLoader2(pipe, reading_service=RayReadingService(2))
    with pytest.raises(ValueError, match=naming(".sharding_round_robin_dispatch()", ".sharding_filter()")):
        iter(loader)
    loader.shutdown()


def test_a_thread_that_pins_takes_items_ahead_of_the_loop(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "wds_datapipes.loading.service.service.pin_memory_of", lambda source: MemoryPinner(source, as_it_is)
    )
    found = []
    for kind in (Service, Remote):
        with closing(kind(partial(keys, SHARDS), 2, pin_memory=True)) as run:
            items = run.epoch()
            head = items_of(items, 11)
            state = run.state()
            found.append((head, items_of(items), state, items_of(run.epoch())))
    assert found[0] == found[1]


#: A program with two ranks, which report on each other and synchronize with torchdata's service.
RANKS = """
import json, os, sys
import ray
import torch.distributed as dist
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from pipeline_table import as_it_is
from ray_hosts import FOLDERS, keys
from wds_datapipes import RayReadingService, ShardReadingService

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
environment = {{"env_vars": {{"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}}}}
ray.init(address={address!r}, log_to_driver=False, configure_logging=False, runtime_env=environment)
found = {{}}
for service in (ShardReadingService(2, distributed=True), RayReadingService(2, distributed=True, report_every_s=0.1)):
    with DataLoader2(keys({shards}), reading_service=service) as loader:
        loader.seed(5)
        found[type(service).__name__] = [*loader]
        dist.barrier()
        reports = loader.reading_service
        if isinstance(service, RayReadingService):
            while sum(each.received for each in reports.report(all_ranks=True).workers) < {items}:
                pass
            found["all"] = [each.name for each in reports.report(all_ranks=True).workers]
        dist.barrier()
for service in (ShardReadingService(1, distributed=False), RayReadingService(1, distributed=False)):
    pipe = keys({shards}).fullsync()
    with DataLoader2(pipe, reading_service=SequentialReadingService(DistributedReadingService(), service)) as loader:
        loader.seed(5)
        found["in step " + type(service).__name__] = [*loader]
print(json.dumps(found))
"""


def test_ranks_share_the_cluster(hosts: Hosts, tmp_path: Path) -> None:
    items = SHARDS * SAMPLES
    program = RANKS.format(address=hosts.cluster.address, shards=SHARDS, items=items)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, str(rank), str(tmp_path / "store")],
            env=environ,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=2 * LIMIT_S)[0].splitlines()[-1]) for rank in ranks]
    for each in found:
        assert each["RayReadingService"] == each["ShardReadingService"]
        assert each["in step RayReadingService"] == each["in step ShardReadingService"]
        assert each["all"] == ["Rank 0", "Rank 1"]
    assert len({key for each in found for key in each["RayReadingService"]}) == items


def test_a_rank_costs_a_call_for_each_message_and_an_actor_for_each_worker(hosts: Hosts) -> None:
    """All calls go from a rank to its own workers. So what a run costs the cluster does not grow faster than its ranks.

    The object store and the scheduler see one object of each pipeline, and the start of each worker.
    """
    from ray.actor import ActorMethod

    calls: list[str] = []
    remote = ActorMethod.remote

    def count(method: Any, *arguments: Any, **options: Any) -> Any:
        calls.append("call")
        return remote(method, *arguments, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(ActorMethod, "remote", count)
    try:
        workers, samples = 2, 5000
        write_shards(SHARDS, samples)
        with closing(Remote(partial(keys, SHARDS), workers)) as run:
            for epoch in range(3):
                calls.clear()
                threads = threading.active_count()
                assert len(items_of(run.epoch())) == SHARDS * samples
                assert len(hosts.actors()) == workers
                messages = SHARDS * samples / MAX_TOGETHER
                # The first message of each worker has a single item, and slow items share fewer.
                assert workers * CALLS_AHEAD <= len(calls) < 4 * (messages + workers * CALLS_AHEAD)
                assert threading.active_count() == threads or not epoch
    finally:
        patch.undo()
