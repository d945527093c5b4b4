"""Names of stages, functions and arguments of other packages, and what to write here instead."""

from __future__ import annotations

_SAMPLES = ".load_wds_shards().group_samples()"
_LOADER = "DataLoader2(pipe, reading_service=ShardReadingService(num_workers=4))"
_PIPELINE = f"ShardList(urls).shuffle().sharding_filter(){_SAMPLES}"
_COLLATED = ".batch(n).collate(collate_fn=collate_samples)"

#: The public names of webdataset's package, of its pipelines, and of its modules.
WEBDATASET = {
    "Cached": ".cache_samples()",
    "DataPipeline": f"a chain of stages, as in ShardList(urls){_SAMPLES}",
    "Decoder": ".wds_decode()",
    "DecodingError": "wds_datapipes.errors.DecodeError",
    "FluidInterface": "the methods of a pipeline, such as .map_samples(f)",
    "FluidWrapper": "LoaderBatches(loader), and stages after it",
    "LMDBCached": ".cache_samples(path)",
    "LRUCleanup": ".cache_wds_shards(folder, max_bytes=n)",
    "MockDataset": "MockSamples(sample, length)",
    "MultiShardSample": "DatasetSpec(spec)",
    "PipelineStage": ".compose(f)",
    "RandomMix": ".mix_samples(other, weights=)",
    "ResampledShards": "ShardList(urls).resample_wds_shards()",
    "RoundRobin": ".mix_samples(other)",
    "SimpleShardList": "ShardList(urls)",
    "WebDataset": _PIPELINE,
    "WebLoader": _LOADER,
    "associate": ".associate(table)",
    "autodecode": ".wds_decode()",
    "batched": _COLLATED,
    "cache": ".cache_wds_shards(folder)",
    "cached_tarfile_samples": ".cache_wds_shards(folder)",
    "cached_tarfile_to_samples": ".cache_wds_shards(folder)",
    "cbors2_to_samples": ".load_wds_records()",
    "cbors_to_samples": ".load_wds_records()",
    "compat": _PIPELINE,
    "decode": ".wds_decode()",
    "detshuffle": ".shuffle_samples(n)",
    "extract_keys": '.extract_keys("*.png")',
    "filters": "the methods of a pipeline, such as .map_samples(f)",
    "getfirst": '.to_tuple("jpg;png")',
    "gopen": ".load_wds_shards() for shards, or fsspec.open(url) for other files",
    "gopen_schemes": 'register_opener("scheme", f)',
    "group_by_keys": ".group_samples()",
    "gzfilter": ".wds_decode(), which decompresses fields that end in .gz before it decodes them",
    "handlers": 'on_error="warn" or on_error="skip"',
    "ignore_and_continue": 'on_error="skip"',
    "ignore_and_stop": "on_error=f, where f(error) returns False",
    "imagehandler": 'ImageDecoder("torchrgb8")',
    "info": ".log_samples()",
    "listed": ".batch(n)",
    "lmdb_cached": ".cache_samples(path)",
    "log_keys": ".log_samples(positions=)",
    "lru_cleanup": ".cache_wds_shards(folder, max_bytes=n)",
    "map": ".map_samples(f)",
    "map_dict": ".map_dict(png=f)",
    "map_tuple": ".map_tuple(f, g)",
    "maybe_cached_tarfile_to_samples": ".cache_wds_shards(folder)",
    "mcached": ".cache_samples()",
    "non_empty": ".non_empty()",
    "numpy_dumps": ".wds_encode()",
    "pipe_cleaner": ".cache_wds_shards(folder)",
    "pipelinefilter": ".compose(f)",
    "pytorch_weights_only": ".wds_decode(), which reads pth with weights only unless allow_pickle=True",
    "rename": '.rename(image="jpg;png")',
    "rename_keys": '.rename_keys(image="*.png")',
    "repeatedly": ".with_epoch(n), or .cycle()",
    "reraise_exception": 'on_error="raise", the default',
    "resampled": ".resample_wds_shards()",
    "rsample": ".rsample(probability)",
    "select": ".filter(f)",
    "shardlists": "ShardList(urls)",
    "shardspec": "DatasetSpec(spec)",
    "shuffle": ".shuffle_samples(n) for samples, and .shuffle() for a list of shards",
    "single_node_only": "nothing: every rank reads all shards of a pipeline without .sharding_filter()",
    "slice": ".slice_samples(n)",
    "split_by_node": ".sharding_filter()",
    "split_by_worker": ".sharding_filter()",
    "tarfile_samples": _SAMPLES,
    "tarfile_to_samples": _SAMPLES,
    "tariterators": _SAMPLES,
    "tenbin": ".wds_decode() and .wds_encode(), which know the format",
    "to_tuple": '.to_tuple("jpg;png", "cls")',
    "torch_audio": '.wds_decode("torch_audio")',
    "torch_dumps": ".wds_encode()",
    "torch_loads": ".wds_decode(), which reads pth with weights only unless allow_pickle=True",
    "torch_video": '.wds_decode("torch_video")',
    "transform_with": ".map_dict(png=f)",
    "unbatched": ".unbatch_samples()",
    "unlisted": ".unbatch()",
    "warn_and_continue": 'on_error="warn"',
    "warn_and_stop": "on_error=f, where f(error) returns False",
    "with_epoch": ".with_epoch(n)",
    "with_length": ".with_length(n)",
    "writer": "ShardWriter(pattern)",
    "xdecode": ".wds_decode(png=f)",
}

#: Names of Hugging Face's datasets, for pipelines and for the module.
HUGGING_FACE = {
    "concatenate_datasets": '.mix_samples(other, stop="all")',
    "interleave_datasets": ".mix_samples(other, weights=)",
    "load_dataset": _PIPELINE,
    "remove_columns": ".select_fields() with the fields to keep",
    "rename_column": '.rename(image="png")',
    "rename_columns": '.rename(image="png")',
    "select_columns": '.select_fields("png", "cls")',
    "set_epoch": "nothing: each loader counts its epochs, and each has its own order; StatefulShards has .set_epoch(n)",
    "set_format": '.wds_decode("torchrgb8")',
    "shard": ".sharding_filter()",
    "skip": ".slice_samples(n, None)",
    "split_dataset_by_node": ".sharding_filter()",
    "take": ".slice_samples(n)",
    "to_iterable_dataset": "nothing: a pipeline is iterable",
    "with_format": '.wds_decode("torchrgb8")',
}

#: Names of torchdata and PyTorch that users look for in this package.
TORCHDATA = {
    "DataLoader2": "from torchdata.dataloader2 import DataLoader2",
    "DistributedReadingService": "ShardReadingService(distributed=True)",
    "InProcessReadingService": "ShardReadingService(num_workers=0)",
    "IterableWrapper": "from torch.utils.data.datapipes.iter import IterableWrapper",
    "MultiProcessingReadingService": "ShardReadingService(num_workers=4)",
    "PrototypeMultiProcessingReadingService": "ShardReadingService(num_workers=4)",
    "SequentialReadingService": "ShardReadingService(num_workers=4, distributed=True)",
    "StatefulDataLoader": "from torchdata.stateful_dataloader import StatefulDataLoader",
}

#: Arguments of other packages.
ARGUMENTS = {
    "batch_size": ".batch(n), a stage; for the order of IndexedSamples, global_batch_size=",
    "cache_dir": ".cache_wds_shards(folder), before .load_wds_shards()",
    "cache_size": ".cache_wds_shards(folder, max_bytes=n)",
    "collation_fn": ".collate(collate_fn=f)",
    "detshuffle": ".shuffle(), and the seed of the loader",
    "drop_last": '.batch(n, drop_last=True); for IndexedSamples, remainder="drop"',
    "empty_check": ".non_empty()",
    "handler": "on_error=",
    "ignore_missing": "missing=",
    "lcase": "lowercase=",
    "missing_is_error": "missing=",
    "nodesplitter": ".sharding_filter()",
    "num_workers": "num_workers= of the loader",
    "pin_memory": "pin_memory= of the loader",
    "repeat": ".with_epoch(n)",
    "resampled": ".resample_wds_shards() in place of .sharding_filter()",
    "seed": "loader.seed(n), or StatefulShards(pipe, seed=n)",
    "shardshuffle": ".shuffle() after ShardList",
    "shuffle": ".shuffle() for a list of shards, .shuffle_samples(n) for samples, order= for IndexedSamples",
    "splitter": ".sharding_filter()",
    "suffixes": "fields=",
    "transform": ".map_dict(png=f)",
    "transforms": ".map_dict(png=f)",
    "url_to_name": ".cache_wds_shards(folder), which names copies itself",
    "workersplitter": ".sharding_filter()",
}


def explain_name(name: str) -> str:
    """Return what to write for a name of another package, to append to an error; "" for an unknown name.

    >>> explain_name("listed")
    ". For webdataset's listed, write .batch(n)"
    """
    for package, names in (("webdataset", WEBDATASET), ("Hugging Face", HUGGING_FACE), ("torchdata", TORCHDATA)):
        if name in names:
            return f". For {package}'s {name}, write {names[name]}"
    return ""


def explain_argument(name: str) -> str:
    """Return what to write for an argument of another package, to append to an error; "" for an unknown one.

    >>> explain_argument("handler")
    '. For handler= of other packages, write on_error='
    """
    return f". For {name}= of other packages, write {ARGUMENTS[name]}" if name in ARGUMENTS else ""
