"""The functional names of stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.pipes.stage import register_stage


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
