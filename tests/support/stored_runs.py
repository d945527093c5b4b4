"""What each release stores for the tests of the next one: shards with indexes and a manifest, and states of runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from loader_kinds import InStateful, Nodes, Service, Stateful, Tracked, comparable, items_of
from page_blocks import ROOT

import wds_datapipes
import wds_datapipes.index
import wds_datapipes.pipes
from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.fingerprint import format_value
from wds_datapipes.index import EpochOptions, IndexOptions, Manifest, build_indexes, read_index, write_manifest
from wds_datapipes.testing import build_shard

#: The folder with one of each release.
FOLDER = ROOT / "tests/earlier_releases"
SIZES = (7, 4, 9, 5)
WORKERS = 2


def release() -> str:
    """Return the first two numbers of the version of this package."""
    return ".".join(wds_datapipes.__version__.split(".")[:2])


def stream(shards: str = "{0..3}.tar") -> Any:
    return ShardList(shards).shuffle().sharding_filter().load_wds_shards().group_samples()


#: The pipelines whose states are stored: without functions of users, which each Python compiles to other code.
PIPELINES: dict[str, Callable[[], Any]] = {
    "stream": lambda: stream().shuffle_samples(6).wds_decode().to_tuple("__key__", "cls").batch(2),
    "mixture": lambda: (
        stream("{0,1}.tar").mix_samples(stream("{2,3}.tar"), weights=[2, 1], stop="all").shuffle_samples(4)
    ),
    "epochs of a stream": lambda: stream().shuffle_samples(5).with_epoch(15),
    "replay": lambda: stream().shuffle_samples(5).batch(3).unbatch(),
    "index": lambda: (
        IndexedSamples("{0..3}.tar", order="window", global_batch_size=4, epoch=EpochOptions(window_shards=2))
        .wds_decode()
        .to_tuple("__key__", "cls")
    ),
    "indexed mixture": lambda: IndexedSamples(
        {"left": "{0,1}.tar", "right": "{2,3}.tar"}, weights={"left": 1, "right": 3}, global_batch_size=4, lanes=2
    ),
}
#: Those that are stored for two ranks as well.
ON_RANKS = ("stream", "index")
#: The loaders that this environment has: torchdata releases have either DataLoader2 or nodes.
LOADERS: dict[str, Any] = {
    **({"DataLoader2": Service} if find_spec("torchdata.dataloader2") else {"nodes": Nodes}),
    "StatefulShards": Tracked,
    **({"StatefulDataLoader": InStateful} if find_spec("torchdata.stateful_dataloader") else {}),
}


def cases() -> Iterator[tuple[str, str, int, int]]:
    """Yield the loader, the pipeline, the rank and the number of ranks of each state."""
    for loader in ("DataLoader2", "StatefulShards", "StatefulDataLoader", "nodes"):
        for name in PIPELINES:
            if (loader, name) != ("StatefulDataLoader", "epochs of a stream"):  # it cannot know their positions
                yield loader, name, 0, 1
        yield from ((loader, name, rank, 2) for name in ON_RANKS for rank in range(2))


def title(loader: str, name: str, rank: int, ranks: int) -> str:
    return f"{loader}: {name}, rank {rank} of {ranks}"


def resumed(loader: str, name: str, rank: int, ranks: int, *, state: Any, saved_by: str) -> list[Any]:
    """Return the rest of the epoch, and the next one, from the state that a loader has saved."""
    is_own = loader == saved_by == "StatefulDataLoader"
    kind = Stateful if is_own else LOADERS[loader]
    options: dict[str, Any] = {"distributed": (rank, ranks)} if ranks > 1 else {}
    with closing(kind(PIPELINES[name], WORKERS, state, **options)) as run:
        return as_json([items_of(run.epoch()), items_of(run.epoch())])


def saved(loader: str, name: str, rank: int, ranks: int) -> dict[str, Any]:
    """Return the state after a third of the second epoch, and the rest of this epoch and the next one."""
    kind = Stateful if loader == "StatefulDataLoader" else LOADERS[loader]
    options: dict[str, Any] = {"distributed": (rank, ranks)} if ranks > 1 else {}
    with closing(kind(PIPELINES[name], WORKERS, **options)) as run:
        first, items = items_of(run.epoch()), run.epoch()
        for _ in islice(items, len(first) // 3):
            pass
        state = run.state()
        return {"state": state, "rest": as_json([items_of(items), items_of(run.epoch())])}


def as_json(items: list[Any]) -> list[Any]:
    """Return items as they are after they were stored."""
    found: list[Any] = json.loads(json.dumps(items, default=bytes.decode))
    return found


def facts_of_indexes() -> dict[str, Any]:
    """Return what the indexes in the working directory say."""
    return {
        path.name: {
            "samples": as_json([*index]),
            "columns": {column: comparable(values) for column, values in index.columns.items()},
            "sha256": index.facts.sha256,
        }
        for path in sorted(Path().glob("*.wdsidx"))
        for index in [read_index(str(path))]
    }


def write_dataset() -> None:
    """Write shards with indexes and a manifest to the working directory."""
    for shard, size in enumerate(SIZES):
        samples = [(f"{shard}-{number}", str(number)) for number in range(size)]
        build_shard(f"{shard}.tar", [{"__key__": key, "cls": n, "txt": f"text {n}"} for key, n in samples])
    built = build_indexes("{0..3}.tar", options=IndexOptions(digest=True), columns={"label": "cls"}, num_workers=0)
    write_manifest(Manifest(built), "manifest.json")


def defaults() -> dict[str, dict[str, str]]:
    """Return the defaults of stages and options, which the descriptions in states omit."""
    kinds = {
        getattr(module, name)
        for module in (wds_datapipes, wds_datapipes.index, wds_datapipes.pipes)
        for name in module.__all__
        if name != "ShardReadingService"  # is no part of a pipeline, and needs DataLoader2
        if inspect.isclass(getattr(module, name))
    }
    found = {}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        parameters = inspect.signature(kind).parameters.values()
        found[kind.__name__] = {
            each.name: format_value(each.default) for each in parameters if each.default is not each.empty
        }
    return {name: each for name, each in found.items() if each}
