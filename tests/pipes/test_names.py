"""Names of webdataset, and names that nearly exist: the errors say which one is meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.utils.data import IterDataPipe

import wds_datapipes
from wds_datapipes import ImageDecoder, MockSamples, ShardList
from wds_datapipes.pipes.foreign_stages import NAMES

PAGE = (Path(__file__).parents[2] / "docs/how-to/move-from-webdataset.md").read_text("utf-8")
SAMPLES = MockSamples({"__key__": "a", "jpg": b""}, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_webdataset_leads_to_stages_that_exist_as_on_the_page(name: str) -> None:
    owner = wds_datapipes if name[0].isupper() else SAMPLES
    with pytest.raises(AttributeError, match=re.escape(f". For webdataset's {name}, write {NAMES[name]}")) as raised:
        getattr(owner, name)
    assert (raised.value.name, raised.value.obj) == (name, owner)
    assert name not in {*IterDataPipe.functions, *wds_datapipes.__all__}
    stages = re.findall(r"\.(\w+)\(", NAMES[name])
    assert {*stages} <= {*IterDataPipe.functions}
    rows = [row for row in PAGE.splitlines() if re.search(rf"^\| [^|]*`[^`|]*\b{name}\b", row)]
    for each in {*stages, *re.findall(r"\b[A-Z]\w+", NAMES[name])} - {"shuffle"}:
        assert any(each in row for row in rows)


def test_python_compares_a_misspelt_name_with_those_that_exist() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = wds_datapipes.ShardLists
    assert (raised.value.name, raised.value.obj) == ("ShardLists", wds_datapipes)
    pipe = ShardList("a.tar")
    with pytest.raises(AttributeError) as raised:
        pipe.shufle()
    assert (raised.value.name, raised.value.obj) == ("shufle", pipe)
    assert "shuffle" in dir(pipe)


def test_an_argument_of_webdataset_is_refused() -> None:
    for stage, *arguments in (
        (SAMPLES.map_samples, len),
        (SAMPLES.to_tuple, "a"),
        (SAMPLES.rename,),
        (SAMPLES.wds_decode,),
    ):
        with pytest.raises(TypeError, match="handler"):
            stage(*arguments, handler=len)


def test_an_unknown_decoder_is_compared_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no decoder 'torchrbg8'\. Did you mean 'torchrgb8'\?"):
        SAMPLES.wds_decode("torchrbg8")
    with pytest.raises(ValueError, match=r"'rbg8' is not an image spec; did you mean 'rgb8'\?"):
        ImageDecoder("rbg8")
