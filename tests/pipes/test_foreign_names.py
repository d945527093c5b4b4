"""Programs that users of PyTorch, webdataset, torchdata and Hugging Face guess: each works, or its error leads on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchdata.datapipes.iter
import webdataset
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.dataloader2 import DataLoader2

import wds_datapipes
from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, ShardWriter, collate_samples
from wds_datapipes.pipes.foreign_names import ARGUMENTS, NAMES

URLS = "train-{0..3}.tar"
PAGE = (Path(__file__).parents[2] / "docs/how-to/move-from-webdataset.md").read_text("utf-8")

#: What a program yields, or how its error leads on.
GUESSES = {
    # a PyTorch user
    "list(DataLoader(decoded.batch(4).collate(collate_fn=collate_samples), batch_size=None))": 8,
    "list(DataLoader(decoded.to_tuple('png', 'cls'), batch_size=4))": 8,
    "list(DataLoader(shuffled.to_tuple('png', 'cls'), batch_size=4, shuffle=True))": 8,
    "list(DataLoader2(shuffled, reading_service=ShardReadingService(2)))": 32,
    "list(DataLoader2(decoded, ShardReadingService(2)))": r"DataLoader2\(pipe, reading_service=ShardReadingService",
    "ShardReadingService(2, batch_size=4)": r"no argument 'batch_size': \.batch\(n\)",
    "ShardReadingService(2, shuffle=True)": r"no argument 'shuffle': \.shuffle\(\) after the list",
    "ShardReadingService(2, drop_last=True)": r"\.batch\(n, drop_last=True\)",
    "ShardReadingService(2, collate_fn=list)": r"\.collate\(collate_fn=f\)",
    "list(samples.map(dict).filter(bool).batch(4, drop_last=True))": 8,
    "ShardList(URLS, num_workers=4)": r"ShardReadingService\(num_workers=4\)",
    "len(shards)": 4,
    "len(samples)": r"SampleGrouper has no length.* IndexedSamples .*\.with_epoch\(n\)",
    "len(decoded)": r"SampleGrouper has no length.* IndexedSamples",
    "len(samples.batch(4))": r"SampleGrouper has no length.* IndexedSamples",
    "shards[0]": r"ShardList has no item 0.* next\(iter\(pipe\)\).* IndexedSamples\(urls\)\[n\]",
    "samples[0]": r"SampleGrouper has no item 0.* next\(iter\(pipe\)\).* IndexedSamples",
    "next(iter(samples)) and 1": 1,
    "IndexedSamples(URLS)[0] and 1": 1,
    "bool(samples) and 1": 1,
    "list(ShardList(['train-0.tar', 'train-1.tar']))": 2,
    # a webdataset user
    "list(shards.shuffle(100))": 4,
    "samples.shuffle(1000)": r"\.shuffle_samples\(1000\)",
    "list(samples.shuffle(buffer_size=1000))": 32,
    "samples.decode('rgb8')": r"For webdataset's decode, write \.wds_decode\(\)",
    "samples.batched(4)": r"write \.batch\(n\)\.collate\(collate_fn=collate_samples\)",
    "samples.select(bool)": r"write \.filter\(f\)",
    "samples.xdecode(png=len)": r"write \.wds_decode\(png=f\)",
    "list(samples.to_tuple('png cls'))": 32,
    "list(samples.map_dict(cls=int).map_samples(dict).rename(image='png').with_epoch(5))": 5,
    "shards.tarfile_to_samples()": r"write \.load_wds_shards\(\)\.group_samples\(\)",
    "samples.unbatched()": r"write \.unbatch_samples\(\)",
    "shards.split_by_node()": r"write \.sharding_filter\(\)",
    "members.group_by_keys()": r"write \.group_samples\(\)",
    "shards.load_wds_shards(handler=stop)": r"webdataset's handler= is on_error= ",
    "samples.map_samples(dict, handler=stop)": r"webdataset's handler= is on_error= ",
    "samples.to_tuple('png', handler=stop)": r"webdataset's handler= is on_error= ",
    "samples.wds_decode('pil', handler=stop)": r"webdataset's handler= is called on_error= here",
    "list(samples.map_samples(dict, on_error=stop))": 32,
    "members.group_samples(suffixes=['png'])": r"it is called fields=",
    "samples.to_tuple('png', missing_is_error=False)": r'missing="none"',
    "ShardList(URLS, shardshuffle=100)": r"\.shuffle\(\) after the list of shards",
    "ShardList(URLS, resampled=True)": r"\.resample_wds_shards\(\)",
    "ShardList(URLS, nodesplitter=webdataset.split_by_node)": r"\.sharding_filter\(\)",
    "ShardList(URLS, handler=stop)": r"on_error= of each stage .* \.load_wds_shards\(\)",
    "shards.cache_wds_shards('copies', cache_size=10)": r"max_bytes=",
    "samples.shuffle_samples(10, seed=1)": r"loader\.seed\(n\)",
    "wds_datapipes.WebDataset(URLS)": r"write ShardList\(urls\)\.shuffle\(\)\.sharding_filter\(\)\.load_wds_shards\(\)",
    "wds_datapipes.WebLoader(samples)": r"write DataLoader2\(pipe, reading_service=ShardReadingService",
    # a user of torchdata
    "list(torchdata.datapipes.iter.FileLister('.', '*.tar').open_files(mode='b').load_from_tar().webdataset())": 32,
    "list(shards.open_files(mode='b').load_from_tar().webdataset())": 32,
    "sum(1 for _ in samples.header(5))": 5,
    "list(torchdata.datapipes.iter.IterableWrapper(['train-0.tar']).load_wds_shards().group_samples())": 8,
    # a user of Hugging Face
    "wds_datapipes.load_dataset('webdataset', data_files=URLS)": r"For Hugging Face's load_dataset, write ShardList\(",
    "samples.take(5)": r"write \.slice_samples\(n\)",
    "samples.skip(5)": r"write \.slice_samples\(n, None\)",
    "samples.with_format('torch')": r'write \.wds_decode\("torchrgb8"\)',
    "samples.rename_column('png', 'image')": r"write \.rename\(new=old\)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of eight samples."""
    found = tmp_path_factory.mktemp("shards")
    with ShardWriter(str(found / "train-%d.tar"), maxcount=8) as writer:
        for n in range(32):
            writer.write({"__key__": f"{n:02}", "png": np.zeros((4, 4, 3), np.uint8), "cls": n})
    return found


# PyTorch's warnings: of more workers than processors, and that it adds a shuffle.
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:`shuffle=True` was set")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # torchdata leaves files to the garbage collection
@pytest.mark.usefixtures("closed_garbage")
@pytest.mark.parametrize(("program", "expected"), GUESSES.items(), ids=GUESSES)
def test_a_guess_works_or_leads_on(
    program: str, expected: int | str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    shards = ShardList(URLS)
    members = shards.load_wds_shards()
    samples = members.group_samples()
    split = ShardList(URLS).shuffle().sharding_filter()
    shuffled = split.load_wds_shards().group_samples().wds_decode("torchrgb")
    names: dict[str, Any] = {
        "shards": shards,
        "members": members,
        "samples": samples,
        "shuffled": shuffled,
        "URLS": URLS,
        "decoded": samples.wds_decode("torchrgb"),
        "stop": webdataset.ignore_and_stop,
        "webdataset": webdataset,
        "DataLoader": DataLoader,
        "DataLoader2": DataLoader2,
        "ShardReadingService": ShardReadingService,
        "ShardList": ShardList,
        "IndexedSamples": IndexedSamples,
        "collate_samples": collate_samples,
        "torch": torch,
        "torchdata": torchdata,
        "wds_datapipes": wds_datapipes,
    }
    if isinstance(expected, int):
        found = eval(program, names)
        assert (found if isinstance(found, int) else len(found)) == expected
    else:
        with pytest.raises((AttributeError, TypeError, UserWarning), match=expected):
            eval(program, names)


def test_more_than_forty_programs_are_guessed() -> None:
    assert len(GUESSES) > 40


# The tables


def stages_in(advice: str) -> list[str]:
    return re.findall(r"\.(\w+)\(", advice.replace("loader.seed(", ""))


@pytest.mark.parametrize(
    "advice", sorted({*NAMES["webdataset's"].values(), *NAMES["Hugging Face's"].values(), *ARGUMENTS.values()})
)
def test_advised_stages_exist(advice: str) -> None:
    assert [name for name in stages_in(advice) if name not in IterDataPipe.functions] == []


def test_no_name_of_another_package_is_one_of_this_package_or_of_torch() -> None:
    taken = {*IterDataPipe.functions, *wds_datapipes.__all__}
    assert [name for names in NAMES.values() for name in names if name in taken] == []


@pytest.mark.parametrize("name", NAMES["webdataset's"])
def test_the_page_on_moving_gives_the_same_advice(name: str) -> None:
    rows = [row for row in PAGE.splitlines() if re.search(rf"^\| [^|]*`[^`|]*\b{name}\b", row)]
    assert rows
    advised = [*stages_in(NAMES["webdataset's"][name]), *re.findall(r"\b[A-Z]\w+", NAMES["webdataset's"][name])]
    for each in advised:
        assert any(each in row for row in rows) or each == "shuffle"


def test_a_misspelt_public_name_is_compared_with_those_that_exist() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = wds_datapipes.ShardLists
    assert (raised.value.name, raised.value.obj) == ("ShardLists", wds_datapipes)


def test_a_stage_of_a_user_may_have_arguments_of_these_names() -> None:
    class Seeded(wds_datapipes.Stage[int]):
        def __init__(self, source: Any, *, seed: int, handler: Any) -> None:
            self.source, self.seed, self.handler = source, seed, handler

        def __iter__(self) -> Iterator[int]:
            return iter(())

    assert Seeded(ShardList("a.tar"), seed=1, handler=None).seed == 1


def test_a_lookup_that_must_fail_still_does() -> None:
    pipe = ShardList("a.tar").map(str)
    for name in ("decode", "nothing", "_nothing", "__nothing__"):
        assert not hasattr(pipe, name)
        assert not hasattr(wds_datapipes, name)
