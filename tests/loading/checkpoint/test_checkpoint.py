"""Loaders that resume from a state: the items that follow are those of the uninterrupted run, at any cut."""

from __future__ import annotations

import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.errors import StateError
from wds_datapipes.testing import build_shard

SIZES = (7, 0, 13, 1, 9)
BUFFER = 4
STATE = "wds_datapipes"

#: How many batches are read; `nox -s nightly` reads more.
BATCHES = int(os.environ.get("RESUME_BATCHES", "10_000"))

Pipe = IterDataPipe[Any]


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


def renamed(sample: tuple[str, int]) -> tuple[str, int]:
    return f"renamed {sample[0]}", sample[1]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\x80\x04junk", "a JSON text with its version"),
        (b"[1]", "a JSON text with its version"),
        (b'{"version": 99, "ranks": []}', "version 99, but this release .* reads only version 7.* restart the epoch"),
        (b'{"version": 7, "ranks": [{}]}', "its checksum differs"),
        (b'{"version": 7, "crc32": 223132457, "ranks": []}', "contains no ranks"),
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
