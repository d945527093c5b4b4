"""Everything but `ShardReadingService` works without torchdata, and with releases of it that have no DataLoader2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes import ShardList, ShardReadingService, seeds
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.testing import build_shard

PROGRAM = Path(__file__).with_name("program_without_dataloader2.py")
NUMBERS = st.integers(0, (1 << 64) - 1)

#: The missing modules of each release; 0.7.1 has no StatefulDataLoader that could exist without the rest.
RELEASES = {"none": "torchdata"}
if find_spec("torchdata.stateful_dataloader") is not None:
    RELEASES["0.10"] = "torchdata.dataloader2,torchdata.datapipes"

#: States are saved after these numbers of items.
CUT = 20


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def pipe() -> Any:
    shards = ShardList("{a..f}.tar").shuffle().sharding_filter()
    return shards.load_wds_shards().group_samples().shuffle_samples(5).map(key_of)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Six shards of different sizes."""
    path = tmp_path_factory.mktemp("shards")
    before = Path.cwd()
    os.chdir(path)
    for number, name in enumerate("abcdef"):
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n:02}", "cls": "1"} for n in range(9 + number)])
    yield path
    os.chdir(before)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[str]]:
    """Two epochs of DataLoader2, and its state after `CUT` items."""
    with new_loader() as loader:
        return [[*loader], [*loader]]


def new_loader() -> Any:
    loader = DataLoader2(pipe(), reading_service=ShardReadingService(2))
    loader.seed(3)
    return loader


@pytest.mark.parametrize("release", RELEASES)
def test_states_are_exchanged_with_a_program_without_dataloader2(
    release: str, folder: Path, whole: list[list[str]]
) -> None:
    with new_loader() as loader:
        items = iter(loader)
        begun = [next(items) for _ in range(CUT)]
        saved = folder / "saved.json"
        saved.write_text(json.dumps(loader.reading_service.state_dict()))

    warnings = ["-W", "error", "-W", "ignore:'set_vital' is deprecated"]  # StatefulDataLoader calls it
    arguments = [sys.executable, *warnings, str(PROGRAM), RELEASES[release], str(saved)]
    finished = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    assert (finished.returncode, finished.stderr) == (0, "")
    found = json.loads(finished.stdout)

    assert begun == whole[0][:CUT]
    assert found["resumed"][:2] == [whole[0][CUT:], whole[1]]
    assert found["resumed"][2:] in ([], [whole[0][CUT:], whole[1], whole[0][CUT:]])
    assert {*map(tuple, found["begun"])} == {tuple(begun)}
    assert [*map(sorted, found["elastic"])] == [sorted(whole[0][CUT:])]
    with new_loader() as loader:
        loader.reading_service.load_state_dict(found["state"])
        assert [[*loader], [*loader]] == [whole[0][CUT:], whole[1]]

    advice = 'python -m pip install "torchdata>=0.7.1,<0.10"'
    for name in ("service", "check_resume"):
        assert found[name].startswith("MissingDependencyError: 'torchdata.dataloader2' is needed to ")
        assert advice in found[name]
    assert found["missing from *"] == ["RayReadingService", "ShardReadingService"]
    assert found["imported"] == []
    assert found["stages"] == descriptions(pipe().filter(bool).batch(3).collate())


class TestSeedGenerator:
    @given(NUMBERS, NUMBERS, st.lists(st.integers(0, 1 << 40), max_size=3), st.integers(1, 5))
    @settings(max_examples=50, deadline=None)
    def test_the_numbers_are_those_of_torchdata(self, seed: int, again: int, places: list[int], count: int) -> None:
        ours, theirs = seeds.SeedGenerator(seed), SeedGenerator(seed)
        for place in places:
            assert [ours.generate_seed() for _ in range(count)] == [theirs.generate_seed() for _ in range(count)]
            ours, theirs = ours.spawn(place), theirs.spawn(place)
            assert ours.generate_shared_seed() == theirs.generate_shared_seed()
        for generator in (ours, theirs):
            generator.spawn(count, inplace=True)
        assert ours.generate_seed() == theirs.generate_seed()
        assert [ours.generate_shared_seed() for _ in range(count)] == [
            theirs.generate_shared_seed() for _ in range(count)
        ]
        for generator in (ours, theirs):
            generator.seed(again)
        assert (ours.generate_seed(), ours.generate_shared_seed()) == (
            theirs.generate_seed(),
            theirs.generate_shared_seed(),
        )

    def test_the_published_vectors_of_philox(self) -> None:
        """The vectors that Random123 publishes in its file kat_vectors."""
        ones = 0xFFFFFFFF
        assert seeds.philox_block([0, 0], [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
        assert seeds.philox_block([ones] * 2, [ones] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
