"""Decoders that are registered as stages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import register_decoder
from wds_datapipes.codecs.extensions import registered_decoders
from wds_datapipes.errors import DecodeError


@register_decoder("points", "pts path.pts2")
def points(data: bytes, scale: int = 1) -> list[int]:
    return [scale * int(number) for number in data.split(b",")]


def source(*samples: dict[str, Any]) -> Any:
    return IterableWrapper(samples)


def test_a_registered_stage_changes_only_its_own_fields() -> None:
    sample = {"__key__": "a", "json.gz": b"not gzip", "done": 5, "left.PTS": b"7", "pts2": b"1", "path.pts2": b"2"}
    assert list(source(sample).points()) == [{**sample, "left.PTS": [7], "path.pts2": [2]}]
    assert list(source(sample).points(only="path.pts2", scale=3)) == [{**sample, "path.pts2": [6]}]
    assert list(source({"pts": b"1,2", "cls": b"7"}).wds_decode("points")) == [{"pts": [1, 2], "cls": 7}]


def test_a_registered_stage_has_a_policy_and_can_be_pickled() -> None:
    samples: list[dict[str, Any]] = [{"pts": b"1"}, {"pts": b"x"}, {"pts": [3]}]
    stage = source(*samples).points(on_error="skip", partial=True, scale=2)
    assert list(pickle.loads(pickle.dumps(stage))) == [{"pts": [2]}, {"pts": [3]}]
    with pytest.raises(DecodeError, match=r"pts.*is of type list"):
        list(source(samples[2]).points())
    with pytest.raises(ValueError, match="on_error must be"):
        source().points(on_error="ignore")


def test_registering_the_same_code_again_replaces_a_decoder() -> None:
    cell = "@register_decoder('counted', 'n')\ndef counted(data):\n    return len(data) + {}"
    names: dict[str, Any] = {"register_decoder": register_decoder, "__name__": "notebook"}
    try:
        exec(cell.format(0), names)
        before = source({"n": b"1"}).counted()
        exec(cell.format(100), names)
        assert list(before) == [{"n": 1}]
        assert list(source({"n": b"1"}).counted()) == [{"n": 101}]
        assert list(source({"n": b"1"}).wds_decode("counted")) == [{"n": 101}]
    finally:
        del IterDataPipe.functions["counted"], registered_decoders["counted"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[(name, f"the name '{name}' is taken") for name in ("points", "batch", "wds_decode", "reset", "torchrgb")],
        *[(name, "valid method name") for name in ("two words", "class", "_hidden")],
    ],
)
def test_taken_or_invalid_names_are_refused(name: str, text: str) -> None:
    before = dict(IterDataPipe.functions)
    with pytest.raises(ValueError, match=text):
        register_decoder(name, "x")(sum)
    assert before == IterDataPipe.functions
