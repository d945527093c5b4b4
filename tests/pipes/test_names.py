"""Names of stages: names from webdataset, misspelt names, and registration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_datapipes
from wds_datapipes import ImageDecoder, MockSamples, ShardList
from wds_datapipes.pipes.foreign_stages import NAMES
from wds_datapipes.pipes.stage import register_stage

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


def test_an_unknown_decoder_is_compared_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no decoder 'torchrbg8'\. Did you mean 'torchrgb8'\?"):
        SAMPLES.wds_decode("torchrbg8")
    with pytest.raises(ValueError, match=r"'rbg8' is not an image spec; did you mean 'rgb8'\?"):
        ImageDecoder("rbg8")


class Noted(IterDataPipe[Any]):
    """Yields its keyword arguments."""

    def __init__(self, source: IterDataPipe[Any], /, *words: str, **names: Any) -> None:
        self.source = source
        self.noted = (words, names)

    def __iter__(self) -> Iterator[Any]:
        yield self.noted


def test_every_keyword_reaches_the_class() -> None:
    assert register_stage("noted_keywords")(Noted) is Noted
    names = {"cls": 1, "source": 2, "source_dp": 3, "self": 4, "stage": 5}
    source: IterDataPipe[Any] = IterableWrapper([])
    stage = source.noted_keywords("word", **names)
    assert isinstance(stage, Noted)
    assert stage.source is source
    assert list(stage) == [(("word",), names)]
    assert source.noted_keywords.__doc__ == "Yields its keyword arguments."


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="cannot register Noted: another stage has the name 'batch'"):
        register_stage("batch")(Noted)
