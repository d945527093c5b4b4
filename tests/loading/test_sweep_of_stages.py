"""Every stage that is registered by torch, torchdata or this package goes on exactly, or is refused by its name."""

from __future__ import annotations

import inspect
import io
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from torch.utils.data import IterDataPipe, MapDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService, Stage
from wds_datapipes.codecs.extensions import ExtensionDecoder
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.state.pipeline_state import check_state
from wds_datapipes.testing import build_shard

Pipe = Any
Build = Callable[[Pipe], Pipe]

SIZES = (4, 0, 6, 1, 5)


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        for shard, size in enumerate(SIZES):
            samples = [{"__key__": f"{shard}-{n}", "cls": str(n), "txt": "x" * (5 * n)} for n in range(size)]
            build_shard(f"{shard}.tar", samples)
            build_shard(f"more-{shard}.tar", [{"__key__": f"{shard}-{n}", "json": str(n)} for n in range(size)])
        yield


def as_it_is(item: Any) -> Any:
    return item


def twice(item: Any) -> list[Any]:
    return [item, item]


def is_even(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 2 == 0


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def shard_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])[0]


def parity(sample: dict[str, Any]) -> int:
    return int(sample["cls"]) % 2


def length(sample: dict[str, Any]) -> int:
    return len(sample["txt"]) + 1


def is_member_wanted(member: Any) -> bool:
    return not member.name.endswith("3.cls")


def draw(sample: dict[str, Any], rng: Random) -> dict[str, Any]:
    return {**sample, "drawn": rng.random()}


def number_of(url: str) -> int:
    return int(int(url[0]) == 3)


def second(pair: Any) -> Any:
    return pair[1]


def more_of(url: str) -> str:
    return f"more-{url}"


class EverySecond(Stage[Any]):
    """A stage of a user, which counts, and says that it keeps nothing."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(iter(self.source), 0, None, 2)


def every_second(items: Any) -> Any:
    return itertools.islice(items, 0, None, 2)


def other_samples(_: Pipe = None) -> Pipe:
    return ShardList("{0..4}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def only(build: Build, index: int, pipe: Pipe) -> Pipe:
    """One of the pipelines that a stage makes of one."""
    return build(pipe)[index]


def as_files(pipe: Pipe) -> Pipe:
    return pipe.map(as_file)


def as_file(sample: dict[str, Any]) -> tuple[str, io.BytesIO]:
    return sample["__key__"], io.BytesIO(sample["txt"] + b"a\nb")


def as_lines(sample: dict[str, Any]) -> tuple[str, str]:
    return sample["__key__"], "a line" if parity(sample) else ""


#: What to put behind samples, for each functional name that can stand there. `Refused` or exact is found out.
BEHIND: dict[str, Build] = {
    # torch
    "batch": lambda pipe: pipe.batch(3),
    "collate": lambda pipe: pipe.to_tuple("__key__", "cls").batch(3).collate(),
    "concat": lambda pipe: pipe.concat(other_samples()),
    "demux": partial(only, lambda pipe: pipe.demux(2, parity, buffer_size=-1), 0),
    "filter": lambda pipe: pipe.filter(is_even),
    "fork": partial(only, lambda pipe: pipe.fork(2, buffer_size=-1), 1),
    "groupby": lambda pipe: pipe.groupby(shard_of, buffer_size=100),
    "map": lambda pipe: pipe.map(as_it_is),
    "mux": lambda pipe: pipe.mux(other_samples()),
    "sharding_filter": lambda _: ShardList("{0..4}.tar").load_wds_shards().group_samples().sharding_filter(),
    "shuffle": lambda pipe: pipe.shuffle(buffer_size=3),
    "unbatch": lambda pipe: pipe.batch(3).unbatch(),
    "zip": lambda pipe: pipe.zip(other_samples()),
    # torchdata
    "add_index": lambda pipe: pipe.add_index(),
    "cycle": lambda pipe: pipe.cycle(2),
    "drop": lambda pipe: pipe.to_tuple("__key__", "cls").drop(1),
    "enumerate": lambda pipe: pipe.enumerate(),
    "flatmap": lambda pipe: pipe.flatmap(twice),
    "flatten": lambda pipe: pipe.to_tuple("__key__", "cls").flatten(1),
    "header": lambda pipe: pipe.header(7),
    "in_batch_shuffle": lambda pipe: pipe.batch(4).in_batch_shuffle(),
    "in_memory_cache": lambda pipe: pipe.in_memory_cache(),
    "lines_to_paragraphs": lambda pipe: pipe.map(as_lines).lines_to_paragraphs(),
    "map_batches": lambda pipe: pipe.map_batches(as_it_is, 3),
    "max_token_bucketize": lambda pipe: pipe.max_token_bucketize(30, len_fn=length, buffer_size=6),
    "memory_cell": lambda pipe: pipe.memory_cell(),
    "mux_longest": lambda pipe: pipe.mux_longest(other_samples()),
    "prefetch": lambda pipe: pipe.prefetch(3),
    "random_split": partial(
        only, lambda pipe: pipe.random_split(weights={"a": 0.5, "b": 0.5}, seed=1, total_length=16), 0
    ),
    "readlines": lambda pipe: as_files(pipe).readlines(),
    "repeat": lambda pipe: pipe.repeat(2),
    "round_robin_demux": partial(only, lambda pipe: pipe.round_robin_demux(2, buffer_size=-1), 1),
    "rows2columnar": lambda pipe: pipe.batch(2).rows2columnar(),
    "set_length": lambda pipe: pipe.set_length(16),
    "shuffled_flatmap": lambda pipe: pipe.shuffled_flatmap(twice, buffer_size=4),
    "slice": lambda pipe: pipe.to_tuple("__key__", "cls").slice(0, 1),
    "threadpool_map": lambda pipe: pipe.threadpool_map(as_it_is, scheduled_tasks=4, max_workers=2),
    "unzip": partial(only, lambda pipe: pipe.to_tuple("__key__", "cls").unzip(2, buffer_size=-1), 0),
    "zip_longest": lambda pipe: pipe.zip_longest(other_samples()),
    "zip_with_iter": lambda pipe: pipe.zip_with_iter(other_samples(), key_fn=key_of, buffer_size=100),
    # this package
    "add_columns": lambda pipe: pipe.add_columns(more_of),
    "associate": lambda pipe: pipe.associate({f"{s}-{n}": {"n": n} for s in range(5) for n in range(9)}),
    "cache_samples": lambda pipe: pipe.cache_samples(),
    "compose": lambda pipe: pipe.compose(every_second),
    "extract_keys": lambda pipe: pipe.extract_keys("cls"),
    "log_samples": lambda pipe: pipe.log_samples(first=0),
    "map_dict": lambda pipe: pipe.map_dict(cls=as_it_is),
    "map_samples": lambda pipe: pipe.map_samples(as_it_is),
    "map_samples_with_rng": lambda pipe: pipe.map_samples_with_rng(draw),
    "map_tuple": lambda pipe: pipe.to_tuple("__key__", "cls").map_tuple(as_it_is, None),
    "mix_samples": lambda pipe: pipe.mix_samples(other_samples(), stop="all"),
    "non_empty": lambda pipe: pipe.non_empty(),
    "rename": lambda pipe: pipe.rename(label="cls"),
    "rename_keys": lambda pipe: pipe.rename_keys(label="cls"),
    "rsample": lambda pipe: pipe.rsample(0.7),
    "select_fields": lambda pipe: pipe.select_fields("cls"),
    "shuffle_samples": lambda pipe: pipe.shuffle_samples(5),
    "slice_samples": lambda pipe: pipe.slice_samples(1, None, 2),
    "to_tuple": lambda pipe: pipe.to_tuple("__key__", "cls"),
    "unbatch_samples": lambda pipe: pipe.to_tuple("__key__", "cls").batch(2).collate().unbatch_samples(),
    "wds_decode": lambda pipe: pipe.wds_decode(),
    "wds_encode": lambda pipe: pipe.wds_decode().wds_encode(),
    "with_epoch": lambda pipe: pipe.with_epoch(9),
    "with_length": lambda pipe: pipe.with_length(16),
}

#: What goes before .load_wds_shards(), or is built of it. These are replayed from the same seeds.
BEFORE: dict[str, Build] = {
    "batch": lambda urls: urls.batch(2).unbatch(),
    "bucketbatch": lambda urls: urls.bucketbatch(2, batch_num=2, bucket_num=1).unbatch(),
    "concat": lambda urls: urls.concat(ShardList("more-{0..2}.tar")),
    "cache_samples": lambda urls: urls.cache_samples(),
    "cache_wds_shards": lambda urls: urls.cache_wds_shards("copies"),
    "compose": lambda urls: urls.compose(every_second),
    "cycle": lambda urls: urls.cycle(2),
    "enumerate": lambda urls: urls.enumerate().map(second),
    "demux": partial(only, lambda urls: urls.demux(2, number_of, buffer_size=-1), 0),
    "filter": lambda urls: urls.filter(bool),
    "flatmap": lambda urls: urls.flatmap(twice),
    "fork": partial(only, lambda urls: urls.fork(2, buffer_size=-1), 0),
    "groupby": lambda urls: urls.groupby(len).unbatch(),
    "header": lambda urls: urls.header(3),
    "in_batch_shuffle": lambda urls: urls.batch(4).in_batch_shuffle().unbatch(),
    "in_memory_cache": lambda urls: urls.in_memory_cache(),
    "log_samples": lambda urls: urls.log_samples(first=0),
    "map": lambda urls: urls.map(as_it_is),
    "map_batches": lambda urls: urls.map_batches(as_it_is, 2),
    "map_samples": lambda urls: urls.map_samples(as_it_is),
    "max_token_bucketize": lambda urls: urls.max_token_bucketize(12, len_fn=len, buffer_size=4).unbatch(),
    "memory_cell": lambda urls: urls.memory_cell(),
    "mix_samples": lambda urls: urls.mix_samples(ShardList("more-{0..2}.tar"), stop="all"),
    "mux": lambda urls: urls.mux(ShardList("more-{0..2}.tar")),
    "mux_longest": lambda urls: urls.mux_longest(ShardList("more-{0..2}.tar")),
    "non_empty": lambda urls: urls.non_empty(),
    "prefetch": lambda urls: urls.prefetch(3),
    "random_split": partial(
        only, lambda urls: urls.random_split(weights={"a": 0.7, "b": 0.3}, seed=1, total_length=5), 0
    ),
    "repeat": lambda urls: urls.repeat(2),
    "resample_wds_shards": lambda urls: ShardList("{0..4}.tar").resample_wds_shards(9),
    "round_robin_demux": partial(only, lambda urls: urls.round_robin_demux(2, buffer_size=-1), 0),
    "rsample": lambda urls: urls.rsample(0.7),
    "set_length": lambda urls: urls.set_length(5),
    "shard_expand": lambda urls: urls.shard_expand(),
    "shuffle": lambda urls: urls.shuffle(buffer_size=2),
    "shuffle_samples": lambda urls: urls.shuffle_samples(3),
    "shuffled_flatmap": lambda urls: urls.shuffled_flatmap(twice, buffer_size=3),
    "slice_samples": lambda urls: urls.slice_samples(1, None),
    "threadpool_map": lambda urls: urls.threadpool_map(as_it_is, scheduled_tasks=4, max_workers=2),
    "with_epoch": lambda urls: urls.with_epoch(3),
    "with_length": lambda urls: urls.with_length(5),
}
BETWEEN: dict[str, Build] = {
    "batch": lambda members: members.batch(2).unbatch(),
    "filter": lambda members: members.filter(is_member_wanted),
    "map": lambda members: members.map(as_it_is),
    "prefetch": lambda members: members.prefetch(2),
    "shuffle": lambda members: members.shuffle(buffer_size=1),
    "slice_samples": lambda members: members.slice_samples(0, 20),
}

#: These have to be exact: the issue names them, or there is nothing else to use.
EXACT = {
    *("batch", "collate", "filter", "map"),
    *("extract_keys", "log_samples", "map_dict", "map_samples", "map_samples_with_rng", "map_tuple", "non_empty"),
    *("associate", "rename", "rename_keys", "rsample", "select_fields", "shuffle_samples", "slice_samples", "to_tuple"),
    *("mix_samples", "wds_decode", "wds_encode", "with_epoch", "with_length"),
    *("add_columns", "cache_samples", "unbatch_samples"),
}
#: Names that stand elsewhere in a pipeline.
ELSEWHERE = {"cache_wds_shards", "group_samples", "load_wds_shards", "resample_wds_shards"}
#: Names of what ends a pipeline, and has nothing to train on behind it. These are refused a state by their classes.
WRITING = {"write_wds_shards"}


def behind(build: Build) -> Pipe:
    return build(other_samples())


def before(build: Build) -> Pipe:
    return build(ShardList("{0..4}.tar").shuffle().sharding_filter()).load_wds_shards().group_samples()


def between(build: Build) -> Pipe:
    return build(ShardList("{0..4}.tar").shuffle().sharding_filter().load_wds_shards()).group_samples()


def comparable(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.tolist()
    if isinstance(item, dict):
        return {key: comparable(value) for key, value in item.items()}
    return [comparable(each) for each in item] if isinstance(item, list | tuple) else item


def loader_of(pipe: Pipe) -> Any:
    loader: DataLoader2[Any] = DataLoader2(pipe, reading_service=ShardReadingService())
    loader.seed(11)
    return loader


def refusal_or_exact(pipe: Pipe) -> str:
    """Return why a pipeline is refused; or check all its cuts in the second epoch, with the third, and return ""."""
    with loader_of(pipe) as loader:
        whole = [[comparable(item) for item in loader] for _ in range(3)]
    assert len(whole[1]) > 1
    with loader_of(pipe) as loader:
        for _ in loader:
            pass
        items = iter(loader)
        for cut in range(len(whole[1]) + 1):
            try:
                state = loader.state_dict()
            except StateError as error:
                assert cut <= 1, "a state is refused once there is a first item, or never"
                return str(error)
            with loader_of(pipe) as resumed:
                resumed.load_state_dict(state)
                found = [[comparable(item) for item in resumed] for _ in range(2)]
            assert found == [whole[1][cut:], whole[2]], f"after {cut} of {len(whole[1])} items"
            next(items, None)
    return ""


def registered() -> dict[str, type]:
    """The classes behind all functional names, but for those of decoders that other tests have registered."""
    found: dict[str, type] = {}
    functions: dict[str, Any] = IterDataPipe.functions
    for name, function in functions.items():
        if hasattr(function, "__wrapped__"):
            found[name] = function.__wrapped__
        elif isinstance(function, partial):
            found[name] = function.args[0]
        else:
            assert isinstance(function.decoder, ExtensionDecoder)
    return found


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("wds_datapipes.")


def is_of_others(kind: type) -> bool:
    """Whether a test of this project, or anybody else, has registered it."""
    return kind.__module__.partition(".")[0] not in ("torch", "torchdata", "wds_datapipes")


quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@quiet
@pytest.mark.parametrize("name", BEHIND)
def test_a_stage_behind_the_samples_is_exact_or_refused(name: str) -> None:
    pipe = behind(BEHIND[name])
    refusal = refusal_or_exact(pipe)
    if name in EXACT:
        assert not refusal
    if refusal:
        kind = registered()[name].__name__.removesuffix("IterDataPipe").lstrip("_")
        assert refusal.startswith(f"{kind} may hold samples back"), refusal
        assert "Leave it out, or put it behind the loader" not in refusal, "it says what to use instead"


@quiet
@pytest.mark.parametrize("name", BEFORE)
def test_a_stage_before_the_shards_are_loaded_is_exact_or_refused(name: str) -> None:
    refusal_or_exact(before(BEFORE[name]))


@quiet
@pytest.mark.parametrize("name", BETWEEN)
def test_a_stage_between_members_and_samples_is_exact_or_refused(name: str) -> None:
    refusal_or_exact(between(BETWEEN[name]))


def test_every_registered_stage_is_swept() -> None:
    """What cannot be built here, for want of a package or of files, is refused by its class alone."""
    unbuilt = {name: kind for name, kind in registered().items() if name not in BEHIND and not is_of_others(kind)}
    assert {name for name, kind in unbuilt.items() if is_ours(kind)} == ELSEWHERE | WRITING
    assert len(unbuilt) > 20
    assert len(registered()) > 110
    for name, kind in unbuilt.items():
        if name in ELSEWHERE or name == "trace_as_dataframe":  # which records what is asked of it, and is no datapipe
            continue
        assert issubclass(kind, IterDataPipe | MapDataPipe), name
        # Without its end, which would shut down what was never begun.
        stage: Any = object.__new__(type(kind.__name__, (kind,), {"__del__": as_it_is, "__module__": kind.__module__}))
        sources = [each for each in inspect.signature(kind).parameters if "source" in each or "datapipe" in each]
        stage.__dict__[sources[0] if sources else "source_datapipe"] = other_samples()
        with pytest.raises(StateError, match=kind.__name__.removesuffix("IterDataPipe")):
            check_state(stage)


def test_what_a_stage_of_a_user_says_is_believed_and_check_resume_finds_it_out() -> None:
    """What a class does with its items cannot be seen from outside: that is why there is `check_resume`."""
    with pytest.raises(AssertionError, match="after 1 of"):
        refusal_or_exact(EverySecond(other_samples()))
