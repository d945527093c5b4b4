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
from error_facts import naming
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import DatasetSpec, ShardList
from wds_datapipes.errors import MissingFieldError, SpecError
from wds_datapipes.testing import build_shard

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
#: As webdataset's README has it.
README_SPEC = """\
dataset:
  - shards: gs://nvdata-ocropus-tess/ia1-{000000..000033}.tar
    scaleprob: 0.3
  - shards: gs://nvdata-ocropus-tess/cdipsub-{000000..000022}.tar
    scale: [1.0, 3.0]
  - shards: gs://nvdata-ocropus-tess/gsub-{000000..000167}.tar
    scale: [0.4, 1.0]
  - shards: gs://nvdata-ocropus-tess/bin-gsub-{000000..000167}.tar
    extensions: nrm.jpg
    scale: [0.3, 1.0]
  - shards: gs://nvdata-ocropus/rendered.tar
    scaleprob: 1.0
"""
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
        ({"shards": "a.tar", "chose": 1}, r"datasets\[1\] \(web\) has the key 'chose'. If this means 'choose'"),
        ({"shards": "a.tar", "prefix": "s3://"}, r"\(web\) has the key 'prefix', which belongs next to 'datasets'"),
        ({"shards": "a.tar", "choose": 1, "resample": 1}, r"datasets\[1\] \(web\) has choose and resample; only one"),
        (
            {"shards": "{1..3}.tar", "choose": 4},
            "choose must be a number of shards or a share of its 3 shards .*, not 4",
        ),
        ({"shards": "{1..3}.tar", "choose": 1.5}, "choose must be a number of shards or a share .*, not 1.5"),
        ({"shards": "{1..3}.tar", "scaleprob": 2}, "scaleprob must be a share of its 3 shards .*, not 2"),
        ({"shards": "a.tar", "resample": 0}, "resample must be a number .*, not 0"),
        ({"shards": "a.tar", "resample": float("nan")}, "resample must be a number .*, not nan"),
        ({"shards": "a.tar", "resample": float("inf")}, "resample must be a number .*, not inf"),
        ({"shards": "a.tar", "choose": True}, "choose must be a number .*, not True"),
        ({"shards": "a.tar", "scaleprob": "0.3"}, "scaleprob must be a share .*, not '0.3'"),
        ({"shards": "a.tar", "settings": ["x"]}, "settings must be a mapping from names to values"),
        ({"shards": "a.tar", 3: "x"}, "a setting must have a string without initial __ as its name, not 3"),
        ({"shards": "a.tar", "settings": {"__url__": "x"}}, "initial __ as its name, not '__url__'"),
        ({"shards": "a.tar", "scale": 1, "settings": {"scale": 2}}, "has scale twice"),
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
        ("spec.yaml", "{datasets: [{shards: a}], dataset: [{shards: a}]}", "has both 'datasets' and 'dataset'"),
        ("spec.yaml", "dataset: []", r"needs a list of at least one dataset .* not \[\]"),
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


def test_the_specification_of_webdatasets_readme_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "readme.yaml"
    path.write_text(README_SPEC)
    pipe = DatasetSpec(path)
    assert len(pipe) == len(list(pipe)) == 10 + 23 + 168 + 168 + 1
    settings = Counter(json.dumps(each) for each in pipe.settings.values())
    assert settings == {
        "{}": 34 + 1,
        '{"scale": [1.0, 3.0]}': 23,
        '{"scale": [0.4, 1.0]}': 168,
        '{"extensions": "nrm.jpg", "scale": [0.3, 1.0]}': 168,
    }
    assert pipe.settings["gs://nvdata-ocropus-tess/gsub-000167.tar"] == {"scale": [0.4, 1.0]}


@given(st.integers(1, 60), st.sampled_from(["choose", "resample", "scaleprob"]), st.floats(0.001, 1))
def test_a_share_is_rounded_and_never_zero(shards: int, key: str, share: float) -> None:
    pipe = DatasetSpec({"datasets": [{"shards": f"{{1..{shards}}}.tar", key: share}]})
    found = list(pipe)
    assert len(found) == len(pipe)
    assert abs(len(pipe) - share * shards) <= 0.5 or len(pipe) == 1
    if key != "resample":
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("key", "value", "count"),
    [("choose", 1, 1), ("choose", 1.0, 9), ("scaleprob", 1, 9), ("resample", 2, 2), ("resample", 2.0, 18)],
)
def test_a_point_makes_a_share(key: str, value: float, count: int) -> None:
    assert len(DatasetSpec({"datasets": [{"shards": "{1..9}.tar", key: value}]})) == count


@pytest.mark.parametrize("workers", [0, 2])
def test_settings_reach_the_samples_of_their_dataset(tmp_path: Path, workers: int) -> None:
    for name in ("plain", "normalized"):
        samples = [{"__key__": f"{name}{number}", "jpg": "j", "nrm.jpg": "n"} for number in range(2)]
        build_shard(tmp_path / f"{name}.tar", samples)
    datasets: list[dict[str, Any]] = [
        {"shards": f"{tmp_path}/plain.tar"},
        {"shards": f"{tmp_path}/normalized.tar", "extensions": "nrm.jpg", "scale": 2, "settings": {"share": "books"}},
    ]
    spec = DatasetSpec({"dataset": datasets})
    pipe = spec.sharding_filter().load_wds_shards().group_samples().associate(spec.settings, by="__url__")
    with open_service(pipe, workers) as loader:
        found = {sample["__key__"]: sample for sample in loader}
    images = {key: sample[sample.get("extensions", "jpg")] for key, sample in found.items()}
    assert images == {"plain0": b"j", "plain1": b"j", "normalized0": b"n", "normalized1": b"n"}
    assert [found[key].get("scale") for key in sorted(images)] == [2, 2, None, None]
    assert [found[key].get("share") for key in sorted(images)] == ["books", "books", None, None]
    others = DatasetSpec({"dataset": datasets[:1]}).load_wds_shards().group_samples()
    with pytest.raises(MissingFieldError, match="associate found no entry for"):
        list(others.associate(DatasetSpec({"dataset": datasets[1:]}).settings, by="__url__"))


def test_a_shard_has_one_set_of_settings() -> None:
    same = [{"shards": "a-{0..2}.tar", "scale": 2}, {"shards": "a-2.tar", "scale": 2}]
    assert DatasetSpec({"datasets": same}).settings["a-2.tar"] == {"scale": 2}
    others: list[dict[str, Any]] = [{}, {"scale": 3}]
    for other in others:
        with pytest.raises(SpecError, match=r"a-2\.tar is in .* and in .*, but their settings differ"):
            DatasetSpec({"datasets": [same[0], {"shards": "a-2.tar", **other}]})


def test_settings_do_not_change_the_set_of_shards() -> None:
    given: list[dict[str, Any]] = [{}, {"scale": 2}, {"settings": {"domain": "web"}}]
    mixtures = [DatasetSpec({"datasets": [{"shards": "a-{0..2}.tar", **each}]})._mixture for each in given]
    assert len({each.fingerprint() for each in mixtures}) == 1


@pytest.mark.parametrize(
    ("shards", "options"),
    [
        (["http://h/{0..9999}.tar"] * 1200, {}),
        (["http://h/{0..9999}.tar"] * 120, {"allow_local_files": False}),
        (["http://h/{0..9999999}.tar", "http://h/{0..1}.tar"], {}),
        (["http://h/{0..999999}.tar::http://h/{0..1}.tar"], {"allow_local_files": False}),
    ],
)
def test_all_patterns_together_expand_to_a_bounded_number_of_shards(shards: list[str], options: Any) -> None:
    for make in (lambda: DatasetSpec({"datasets": [{"shards": [each]} for each in shards]}, **options),
                 lambda: DatasetSpec({"datasets": [{"shards": shards}]}, **options),
                 lambda: ShardList(shards, **options)):  # fmt: skip
        with pytest.raises(SpecError, match=r"expand to .* shards.*; the limit is 10?,000,000"):
            make()


def test_draws_of_all_datasets_together_are_bounded() -> None:
    datasets = [{"shards": "http://h/a.tar", "resample": 600_000}] * 2
    assert len(DatasetSpec({"datasets": datasets})) == 1_200_000
    with pytest.raises(SpecError, match=naming("1,200,000 shards", "1,000,000")):
        DatasetSpec({"datasets": datasets}, allow_local_files=False)
