"""A release reads states, indexes and manifests of the release before, and runs continue with the same samples.

`record.py` stores those of this release. The session `peers(nodes)` runs these tests with the nodes of torchdata.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from stored_runs import (
    FOLDER,
    LOADERS,
    ON_RANKS,
    SIZES,
    cases,
    defaults,
    facts_of_indexes,
    release,
    resumed,
    saved,
    title,
)

from wds_datapipes import IndexedSamples, merge_states
from wds_datapipes.index import AccessOptions, check_index, read_index, read_manifest

RELEASES = sorted(folder.name for folder in FOLDER.iterdir() if (folder / "states.json").exists())
#: Warnings of torch and torchdata about each other.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(params=RELEASES)
def stored(request: pytest.FixtureRequest, folder: Path) -> str:
    """The name of a release, whose files are in the working directory."""
    shutil.copytree(FOLDER / request.param, folder, dirs_exist_ok=True)
    return str(request.param)


def read(name: str) -> Any:
    return json.loads(Path(name).read_text("utf-8"))


def test_this_release_and_the_one_before_have_stored_files() -> None:
    """For the first tests after a change of the version, `record.py` stores those of the new one."""
    minor = int(release().split(".")[1])
    assert {f"0.{each}" for each in (minor - 1, minor) if each} <= {*RELEASES}
    states = json.loads((FOLDER / release() / "states.json").read_text("utf-8"))
    assert [*states] == [title(*case) for case in cases()]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("case", [*cases()], ids=lambda case: title(*case))
def test_each_loader_continues_a_stored_run(stored: str, case: tuple[str, str, int, int], loader: str) -> None:
    run = read("states.json")[title(*case)]
    assert resumed(loader, *case[1:], state=run["state"], saved_by=case[0]) == run["rest"]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ON_RANKS)
def test_one_rank_continues_a_stored_run_of_two(stored: str, name: str, loader: str) -> None:
    runs = [run for key, run in read("states.json").items() if f": {name}, rank" in key and key.endswith("of 2")]
    for pair in zip(runs[::2], runs[1::2], strict=True):
        merged = merge_states([run["state"] for run in pair])
        rest, following = resumed(loader, name, 0, 1, state=merged, saved_by="several")
        assert sorted(keys_of(rest)) == sorted(keys_of(pair[0]["rest"][0]) + keys_of(pair[1]["rest"][0]))
        assert (
            len({*keys_of(following)})
            == len(keys_of(following))
            == sum(SIZES) - sum(SIZES) % (4 if name == "index" else 1)
        )


def keys_of(items: list[Any]) -> list[str]:
    """Return the keys of samples, which are tuples, or in batches."""
    return [key for item in items for key in ([item[0]] if isinstance(item[0], str) else [each[0] for each in item])]


def test_stored_indexes_and_manifests_are_read(stored: str) -> None:
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert facts_of_indexes() == read("indexes.json")
    manifest = read_manifest("manifest.json")
    for shard, (entry, size) in enumerate(zip(manifest.entries, SIZES, strict=True)):
        assert check_index(read_index(f"{shard}.tar.wdsidx"), f"{shard}.tar", depth="bytes") is None
        facts = read("indexes.json")[f"{shard}.tar.wdsidx"]
        assert (Path(entry.url).name, entry.samples, entry.sha256) == (f"{shard}.tar", size, facts["sha256"])
    samples = IndexedSamples(manifest, order="sequential", access=AccessOptions(indexes="require"))
    keys = [sample[0] for name in sorted(read("indexes.json")) for sample in read("indexes.json")[name]["samples"]]
    assert [sample["__key__"] for sample in samples] == keys
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before  # no index was built again


def test_defaults_that_states_omit_have_not_changed(stored: str) -> None:
    """A changed default would continue a run with other samples: it needs a new version of the format of states."""
    now = defaults()
    for kind, values in read("defaults.json").items():
        assert now[kind] | values == now[kind], kind


def test_what_this_release_writes_is_stored(folder: Path) -> None:
    """If the format has changed, remove the folder of a release that is not published, and run `record.py` again."""
    shutil.copytree(FOLDER / release(), folder, dirs_exist_ok=True)
    case = ("StatefulShards", "stream", 0, 1)
    assert saved(*case) == read("states.json")[title(*case)]
