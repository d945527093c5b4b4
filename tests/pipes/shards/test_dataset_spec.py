"""Mixtures of shard collections, read from files and split by real loaders."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_parallel_pipelines import open_service
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import DatasetSpec
from wds_datapipes.errors import SpecError

MIXTURE = {
    "prefix": "s3://",
    "buckets": ["main"],
    "datasets": [
        {"name": "books", "shards": ["a-{0..1}.tar::b.tar", "c.tar"]},
        {"buckets": "web", "shards": "crawl-{00..19}.tar", "choose": 5},
        {"shards": "rare-{0..2}.tar", "resample": 6},
        {"shards": "seed-{0..9}.tar", "choose": 3},
    ],
}
BOOKS = [f"s3://main/{name}.tar" for name in ("a-0", "a-1", "b", "c")]


def epoch(pipe: DatasetSpec, seed: int) -> list[str]:
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    return list(pipe)


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_a_file_is_equivalent_to_the_same_dict(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"spec.{suffix}"
    path.write_text(json.dumps(MIXTURE) if suffix == "json" else yaml.safe_dump(MIXTURE))
    for spec in (path, str(path)):
        assert epoch(DatasetSpec(spec), 3) == epoch(DatasetSpec(MIXTURE), 3)


def test_an_epoch_has_the_requested_numbers_in_the_order_of_the_file() -> None:
    found = epoch(DatasetSpec(MIXTURE), 0)
    assert len(found) == len(DatasetSpec(MIXTURE)) == 4 + 5 + 6 + 3
    assert found[:4] == BOOKS
    for part, prefix in (found[4:9], "s3://web/crawl-"), (found[9:15], "s3://main/rare-"), (found[15:], "s3://main/s"):
        assert part == sorted(part)
        assert all(url.startswith(prefix) for url in part)
    assert len(set(found[4:9])) == 5
    assert len(set(found[15:])) == 3


def test_each_seed_draws_differently_and_every_shard_is_drawn() -> None:
    pipe = DatasetSpec(MIXTURE)
    assert epoch(pipe, 1) == epoch(pipe, 1) == epoch(pickle.loads(pickle.dumps(pipe)), 1)
    drawn = Counter(url for seed in range(100) for url in epoch(pipe, seed))
    assert len(drawn) == 4 + 20 + 3 + 10
    assert max(Counter(epoch(pipe, 5)[9:15]).values()) > 1


def test_a_dataset_without_draws_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert list(DatasetSpec({"datasets": [{"shards": "{a,b}.tar"}]})) == ["a.tar", "b.tar"]
    assert torch.equal(torch.get_rng_state(), before)


def test_home_variables_commands_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WDS_SET", "x-{0..1}")
    (tmp_path / "a.tar").touch()
    for buckets, shards in ("~", "*.tar"), ("s3://b", "~/a.tar"):
        assert list(DatasetSpec({"buckets": buckets, "datasets": [{"shards": shards}]})) == [f"{tmp_path}/a.tar"]
    command = {"prefix": "pipe:gsutil cat ", "buckets": ["gs://b"], "datasets": [{"shards": "${SET}.tar"}]}
    assert list(DatasetSpec(command)) == ["pipe:gsutil cat gs://b/x-0.tar", "pipe:gsutil cat gs://b/x-1.tar"]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_one_draw_and_the_next_epoch_has_another(workers: int) -> None:
    spec = {"datasets": [{"shards": "a-{00..39}.tar", "choose": 15}, {"shards": "b-{0..4}.tar"}]}
    with open_service(DatasetSpec(spec).shuffle().sharding_filter(), workers) as loader:
        epochs = [list(loader) for _ in range(3)]
    for found in epochs:
        assert len(set(found)) == len(found) == 20
    assert len({frozenset(found) for found in epochs}) == 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"shards": "a.tar", "chose": 1}, r"datasets\[1\] has the unknown keys 'chose'; known are buckets, name"),
        ({"shards": "a.tar", "choose": 1, "resample": 1}, r"datasets\[1\] \(web\) has choose and resample; only one"),
        ({"shards": "{1..3}.tar", "choose": 4}, r"\(web\): choose must be a number of shards from 1 to 3, not 4"),
        ({"shards": "a.tar", "resample": 1.0}, "resample must be a number of shards from 1 to .*, not 1.0"),
        ({"shards": "a.tar", "choose": True}, "choose must be a number .*, not True"),
        ({"shards": []}, r"datasets\[1\] \(web\) has no shards"),
        ({"shards": [1]}, r"datasets\[1\] \(web\): shards must be a string or a list of strings, not \[1\]"),
        ({"shards": "a.tar", "buckets": ["a", "b"]}, "buckets must be a string, not"),
        ({"shards": "{a.tar"}, r"datasets\[1\] \(web\): The braces in the shard pattern"),
    ],
)
def test_a_wrong_dataset_is_named_with_its_file(dataset: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    named = {"name": "web", **dataset}
    path.write_text(yaml.safe_dump({"datasets": [{"shards": "x.tar"}, named]}))
    with pytest.raises(SpecError, match=rf"spec\.yaml, .*{message}"):
        DatasetSpec(path)
    with pytest.raises(SpecError, match=r"none\.yaml cannot be read: there is no such file"):
        DatasetSpec("none.yaml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("spec.yaml", "- a.tar", r"spec.yaml must be a mapping .* not \['a.tar'\]"),
        ("spec.yaml", "datasets: []", r"needs a list of at least one dataset .* not \[\]"),
        ("spec.yaml", "datasets: [a.tar]", r"datasets\[0\] must be a mapping .* not 'a.tar'"),
        ("spec.yaml", "bucket: x", "has the unknown keys 'bucket'; known are prefix"),
        ("spec.yaml", "prefix: 3\ndatasets: [{shards: a}]", "prefix must be a string, not 3"),
        ("spec.yaml", "datasets: !!python/object/apply:os.getcwd []", "is not YAML with plain values"),
        ("spec.json", "\udcff", "spec.json is not YAML"),
        ("spec.toml", "", r"ends in .yaml, .yml, .json, not '.*spec.toml'"),
    ],
)
def test_a_wrong_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SpecError, match=message):
        DatasetSpec(path)
