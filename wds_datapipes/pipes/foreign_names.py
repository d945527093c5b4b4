"""The names that other packages have for what stages do here, and errors that say which stage is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type[Any])

WORKERS = "workers are started by the loader, as in ShardReadingService(num_workers=4)"
SPLIT = ".sharding_filter() after the list of shards splits them between ranks and workers"
HANDLER = "webdataset's handler= is on_error= of each stage that can fail, such as .load_wds_shards()"
SHUFFLE = ".shuffle() after the list of shards shuffles them, and .shuffle_samples(n) samples"

#: What to write here, by the name in webdataset or in Hugging Face's datasets, of what has another name here.
NAMES = {
    "webdataset's": {
        "WebDataset": "ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()",
        "WebLoader": "DataLoader2(pipe, reading_service=ShardReadingService(num_workers=4))",
        "DataPipeline": "a chain of stages, as in ShardList(urls).load_wds_shards().group_samples()",
        "SimpleShardList": "ShardList(urls)",
        "ResampledShards": "ShardList(urls).resample_wds_shards()",
        "RandomMix": ".mix_samples(other, weights=)",
        "RoundRobin": ".mix_samples(other)",
        "batched": ".batch(n).collate(collate_fn=collate_samples)",
        "decode": ".wds_decode()",
        "detshuffle": ".shuffle_samples(n)",
        "group_by_keys": ".group_samples()",
        "listed": ".batch(n)",
        "log_keys": ".log_samples(key_log=)",
        "repeatedly": ".with_epoch(n), or .cycle()",
        "resampled": ".resample_wds_shards()",
        "select": ".filter(f)",
        "split_by_node": ".sharding_filter()",
        "split_by_worker": ".sharding_filter()",
        "tarfile_samples": ".load_wds_shards().group_samples()",
        "tarfile_to_samples": ".load_wds_shards().group_samples()",
        "unbatched": ".unbatch_samples()",
        "unlisted": ".unbatch()",
        "xdecode": ".wds_decode(png=f)",
    },
    "Hugging Face's": {
        "cache": ".cache_samples(), or .cache_wds_shards(folder) for whole shards",
        "load_dataset": "ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()",
        "rename_column": ".rename(new=old)",
        "rename_columns": ".rename(new=old)",
        "select_columns": ".select_fields()",
        "set_epoch": "nothing, since loaders count their epochs; loader.seed(n) selects another order",
        "shard": ".sharding_filter()",
        "skip": ".slice_samples(n, None)",
        "take": ".slice_samples(n)",
        "with_format": '.wds_decode("torchrgb8")',
    },
}

#: What to write instead of an argument that a stage or a loader lacks, by its name in webdataset and in PyTorch.
ARGUMENTS = {
    "batch_size": ".batch(n) makes batches",
    "cache_dir": ".cache_wds_shards(cache_dir) after the list of shards keeps copies of them",
    "cache_size": ".cache_wds_shards(folder, max_bytes=) limits the size of the copies",
    "collate_fn": ".collate(collate_fn=f) after .batch(n) collates",
    "detshuffle": SHUFFLE,
    "drop_last": ".batch(n, drop_last=True) drops an incomplete batch",
    "empty_check": ".non_empty() refuses a pipeline that yields nothing",
    "handler": HANDLER,
    "keys": "it is called key_rule=, in .group_samples()",
    "lcase": "it is called lowercase=, in .group_samples()",
    "missing_is_error": 'missing="none" replaces missing_is_error=False',
    "nodesplitter": SPLIT,
    "num_workers": WORKERS,
    "repeat": ".cycle(n) repeats what the stages before it yield",
    "resampled": ".resample_wds_shards() after the list of shards draws them with replacement",
    "seed": "loader.seed(n) seeds all stages of a pipeline",
    "shardshuffle": SHUFFLE,
    "shuffle": SHUFFLE,
    "suffixes": "it is called fields=, in .group_samples()",
    "workersplitter": SPLIT,
}


def explain_name(name: str) -> str:
    """Return what to write for a name of another package, to be appended to an error; "" for an unknown name.

    >>> explain_name("listed")
    ". For webdataset's listed, write .batch(n)"
    """
    found = ((package, names[name]) for package, names in NAMES.items() if name in names)
    return "".join(f". For {package} {name}, write {here}" for package, here in found)


def explain_arguments(kind: C) -> C:
    """Let the constructor of a class raise an error that says what to write for an argument of another package."""
    build = kind.__init__
    parameters = inspect.signature(build).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return kind
    refused = ARGUMENTS.keys() - parameters.keys()

    @functools.wraps(build)
    def build_or_explain(self: Any, *arguments: Any, **options: Any) -> None:
        for name in refused.intersection(options):
            raise TypeError(f"{kind.__name__} has no argument {name!r}: {ARGUMENTS[name]}")
        build(self, *arguments, **options)

    kind.__init__ = build_or_explain
    return kind


def refuse_positions(shuffle: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``.shuffle()``, which takes keywords only, with an error that says what is meant."""

    @functools.wraps(shuffle, assigned=("__doc__",))
    def shuffle_or_explain(*sizes: Any, **options: Any) -> Any:
        if sizes:
            raise TypeError(
                f".shuffle() takes no positional argument. Samples are shuffled by .shuffle_samples({sizes[0]!r}), "
                f"whose state is exact, and a list of shards by .shuffle(). The buffer of torch's own stage is "
                f".shuffle(buffer_size={sizes[0]!r})"
            )
        return shuffle(**options)

    return shuffle_or_explain
