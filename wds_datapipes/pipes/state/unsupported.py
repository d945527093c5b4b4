"""What to use instead of stages of torch and torchdata, where a state is wanted."""

from __future__ import annotations

from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.state.graph import as_stage, takes_seed, upstream

__all__ = ["ADVICE", "check_replay", "name_of"]

_SEVERAL_OF_ONE = "Use .map() with the same function, and .unbatch_samples(collated=False) behind it"
_OF_UNEQUAL_SIZE = "Use .shuffle_samples(n) and .batch(n), and a collate_fn that takes items of unequal size"
_SPLIT = "Use one pipeline for each part, with .filter() or with shards of its own"
_JOINED = "Use .associate() with a table, or write what belongs together into one shard"
_READ_AGAIN = "Leave it out where a state is needed, and the samples are read from the shards again"
_PARTS = "Use .map() with a function that takes the parts"
_FILES = "Use .map() or .wds_decode(), which read the fields of a sample"
_MIXED = "Use .mix_samples(), or mix the shards before .load_wds_shards()"
_REPEATED = "Let the loop begin the loader again, or let .resample_wds_shards(count) draw shards more than once"
_NUMBERED = "Use __url__ and __key__ to tell samples apart, or count in the loop"
_FASTER = "Use .map(), and more workers"

#: By the name of the class, without what all of them end in.
ADVICE = {
    "Shuffler": "Use .shuffle_samples(n) for samples; .shuffle() belongs before .load_wds_shards()",
    "Prefetcher": "Workers of ShardReadingService make items ahead by themselves",
    "PinMemory": "Use ShardReadingService(pin_memory=True)",
    "ShardingFilter": "Put .sharding_filter() before .load_wds_shards()",
    "ShardingRoundRobinDispatcher": "Put .sharding_filter() before .load_wds_shards()",
    "FullSync": "Use ShardReadingService(distributed=True)",
    "Header": "Use .slice_samples(n)",
    "LengthSetter": "Use .with_length(n)",
    "BatchMapper": "Use .batch(n) and .map()",
    "BatchAsyncMapper": _FASTER,
    "ThreadPoolMapper": _FASTER,
    "WebDataset": "Use .load_wds_shards().group_samples()",
    "UnBatcher": "Use .unbatch_samples(collated=False)",
    "FlatMapper": _SEVERAL_OF_ONE,
    "ShuffledFlatMapper": f"{_SEVERAL_OF_ONE}, and .shuffle_samples(n) behind that",
    **dict.fromkeys(("Grouper", "BucketBatcher", "MaxTokenBucketizer", "InBatchShuffler"), _OF_UNEQUAL_SIZE),
    **dict.fromkeys(("Demultiplexer", "RoundRobinDemultiplexer", "Forker", "RandomSplitter"), _SPLIT),
    **dict.fromkeys(("Zipper", "ZipperLongest", "IterKeyZipper", "MapKeyZipper"), _JOINED),
    **dict.fromkeys(("InMemoryCacheHolder", "MemoryCell", "OnDiskCacheHolder", "EndOnDiskCacheHolder"), _READ_AGAIN),
    **dict.fromkeys(("Dropper", "Flatten", "Slice", "Rows2Columnar", "UnZipper"), _PARTS),
    **dict.fromkeys(("LineReader", "ParagraphAggregator", "CSVParser", "CSVDictParser", "JsonParser"), _FILES),
    **dict.fromkeys(("Concater", "Multiplexer", "MultiplexerLongest"), _MIXED),
    **dict.fromkeys(("Cycler", "Repeater"), _REPEATED),
    **dict.fromkeys(("Enumerator", "IndexAdder"), _NUMBERED),
}

#: Stages that begin their source again within an epoch, or never again.
_BEGINNING_OTHERWISE = ("Cycler", "InMemoryCacheHolder", "SampleCacher")


def name_of(stage: Any) -> str:
    """Return what a stage is called: by the name of its class, or of that which has made it as one of several."""
    maker = vars(stage).get("main_datapipe", stage)
    name = type(maker).__name__.lstrip("_").removesuffix("IterDataPipe")
    return "RandomSplitter" if name == "SplitterIterator" else name


def check_replay(reader: Any) -> None:
    """Make sure that what comes before a stage that reads it again from its beginning can be made again from its seeds.

    Args:
        reader: the stage, such as the one that loads the shards.

    Raises:
        StateError: an epoch of it does not follow from the seeds of this epoch.
    """
    is_cache = as_stage(reader).rereads_source
    before, behind = (".cache_samples()", "it") if is_cache else (".load_wds_shards()", "the samples")
    for stage in upstream(reader.source):
        if as_stage(stage).spans_epochs or name_of(stage) == "EpochSetter":
            raise StateError(
                f"{name_of(stage)} goes on from one epoch to the next, and before {before} an epoch has to follow from "
                f"its seeds. Put it behind {behind}"
            )
        if name_of(stage) in _BEGINNING_OTHERWISE and any(
            each is not stage and takes_seed(each) for each in upstream(stage)
        ):
            raise StateError(
                f"{name_of(stage)} does not begin what comes before it once in each epoch, and something there draws: "
                f"the order of the {'samples' if is_cache else 'shards'} does not follow from the seed. Put "
                f"{name_of(stage)} before what draws"
            )
