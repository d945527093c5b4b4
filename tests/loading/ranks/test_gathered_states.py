"""States of all ranks of a process group: gathered on rank 0, and saved by torch.distributed.checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_pipelines import KEYS, flat, indexed, stream, write_shards
from forked_ranks import on_ranks

from wds_datapipes import StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.integrations.ranks import gather_states
from wds_datapipes.loading.checkpoint.format import checkpoints_in

EXAMPLES = Path(__file__).parents[3] / "docs/examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import train

        yield train
        del sys.modules["train"]


def gathered(folder: Path, build: Any, steps: int) -> tuple[list[str], dict[str, Any]]:
    """Return the items that this rank reads in some steps, and the result of `gather_states`."""
    data = StatefulShards(build(folder, dist.get_world_size()))
    head = flat(islice(data, steps))
    return head, gather_states(data.state_dict())


def test_rank_0_gathers_the_states_of_a_stream(folder: Path) -> None:
    found = on_ranks(3, lambda _: gathered(folder, stream, 2))
    assert [[each.instance.rank for each in checkpoints_in(state)] for _, state in found] == [[0, 1, 2], [1], [2]]
    data = StatefulShards(stream(folder, 1))
    data.load_state_dict(found[0][1])
    assert sorted([*flat(head for head, _ in found), *flat(data)]) == KEYS


def test_the_states_of_an_indexed_dataset_are_one(folder: Path) -> None:
    (_, one), *others = on_ranks(2, lambda _: gathered(folder, indexed, 2))
    assert [state for _, state in others] == [one]
    (saved,) = checkpoints_in(one)
    assert saved.is_of_all_ranks


def test_all_ranks_refuse_states_of_different_epochs(folder: Path) -> None:
    def program(rank: int) -> str:
        data = StatefulShards(stream(folder, 2))
        for _ in range(rank + 1):
            list(data)
        next(iter(data))
        with pytest.raises(StateError, match="from different epochs") as raised:
            gather_states(data.state_dict())
        return str(raised.value)

    assert len({*on_ranks(2, program)}) == 1


@pytest.mark.parametrize(("before", "ranks", "workers"), [(2, 2, 0), (2, 3, 1), (4, 2, 0), (2, 4, 0)])
def test_a_rank_saves_its_state_with_dcp_and_loads_those_that_it_takes_over(
    folder: Path, example: Any, tmp_path: Path, before: int, ranks: int, workers: int
) -> None:
    saved = tmp_path / "saved"

    def begin(_: int) -> tuple[list[str], list[str]]:
        with example.make_loader(stream(folder, before), 0) as loader:
            items = iter(loader)
            head = next(items)
            dcp.save(example.texts_of(loader), checkpoint_id=saved)
            return list(head), flat(items)

    def resume(_: int) -> tuple[list[str], list[str]]:
        pipe = stream(folder, ranks)
        with example.make_loader(pipe, workers) as loader:
            texts = example.load_texts(loader, saved, pipe, workers)
            return [key for key in texts if key.startswith("data")], flat(loader)

    begun, resumed = on_ranks(before, begin), on_ranks(ranks, resume)
    read = [keys for keys, _ in resumed]
    assert {*flat(read)} == {f"data.{rank}-of-{before}" for rank in range(before)}
    if ranks == before:
        assert resumed == [([f"data.{rank}-of-2"], rest) for rank, (_, rest) in enumerate(begun)]
    else:
        assert {*map(len, read)} == {-(-before // ranks)}
        assert sorted(flat([*(head for head, _ in begun), *(rest for _, rest in resumed)])) == KEYS
