"""``wds_decode`` as a stage, registered decoders, and decoders that are classes: in this process and in workers."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe, functional_datapipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

from wds_datapipes.codecs.extensions import handle_extension
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.errors import DecodeError, UnsafeInputError
from wds_datapipes.pipes.samples.decoding import RegisteredDecoder, SampleDecoder, register_decoder


@register_decoder("points", "pts path.pts2")
def points(data: bytes) -> list[int]:
    """Comma-separated numbers."""
    return [int(number) for number in data.split(b",")]


@functional_datapipe("scaled_points")
class ScaledPoints(SampleDecoder):
    extensions = "pts"

    def __init__(self, source: IterDataPipe[Any], /, factor: int, **options: Any) -> None:
        super().__init__(source, **options)
        self.factor = factor
        self.seen = 0

    def decode(self, data: bytes) -> Any:
        self.seen += 1
        return [self.factor * number for number in points(data)]


def source(*samples: dict[str, Any]) -> IterDataPipe[Any]:
    return IterableWrapper(list(samples) or [{"__key__": "a", "pts": b"1,2", "cls": b"3"}])


def stages() -> dict[str, IterDataPipe[Any]]:
    return {
        "wds_decode": source().wds_decode("points", ImageDecoder("rgb8"), handle_extension("x", len), cls=float),
        "lambda": source().wds_decode(lambda field, data: len(data) if field == "pts" else None, cls=lambda data: 3),
        "registered": source().points(),
        "subclass": source().scaled_points(10),
    }


WANTED = {
    "wds_decode": [{"__key__": "a", "pts": [1, 2], "cls": 3.0}],
    "lambda": [{"__key__": "a", "pts": 3, "cls": 3}],
    "registered": [{"__key__": "a", "pts": [1, 2], "cls": b"3"}],
    "subclass": [{"__key__": "a", "pts": [10, 20], "cls": b"3"}],
}


@pytest.mark.parametrize("name", WANTED)
def test_a_stage_decodes_twice_and_after_stopping_early(name: str) -> None:
    stage = stages()[name]
    assert list(stage) == WANTED[name]
    next(iter(stage))
    assert list(stage) == WANTED[name]
    assert isinstance(stage, SampleDecoder)
    assert inspect.isgeneratorfunction(inspect.unwrap(type(stage).__iter__))


@pytest.mark.parametrize("name", WANTED)
def test_torch_finds_the_source(name: str) -> None:
    stage = stages()[name]
    [(found, children)] = traverse_dps(stage).values()
    assert found is stage
    [(parent, _)] = children.values()
    assert isinstance(parent, IterableWrapper)


@pytest.mark.parametrize("name", [name for name in WANTED if name != "lambda"])
def test_a_stage_pickles_and_copies_before_while_and_after_reading(name: str) -> None:
    stage = stages()[name]
    reading = iter(stage)
    for _ in range(2):
        assert list(pickle.loads(pickle.dumps(stage))) == WANTED[name]
        assert list(copy.deepcopy(stage)) == WANTED[name]
        next(reading, None)


@pytest.mark.parametrize("name", WANTED)
def test_a_forked_worker_decodes(name: str) -> None:
    loader = DataLoader(stages()[name], batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == WANTED[name]


def test_errors_cross_a_worker_with_type_and_text() -> None:
    stage = source({"__key__": "a", "__url__": "s.tar", "pts": b"one"}).points()
    loader = DataLoader(stage, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(DecodeError, match=r"'pts' of sample 'a' in shard 's\.tar'.*points \(for pts path\.pts2\)"):
        list(loader)


SCRIPT = """
import pickle
from torch.utils.data import DataLoader, functional_datapipe
from torch.utils.data.datapipes.iter import IterableWrapper
from wds_datapipes.codecs.images import ImageDecoder
from wds_datapipes.pipes.samples.decoding import SampleDecoder, register_decoder

@register_decoder("doubled", "num")
def doubled(data):
    return 2 * int(data)

@functional_datapipe("raised")
class Raised(SampleDecoder):
    extensions = ("base",)
    def __init__(self, source, power):
        super().__init__(source)
        self.power = power
    def decode(self, data):
        return int(data) ** self.power

if __name__ == "__main__":
    source = IterableWrapper([{"num": b"3", "base": b"4", "left.num": b"5", "cls": b"6"}])
    stage = source.doubled(only="num").raised(3).wds_decode("doubled", ImageDecoder("rgb"), only="left.num cls")
    print(*DataLoader(stage, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
"""


def test_a_spawned_worker_decodes_by_functions_and_classes_of_the_main_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert found.stdout == "{'num': 6, 'base': 64, 'left.num': 10, 'cls': 6}\n", found.stderr


def test_the_functional_form_is_the_class_form() -> None:
    wanted = list(source().wds_decode("points", only="pts"))
    assert list(SampleDecoder(source(), "points", only="pts")) == wanted
    assert list(ScaledPoints(source(), 2)) == list(source().scaled_points(2))
    assert isinstance(source().points(), RegisteredDecoder)
    assert source().points.__doc__ == points.__doc__


def test_the_decorator_returns_the_function() -> None:
    assert points(b"4,5") == [4, 5]


def test_a_registered_stage_changes_only_its_own_fields() -> None:
    sample = {"__key__": "a", "json.gz": b"not gzip", "done": 5, "left.PTS": b"7", "pts2": b"1", "path.pts2": b"2"}
    assert list(source(sample).points()) == [{**sample, "left.PTS": [7], "path.pts2": [2]}]
    assert list(source(sample).points(only="path.pts2")) == [{**sample, "path.pts2": [2]}]


@pytest.mark.parametrize("extension", ["cls", "source", "source_dp", "self", "enable_df_api_tracing"])
def test_an_extension_may_have_the_name_of_a_parameter(extension: str) -> None:
    decoders = {extension: lambda data: "decoded"}
    assert list(source({extension: b"1"}).wds_decode(**decoders)) == [{extension: "decoded"}]


def test_the_policy_of_a_registered_stage() -> None:
    samples: list[dict[str, Any]] = [{"pts": b"1"}, {"pts": b"x"}, {"pts": [3]}]
    assert list(source(*samples).points(on_error="skip")) == [{"pts": [1]}]
    assert list(source(*samples).points(on_error="skip", partial=True)) == [{"pts": [1]}, {"pts": [3]}]
    with pytest.raises(DecodeError, match=r"pts.*is of type list"):
        list(source(samples[2]).points())
    with pytest.raises(ValueError, match="on_error must be"):
        source().points(on_error="ignore")


def test_a_subclass_keeps_its_state() -> None:
    stage = source({"pts": b"1"}, {"pts": b"2"}).scaled_points(3, on_error="skip")
    assert list(stage) == [{"pts": [3]}, {"pts": [6]}]
    assert stage.seen == 2


def test_an_invalid_subclass_is_refused_when_it_is_defined() -> None:
    with pytest.raises(TypeError, match=r"Forgetful sets extensions, so it must define decode\(self, data\)"):
        type("Forgetful", (SampleDecoder,), {"extensions": "x"})
    with pytest.raises(ValueError, match="extensions must be"):
        type("Empty", (SampleDecoder,), {"extensions": [""], "decode": lambda self, data: None})
    with pytest.raises(TypeError, match="ScaledPoints has its own decoder, and accepts no others"):
        source().scaled_points(3, json=int)


@pytest.fixture
def forgets_names() -> Iterator[None]:
    from wds_datapipes.codecs import extensions

    yield
    del IterDataPipe.functions["counted"]
    del extensions._registered["counted"]


@pytest.mark.usefixtures("forgets_names")
def test_registering_the_same_code_again_replaces_a_decoder() -> None:
    cell = "@register_decoder('counted', 'n')\ndef counted(data):\n    return len(data) + {}"
    names: dict[str, Any] = {"register_decoder": register_decoder, "__name__": "notebook"}
    exec(cell.format(0), names)
    before = source({"n": b"1"}).counted()
    exec(cell.format(100), names)
    assert list(before) == [{"n": 1}]
    assert list(source({"n": b"1"}).counted()) == [{"n": 101}]
    assert list(source({"n": b"1"}).wds_decode("counted")) == [{"n": 101}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("points", "'points' is already registered for .*points: choose another name for builtins.sum"),
        ("batch", "the stage name 'batch' is taken"),
        ("wds_decode", "the stage name 'wds_decode' is taken"),
        ("reset", "the stage name 'reset' is taken"),
        ("torchrgb", "'torchrgb' is built in"),
        ("two words", "valid method name"),
        ("class", "valid method name"),
        ("_hidden", "valid method name"),
    ],
)
def test_taken_or_invalid_names_are_refused(name: str, text: str) -> None:
    before = dict(IterDataPipe.functions)
    with pytest.raises(ValueError, match=text):
        register_decoder(name, "x")(sum)
    assert before == IterDataPipe.functions


def test_the_stage_checks_its_arguments_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="there is no decoder 'rgb9'"):
        source().wds_decode("rgb9")
    with pytest.raises(ValueError, match="on_error must be"):
        source().wds_decode(on_error="ignore")


def test_the_stage_passes_every_option_on() -> None:
    samples = [{"cls": b"1", "pkl": b"I1\n.", "txt": 3}, {"cls": b"x", "pkl": b"I1\n.", "txt": 3}]
    stage = source(*samples).wds_decode(only="cls pkl txt", partial=True, allow_pickle=True, on_error="skip")
    assert list(stage) == [{"cls": 1, "pkl": 1, "txt": 3}]
    with pytest.raises(UnsafeInputError, match="allow_pickle=True"):
        list(source({"pkl": b"I1\n."}).wds_decode(on_error="skip"))
