"""Loaders that resume from a state: the items that follow are those of the uninterrupted run, at any cut."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from users_stages import InMain

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import StateError
from wds_datapipes.loading.service.pinning import MemoryPinner
from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("checkpoint_scenarios.py")
SIZES = (7, 0, 13, 1, 9)
BUFFER = 4
STATE = "wds_datapipes"

#: How many cuts and batches are tried; `nox -s nightly` tries more, with a new seed each time.
CUTS, BATCHES = int(os.environ.get("RESUME_CUTS", "0")), int(os.environ.get("RESUME_BATCHES", "10_000"))
SEED = os.environ.get("RESUME_SEED", "0")
#: Whether all combinations are tried: every cut in the second epoch as in the first, and all prefetches.
IS_WHOLE = bool(os.environ.get("WHOLE_SWEEPS"))
#: The numbers of workers, and how many items may be ahead.
LOADERS = list(itertools.product(range(4), (0, 10))) if IS_WHOLE else [(0, 0), (1, 10), (2, 0), (2, 10), (3, 0)]
#: The ranks, the start method of workers, and the cuts.
RANDOM_CUTS = [(1, "fork", 18), (2, "fork", 8)]
if CUTS:
    shares = {(1, "fork"): 0.6, (2, "fork"): 0.25, (3, "fork"): 0.1, (1, "spawn"): 0.03, (2, "spawn"): 0.02}
    RANDOM_CUTS = [(*kind, max(1, round(CUTS * share))) for kind, share in shares.items()]

Pipe = IterDataPipe[Any]
Make = Callable[[], Pipe]


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard, size in enumerate(SIZES):
        write(f"{shard}.tar", shard, size)


def write(name: str, shard: int, size: int) -> None:
    build_shard(
        name,
        [
            {"__key__": f"{shard}-{number}", "cls": str(number), "txt": "x" * (37 * number % 700)}
            for number in range(size)
        ],
    )


def gathered(urls: str = "{0..4}.tar", **options: Any) -> Any:
    return ShardList(urls).shuffle().sharding_filter().load_wds_shards(**options).group_samples()


def pipeline(urls: str = "{0..4}.tar", **options: Any) -> Any:
    return gathered(urls, **options).shuffle_samples(BUFFER, initial=2).wds_decode().to_tuple("__key__", "cls")


def with_large(item: tuple[str, int]) -> dict[str, Any]:
    return {"__key__": item[0], "large": torch.full((20_000,), item[1])}


def large() -> Any:
    return pipeline().map(with_large)


def loader(pipe: Pipe, workers: int, seed: int | None = 3, **options: Any) -> DataLoader2[Any]:
    made = DataLoader2(pipe, reading_service=ShardReadingService(workers, **options))
    if seed is not None:
        made.seed(seed)
    return made


def described(item: Any) -> Any:
    """What identifies an item, and what its tensor holds."""
    if isinstance(item, dict):
        low, high = item["large"].aminmax()
        return item["__key__"], int(low), int(high)
    return item


def epoch(made: Any) -> list[Any]:
    return [described(item) for item in made]


def resumed(state: dict[str, Any], pipe: Pipe, service: Any, epochs: int = 2) -> list[list[Any]]:
    with DataLoader2(pipe, reading_service=service) as made:
        made.load_state_dict(state)
        return [epoch(made) for _ in range(epochs)]


def some(count: int, step: int = 6) -> set[int]:
    """Some cuts of an epoch: those at its beginning and its end, and some between."""
    return {0, 1, count - 1, count, *range(7, count, step)} & set(range(count + 1))


def check_cuts(make: Make, new_service: Callable[[], Any], *, step: int = 6, seed: int | None = 3) -> None:
    """Check for two epochs that a run resumed at a cut yields the rest of that epoch and the next one."""

    pipe = make()  # which may write shards

    def new() -> DataLoader2[Any]:
        made = DataLoader2(pipe, reading_service=new_service())
        if seed is not None:
            made.seed(seed)
        return made

    with new() as made:
        whole = [epoch(made) for _ in range(3)]
    with new() as made:
        assert resumed(made.state_dict(), pipe, new_service()) == whole[:2]
        for number in range(2):
            expected, after = whole[number : number + 2]
            items = iter(made)
            # The second epoch differs only by its number and the epoch before it.
            cuts = {0, len(expected) // 2, len(expected)} if number and not IS_WHOLE else some(len(expected), step)
            for cut in range(len(expected) + 1):
                if cut in cuts:
                    assert resumed(made.state_dict(), pipe, new_service()) == [expected[cut:], after], (number, cut)
                if cut < len(expected):
                    assert described(next(items)) == expected[cut]
            assert next(items, None) is None
            assert resumed(made.state_dict(), pipe, new_service(), 1) == [after]


@pytest.mark.parametrize(
    ("make", "workers", "prefetch"),
    [*((pipeline, *each) for each in LOADERS), (large, 0, 10), (large, 2, 10)],
)
def test_a_resumed_run_yields_the_rest_of_the_uninterrupted_run(make: Make, workers: int, prefetch: int) -> None:
    check_cuts(
        make, partial(ShardReadingService, workers, worker_prefetch_cnt=prefetch, main_prefetch_cnt=prefetch), step=11
    )


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resumed_run_can_be_resumed_repeatedly(workers: int) -> None:
    with loader(pipeline(), workers) as made:
        whole = [epoch(made) for _ in range(3)]
    with loader(pipeline(), workers) as made:
        state = made.state_dict()
    taken: list[Any] = []
    rounds = 0
    while len(taken) < len(whole[0]):
        with loader(pipeline(), workers) as made:
            made.load_state_dict(state)
            assert made.state_dict() == state  # nothing was read yet
            taken += itertools.islice(made, 4)
            state = made.state_dict()
            assert made.state_dict()[STATE] == state[STATE]
            rounds += 1
    assert taken == whole[0]
    assert rounds == -(-len(whole[0]) // 4)
    assert resumed(state, pipeline(), ShardReadingService(workers)) == whole[1:]  # the last round has met the end


@pytest.mark.parametrize("workers", [0, 2])
def test_load_state_dict_resumes_in_another_process(workers: int) -> None:
    with loader(pipeline(), workers) as made:
        whole = [epoch(made) for _ in range(2)]
    with loader(pipeline(), workers) as made:
        items = iter(made)
        head = [next(items) for _ in range(5)]
        state = made.state_dict()
    with loader(pipeline(), workers, seed=99) as made:
        made.load_state_dict(state)
        assert [head + epoch(made), epoch(made)] == whole


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_unseeded_loader_resumes_in_its_own_order(workers: int) -> None:
    with loader(pipeline(), workers, seed=None) as made:
        for cut in (0, 1, 9, 29, 30):
            items = iter(made)
            list(itertools.islice(items, cut))
            state = made.state_dict()
            rest, after = resumed(state, pipeline(), ShardReadingService(workers))
            assert rest == list(items)
            assert sorted(after) == sorted(epoch(made))


@pytest.mark.parametrize("workers", [0, 2])
def test_chosen_epochs_are_the_same_after_a_resume(workers: int) -> None:
    def chosen(made: Any, *numbers: int) -> list[list[Any]]:
        found = []
        for number in numbers:
            made.reading_service.set_epoch(number)
            found.append(epoch(made))
        return found

    with loader(pipeline(), workers) as made:
        whole = chosen(made, 0, 1, 2, 7)
    with loader(pipeline(), workers) as made:
        chosen(made, 0)
        made.reading_service.set_epoch(1)
        items = iter(made)
        assert list(itertools.islice(items, 5)) == whole[1][:5]
        within = made.state_dict()
        list(items)
        between = made.state_dict()
    with loader(pipeline(), workers) as made:
        made.load_state_dict(within)
        assert [epoch(made), *chosen(made, 2, 7)] == [whole[1][5:], *whole[2:]]
    with loader(pipeline(), workers) as made:
        made.load_state_dict(between)
        assert chosen(made, 2, 7) == whole[2:]


@pytest.fixture
def pinning_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread run without CUDA, too."""
    monkeypatch.setattr(
        "wds_datapipes.loading.service.service.pin_memory_of", lambda source: MemoryPinner(source, lambda item: item)
    )


@pytest.mark.usefixtures("pinning_anyway")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_items_ahead_in_the_pinning_thread_are_not_lost(workers: int) -> None:
    check_cuts(pipeline, partial(ShardReadingService, workers, pin_memory=True), step=12)


@pytest.mark.filterwarnings("ignore:pin_memory=True has no effect")
def test_pinning_without_cuda_has_no_effect() -> None:
    check_cuts(pipeline, partial(ShardReadingService, 1, pin_memory=True), step=100)


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sequential(workers: int) -> SequentialReadingService:
    return SequentialReadingService(DistributedReadingService(), ShardReadingService(workers))


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_after_torchdatas_distributed_service_resumes(workers: int) -> None:
    check_cuts(pipeline, partial(sequential, workers), step=15)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_one_rank_resumes(workers: int) -> None:
    check_cuts(pipeline, partial(ShardReadingService, workers, distributed=True), step=15)


@pytest.mark.timeout(900)
def test_each_rank_resumes_from_its_own_state(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would otherwise print a notice about it
    done = subprocess.run([*command, SCRIPT, tmp_path], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    keys = sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size))
    assert len(ranks[0]) == 8
    own = [name for name in ranks[0] if "sequential" not in name]  # torchdata drops the items that not all ranks have
    for name, number in itertools.product(own, range(3)):
        assert sorted(itertools.chain(*(rank[name]["whole"][number] for rank in ranks))) == keys
    for rank in ranks:
        for name in rank:
            whole, cuts = rank[name]["whole"], rank[name]["cuts"]
            assert len(cuts) == (4 if name in ("own", "sequential") else 1)
            for cut, rest, after in cuts:
                assert [rest, after] == [whole[1][cut:], whole[2]], (name, cut)


def test_spawned_workers_resume() -> None:
    with loader(pipeline(), 2) as made:
        whole = [epoch(made) for _ in range(2)]
    with loader(pipeline(), 2) as made:
        assert list(itertools.islice(made, 11)) == whole[0][:11]
        state = made.state_dict()
    assert resumed(state, pipeline(), ShardReadingService(2, "spawn")) == [whole[0][11:], whole[1]]


def renamed(sample: tuple[str, int]) -> tuple[str, int]:
    return f"renamed {sample[0]}", sample[1]


def rename_all(pipe: Pipe, info: Any) -> Any:
    return pipe.map(renamed)


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_init_functions_apply_after_a_resume(workers: int) -> None:
    check_cuts(pipeline, partial(ShardReadingService, workers, worker_init_fn=rename_all), step=15)
    with loader(pipeline(), workers, worker_init_fn=rename_all) as made:
        assert all(key.startswith("renamed ") for key, _ in made)


def refused(sample: tuple[str, int]) -> tuple[str, int]:
    if sample[1] % 3 == 1:
        raise ValueError(sample[0])
    return sample


def skipping() -> Any:
    return pipeline().map_samples(refused, on_error="skip")


def truncated() -> Any:
    shard = Path("4.tar")
    if shard.stat().st_size > 4000:
        os.truncate(shard, 4000)
    return pipeline(on_error="skip")


def in_order_truncated() -> Any:
    truncated()
    return (
        ShardList("{0..4}.tar").sharding_filter().load_wds_shards(on_error="skip").group_samples().to_tuple("__key__")
    )


def empty() -> Any:
    for number in (5, 6):
        write(f"{number}.tar", number, 0)
    return pipeline("{0..6}.tar")


def few_shards() -> Any:
    return pipeline("2.tar")  # one worker has no shard


def compressed() -> Any:
    for shard, size in enumerate(SIZES):
        write(f"{shard}.tar.gz", shard, size)
    return pipeline("{0..4}.tar.gz")


def piped() -> Any:
    return pipeline("pipe:cat {0..4}.tar")


def even(sample: tuple[str, int]) -> bool:
    return sample[1] % 2 == 0


def batched() -> Any:
    return pipeline().filter(even).batch(4)


def shuffled_twice() -> Any:
    return gathered().shuffle_samples(5).wds_decode().to_tuple("__key__", "cls").filter(even).shuffle_samples(3)


def repeated_shards() -> Any:
    return pipeline("{0,2,0,2}.tar")


@pytest.mark.filterwarnings("ignore::UserWarning")  # about skipped shards
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        skipping,
        truncated,
        in_order_truncated,
        empty,
        few_shards,
        compressed,
        piped,
        batched,
        shuffled_twice,
        repeated_shards,
    ],
)
def test_pipelines_of_all_kinds_resume(make: Make, workers: int) -> None:
    check_cuts(make, partial(ShardReadingService, workers), step=13)


def prefetched() -> Any:
    return gathered().prefetch(3)


def shuffled_by_torch() -> Any:
    return gathered().shuffle()


def taken_apart() -> Any:
    return gathered().batch(3).unbatch()


def dispatched() -> Any:
    return gathered().sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)


def central() -> Any:
    return InMain(gathered())


def ungathered() -> Any:
    return ShardList("{0..4}.tar").sharding_filter().load_wds_shards()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shuffled_by_torch, r"Shuffler .*\.shuffle_samples\(n\)"),
        (prefetched, "Prefetcher .*workers of ShardReadingService prefetch items"),
        (taken_apart, "UnBatcher has no position in the shards"),
        (dispatched, "sharding_round_robin_dispatch has no position in the shards"),
        (central, "InMain runs in the main process"),
        (ungathered, r"recorded by \.group_samples\(\)"),
    ],
)
def test_a_stage_without_a_state_is_named_when_a_state_is_loaded(
    make: Make, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its items are replayed."""
    with loader(make(), 1) as made:
        items = iter(made)
        next(items)
        state = made.state_dict()
        left = sum(1 for _ in items)
    with loader(make(), 1) as made:
        made.load_state_dict(state)
        assert sum(1 for _ in made) == left > 0
    (line,) = [record.getMessage() for record in caplog.records if "replay" in record.getMessage()]
    assert re.search(message, line)


def saved(pipe: Pipe, workers: int = 2, cut: int = 7) -> dict[str, Any]:
    with loader(pipe, workers) as made:
        list(itertools.islice(made, cut))
        state: dict[str, Any] = made.state_dict()
        return state


def load(state: str | bytes, pipe: Pipe, workers: int = 2) -> None:
    with loader(pipe, workers) as made:
        made.load_state_dict({STATE: state})
        next(iter(made))


@pytest.mark.parametrize("cut", [7, sum(SIZES) + 1])
def test_a_state_of_another_pipeline_is_refused(cut: int) -> None:
    state = saved(pipeline(), cut=cut)[STATE]
    with pytest.raises(StateError, match=r"stage 0 was .*TupleMaker.*, and is .*Mapper"):
        load(state, large())
    with pytest.raises(StateError, match=r"stage \d+ was ShardList.*5 items|ShardList\(.*\), and is ShardList\("):
        load(state, pipeline("{0..3}.tar"))
    write("other.tar", 9, 3)
    with pytest.raises(StateError, match=r"ShardList"):
        load(state, pipeline("{0..3}.tar::other.tar"))
    load(state, pipeline())


@pytest.mark.parametrize(("workers", "others"), [(2, 3), (3, 0), (0, 2)])
def test_another_number_of_workers_reads_the_rest_once(workers: int, others: int) -> None:
    with loader(pipeline(), workers) as made:
        items = iter(made)
        list(itertools.islice(items, 7))
        state = made.state_dict()
        left = sorted(items)
    assert sorted(resumed(state, pipeline(), ShardReadingService(others), 1)[0]) == left


def test_a_state_between_epochs_resumes_with_any_number_of_workers() -> None:
    state = saved(pipeline(), cut=sum(SIZES) + 1)
    with loader(pipeline(), 3) as made:
        epoch(made)
        expected = epoch(made)
    assert resumed(state, pipeline(), ShardReadingService(3), 1) == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\x80\x04junk", "not JSON"),
        (b"[1]", "does not contain its version"),
        (b'{"format": "another"}', "does not contain its version"),
        (
            b'{"version": 99, "ranks": []}',
            "has version 99, but this release .* reads only version 6",
        ),
        (b'{"format": "wds-datapipes state", "version": 4}', "has version 4, .* or restart the epoch"),
        (b'{"version": 6, "ranks": [{}]}', "is corrupt"),
        (b'{"version": 6}', "is corrupt"),
        (b'{"version": 6, "ranks": []}', "contains no ranks"),
    ],
)
def test_invalid_states_are_refused(text: bytes, message: str) -> None:
    with pytest.raises(StateError, match=message):
        load(text, pipeline(), 0)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_state_is_small_json_without_payload(workers: int) -> None:
    buffer_size = 300
    secret = "payload" * 10
    for shard in range(12):
        samples = [{"__key__": f"{shard}-{number}", "txt": secret} for number in range(100)]
        build_shard(f"much-{shard:02}.tar", samples)
    pipe = gathered("much-{00..11}.tar").shuffle_samples(buffer_size).to_tuple("__key__")
    largest = 0
    with loader(pipe, workers) as made:
        for number, _ in enumerate(made):
            if number % 100 == 0:
                state = made.state_dict()[STATE]
                found = json.loads(state)
                assert secret not in state
                waiting = sum(
                    len((stage or {}).get("waiting", ()))
                    for part in found["ranks"][0]["parts"]
                    for stage in part["stages"] or ()
                )
                assert len(state) <= 1024 * max(workers, 1) + 50 * waiting
                largest = max(largest, waiting)
    assert largest >= 100


def test_the_main_process_does_not_grow_while_states_are_saved() -> None:
    for shard in range(4):
        write(f"many-{shard}.tar", shard, 500)
    shards = ShardList([f"many-{shard}.tar" for shard in range(4)] * 8).shuffle().sharding_filter()
    pipe = shards.load_wds_shards().group_samples().shuffle_samples(100).to_tuple("__key__", "cls").batch(4)
    process = psutil.Process()
    sizes = []
    with loader(pipe, 2) as made:
        batches = itertools.chain.from_iterable(itertools.repeat(made))  # 4,000 in an epoch
        for number in range(BATCHES):
            next(batches)
            if number % 100 == 99:
                made.state_dict()
            if number % (BATCHES // 10) == BATCHES // 10 - 1:
                gc.collect()
                sizes.append(process.memory_info().rss)
    print([size >> 10 for size in sizes], "KiB")
    # At first, buffers are allocated, and modules imported.
    assert min(sizes[-3:]) - max(sizes[:3]) < 2 << 20, sizes


@pytest.mark.parametrize(("ranks", "method", "cuts"), RANDOM_CUTS)
def test_random_loaders_resume_at_any_point(tmp_path: Path, ranks: int, method: str, cuts: int) -> None:
    script = Path(__file__).with_name("randomised_cuts.py")
    asked = ["--seed", SEED, "--cuts", str(cuts), "--ranks", str(ranks), "--method", method]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, tmp_path, *asked], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert not found["wrong"], "\n".join([f"seed {SEED}", *found["wrong"]])
    assert found["cuts"] >= cuts
