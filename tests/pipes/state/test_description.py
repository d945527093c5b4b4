"""Descriptions of pipelines change only with code and arguments."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ImageDecoder, ReadLimits, ShardList, Timeouts
from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards
from wds_datapipes.pipes.state.description import description, descriptions, difference
from wds_datapipes.pipes.state.shard_order import ShardOrder

SCRIPT = Path(__file__).with_name("described_pipelines.py")


def load_as(name: str) -> Any:
    """Import the script under a different name."""
    spec = importlib.util.spec_from_file_location(name, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["one_name"])
def pipelines(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield load_as(request.param)
    del sys.modules[request.param]


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function:UserWarning")
def test_different_arguments_have_different_descriptions(pipelines: Any) -> None:
    for name, found in pipelines.described().items():
        for left, right in itertools.combinations(found, 2):
            assert left != right, name


def test_every_stage_is_described(pipelines: Any) -> None:
    own = {
        name
        for name, function in IterDataPipe.functions.items()
        if getattr(getattr(function, "__wrapped__", None), "__module__", "").startswith("wds_datapipes.")
    }
    assert own | {"ShardList", "DatasetSpec", "DirectoryShards", "MockSamples"} == {
        name for name in pipelines.PIPELINES if not name.startswith("of ")
    }


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function:UserWarning")
def test_a_description_is_the_same_in_every_process_and_under_every_name(pipelines: Any) -> None:
    here = json.loads(json.dumps(pipelines.described()))
    again = json.loads(json.dumps(load_as("another_name").described()))
    assert again == here
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, check=True)
    assert json.loads(done.stdout) == here


def test_line_numbers_comments_and_docstrings_do_not_count() -> None:
    def described(text: str) -> list[str]:
        names: dict[str, Any] = {"__name__": "script"}
        exec(text, names)
        return descriptions(IterableWrapper([1]).map_samples(names["double"]))

    first = described("def double(n):\n    return 2 * n\n")
    assert described("# more\n\ndef double(n):\n    '''Double it.'''\n    # here\n    return 2 * n\n") == first
    assert described("def double(n):\n    return 3 * n\n") != first


def read_with(**options: Any) -> Any:
    shards = ShardList("https://host/{0..2}.tar", storage_options=options.get("storage_options"))
    return shards.load_wds_shards(**options).group_samples()


@pytest.mark.parametrize(
    "options",
    [
        {"storage_options": {"token": "hunter2"}},
        {"timeout_s": 3},
        {"timeout_s": Timeouts(connect_s=3)},
        {"retries": 3},
        {"read_ahead": 0},
        {"limits": ReadLimits(member_bytes=1000)},
        {"allow_local_files": False},
    ],
)
def test_how_shards_are_read_does_not_count(options: dict[str, Any]) -> None:
    assert descriptions(read_with(**options)) == descriptions(read_with())


def test_limits_of_decoders_and_folders_of_caches_do_not_count() -> None:
    plain = read_with().wds_decode().cache_samples()
    other = read_with().wds_decode(limits=ReadLimits(expansion=7)).cache_samples("folder")
    assert descriptions(plain) == descriptions(other)
    assert descriptions(ShardList("a.tar").cache_wds_shards("copies")) == descriptions(ShardList("a.tar"))


def test_credentials_neither_count_nor_appear() -> None:
    def signed(signature: str) -> list[str]:
        urls = [f"https://me:{signature}@host/{number}.tar?X-Amz-Signature={signature}" for number in range(3)]

        def fetch(key: str, token: str = signature, headers: Any = (signature,)) -> Any:
            return key, token, headers, secret

        secret = signature
        pipe: Any = ShardList(urls).load_wds_shards().group_samples().map_samples(fetch)
        return descriptions(pipe.map_dict(cls=Fetcher(signature))) + descriptions(IterableWrapper(urls))

    found = signed("hunter2")
    assert found[0] == signed("another")[0]
    assert found[2:] == signed("another")[2:]
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize(
    "query",
    ["X-Amz-Date={n}&X-Amz-Expires={n}&X-Amz-Signature={n}", "sv=1&se={n}&sig={n}", "Expires={n}&Signature={n}"],
)
def test_shards_whose_urls_were_signed_again_are_the_same(query: str) -> None:
    orders = []
    for n in (1723, 9876):
        urls = [f"https://host/{number}.tar?{query.format(n=n)}" for number in range(3)]
        order = ShardOrder(ShardList(urls))
        assert list(order) == urls
        orders.append([order.seen, descriptions(ShardList(urls)), descriptions(IterableWrapper(urls))])
    assert orders[0] == orders[1]
    assert "1723" not in repr(orders)


class Fetcher:
    def __init__(self, token: str) -> None:
        self._token = token
        self.rng = random.Random()

    def __call__(self, data: bytes) -> bytes:
        return data


def test_an_object_can_provide_its_fingerprint() -> None:
    class Model:
        def __init__(self, weights: object) -> None:
            self.weights = weights

        def fingerprint(self) -> str:
            return "weights of step 3"

    def using(model: Model) -> Any:
        return IterableWrapper([1]).map_samples(lambda item: (item, model))

    assert description(using(Model(1))) == description(using(Model(2)))
    assert "weights of step 3" in description(IterableWrapper([1]).shuffle_samples(2).map_samples(CallableModel()))


class CallableModel:
    def fingerprint(self) -> str:
        return "weights of step 3"

    def __call__(self, item: Any) -> Any:
        return item


def test_large_data_is_digested_once() -> None:
    looked_at = []

    class Looked(dict[str, Any]):
        def items(self) -> Any:
            looked_at.append(True)
            return super().items()

    table = Looked({f"{number:06}": {"n": number} for number in range(5000)})
    pipe: Any = ShardList("a.tar").load_wds_shards().group_samples().associate(table)
    data = StatefulShards(pipe)
    begun = len(looked_at)
    assert begun
    for _ in range(3):
        data.state_dict()
    assert len(looked_at) == begun


def test_a_difference_is_described() -> None:
    stages = [IterableWrapper([1]).slice_samples(count) for count in (100, 110)]
    assert difference(description(stages[0]), description(stages[1])) == (
        "was SampleSlicer(start=0, stop=100, step=1), and is SampleSlicer(start=0, stop=110, step=1)"
    )
    assert difference(None, description(stages[0])).startswith("was absent, and is SampleSlicer(")


def test_arguments_with_their_default_do_not_count() -> None:
    """A release may add arguments, and the states of the release before still load."""
    implicit = ShardList("a.tar").load_wds_shards().group_samples().wds_decode(ImageDecoder("rgb"))
    explicit = (
        ShardList("a.tar")
        .load_wds_shards(open_shards=1)
        .group_samples(on_repeated_key="warn")
        .wds_decode(ImageDecoder("rgb", crop=None), on_error="raise")
    )
    assert descriptions(explicit) == descriptions(implicit)
    assert "open_shards" not in "".join(descriptions(implicit))
    assert "open_shards=2" in "".join(descriptions(ShardList("a.tar").load_wds_shards(open_shards=2)))
