"""Names of stages: names from webdataset, misspelt names, and registration."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset
from error_facts import naming
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.compat import FluidInterface

import wds_datapipes
from wds_datapipes import ImageDecoder, MockSamples, ShardList
from wds_datapipes.foreign_names import ARGUMENTS, HUGGING_FACE, TORCHDATA, WEBDATASET
from wds_datapipes.pipes.functional_form import register_stage
from wds_datapipes.pipes.inspection import name_of

PAGE = (Path(__file__).parents[2] / "docs/reference/names-of-webdataset.md").read_text("utf-8")
SAMPLES = MockSamples({"__key__": "a", "jpg": b""}, 1)
#: A stage of torch after one of ours.
BATCHES = SAMPLES.batch(2)
FLUID = {name for name in dir(FluidInterface) if not name.startswith("_")}


NAMES = {
    name: (package, advice)
    for package, names in (("torchdata", TORCHDATA), ("Hugging Face", HUGGING_FACE), ("webdataset", WEBDATASET))
    for name, advice in names.items()
}
MODULES = {name for name in dir(webdataset) if inspect.ismodule(getattr(webdataset, name))}


def test_every_public_name_of_webdataset_has_an_advice() -> None:
    public = {name for name in dir(webdataset) if not name.startswith("_")} - MODULES
    assert len(public) > 60
    assert sorted({*public, *FLUID} - set(WEBDATASET) - set(wds_datapipes.__all__)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_package_leads_to_what_exists_here(name: str) -> None:
    package, advice = NAMES[name]
    for owner in [wds_datapipes, *(() if name in IterDataPipe.functions else (SAMPLES, BATCHES))]:
        text = f". For {package}'s {name}, write {advice}"
        with pytest.raises(AttributeError, match=re.escape(text)) as raised:
            getattr(owner, name)
        assert (raised.value.name, raised.value.obj) == (name, owner)
    with pytest.raises(ImportError, match=rf"cannot import name '{name}' from 'wds_datapipes'{re.escape(text)}"):
        exec(f"from wds_datapipes import {name}")
    assert name not in wds_datapipes.__all__
    stages = {*re.findall(r"\.(\w+)\(", advice)} - {"open", "set_epoch"}
    assert stages <= {*IterDataPipe.functions}
    if package == "webdataset" and name not in MODULES:
        rows = [row for row in PAGE.splitlines() if re.search(rf"^\| [^|]*`[^`|]*\b{name}\b", row)]
        for each in {*stages, *re.findall(r"\b[A-Z]\w+", advice)} - {"shuffle", "cycle", "DatasetSpec"}:
            assert any(each in row for row in rows), each


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_package_leads_to_what_exists_here(name: str) -> None:
    advice = f"has no argument {name!r}. For {name}= of other packages, write {ARGUMENTS[name]}. It takes urls"
    with pytest.raises(TypeError, match=re.escape(f"ShardList() {advice}")):
        ShardList("a.tar", **{name: 1})  # type: ignore[arg-type]
    assert {*re.findall(r"\.(\w+)\(", ARGUMENTS[name])} - {"seed"} <= {*IterDataPipe.functions}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("samples.shuffle(1000)", r"\.shuffle\(\) takes no positional .* write \.shuffle_samples\(1000\)"),
        ("samples.batch(2).shuffle(10)", r"\.shuffle\(\) takes no positional .* write \.shuffle_samples\(10\)"),
        ("samples.shuffle(bufsize=10)", r"^\.shuffle\(\) has no argument 'bufsize'. Did you mean 'buffer_size'\?"),
        ("samples.shuffle(buffer_size=2.5)", "^buffer_size must be an integer, not 2.5"),
        ("samples.shuffle_samples(initial=1, sed=2)", r"^\.shuffle_samples\(\) has no argument 'sed'\."),
        ("samples.shuffle_samples(1, 2)", r"^\.shuffle_samples\(\) got wrong arguments: too many positional"),
        ("samples.load_wds_shards(handler=1)", r"^\.load_wds_shards\(\) has no .* write on_error=\. It takes select_"),
        ("samples.to_tuple('a', missin=1)", r"^\.to_tuple\(\) has no argument 'missin'\. Did you mean 'missing'\?"),
        ("samples.write_wds_shards('%d.tar', foo=1)", r"^\.write_wds_shards\(\) has no argument 'foo'\. It takes patt"),
        (
            "wds_datapipes.TarWriter('a.tar', level=9)",
            r"^TarWriter\(\) has no argument 'level'\. It takes target, options",
        ),
        (
            "wds_datapipes.ShardWriter('%d', count=9)",
            r"^ShardWriter\(\) has no argument 'count'\. Did you mean 'maxcount'\?",
        ),
        ("wds_datapipes.create_shards([], '%d', a=1)", r"^create_shards\(\) has no argument 'a'.*options, job"),
        ("wds_datapipes.IndexedSamples('a', cache_dir='b')", r": pass access=AccessOptions\(cache_dir='b'\)\."),
        (
            "wds_datapipes.IndexedSamples('a', end_marker='final')",
            r": pass access=AccessOptions\(indexing=IndexOptions\(end_marker='final'\)\)\.",
        ),
        ("samples.load_wds_shards(member_bytes=1)", r": pass limits=ReadLimits\(member_bytes=1\)\."),
        ("samples.load_wds_shards(source=1)", r"has no argument 'source'\. It takes"),
        ("wds_datapipes.StatefulShards(samples, shuffle=True)", r"^StatefulShards\(\) has no argument 'shuffle'"),
        ("wds_datapipes.ShardReadingService(workers=2)", r"^ShardReadingService\(\) has no .* mean 'num_workers'\?"),
        ("wds_datapipes.ErrorBudget(max_error=2)", r"^ErrorBudget\(\) has no .*Did you mean 'max_errors'\?"),
    ],
)
def test_a_wrong_call_is_named_as_it_is_written(call: str, message: str, folder: Path) -> None:
    ignored: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", ignored.append)
        with pytest.raises(TypeError, match=message):
            eval(call, {"samples": SAMPLES, "wds_datapipes": wds_datapipes})
        gc.collect()
    assert ignored == []
    assert list(folder.iterdir()) == []


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
    with pytest.raises(ValueError, match=naming("'rbg8'", "'rgb8'")):
        ImageDecoder("rbg8")


@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("fork", {"num_instances": 2}, "Forker"),
        ("demux", {"num_instances": 2, "classifier_fn": len}, "Demultiplexer"),
        ("unzip", {"sequence_length": 2}, "UnZipper"),
        ("random_split", {"total_length": 2, "weights": {"a": 1, "b": 1}, "seed": 0}, "RandomSplitter"),
    ],
)
def test_each_of_several_outputs_has_the_name_of_what_created_it(
    method: str, arguments: dict[str, Any], name: str
) -> None:
    outputs = getattr(BATCHES, method)(**arguments)
    assert [name_of(output) for output in outputs] == [name, name]


class Noted(IterDataPipe[Any]):
    """Yields its keyword arguments."""

    def __init__(self, source: IterDataPipe[Any], /, *words: str, **names: Any) -> None:
        self.source = source
        self.noted = (words, names)

    def __iter__(self) -> Iterator[Any]:
        yield self.noted


def test_every_keyword_reaches_the_class() -> None:
    register_stage("noted_keywords", __name__, "Noted")
    names = {"cls": 1, "source": 2, "source_dp": 3, "self": 4, "stage": 5}
    source: IterDataPipe[Any] = IterableWrapper([])
    stage = source.noted_keywords("word", **names)
    assert isinstance(stage, Noted)
    assert stage.source is source
    assert list(stage) == [(("word",), names)]
    assert source.noted_keywords.__doc__ == "Yields its keyword arguments."


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=naming("Noted", "'batch'")):
        register_stage("batch", __name__, "Noted")
