"""The names of torchdata's stages, whose first use imports torchdata, which registers them."""

from __future__ import annotations

import importlib
import sys

#: The stages that torchdata 0.7.1 to 0.9.0 register.
STAGES = frozenset(
    {
        *("add_index", "async_map_batches", "bucketbatch", "check_hash", "cycle", "dataframe", "decompress", "drop"),
        *("end_caching", "enumerate", "extract", "flatmap", "flatten", "fullsync", "header", "in_batch_shuffle"),
        *(
            "in_memory_cache",
            "lines_to_paragraphs",
            "list_files_by_ais",
            "list_files_by_fsspec",
            "list_files_by_iopath",
        ),
        *("list_files_by_s3", "load_files_by_ais", "load_files_by_s3", "load_from_bz2", "load_from_rar"),
        *("load_from_tar", "load_from_tfrecord", "load_from_xz", "load_from_zip", "load_parquet_as_df", "map_batches"),
        *("max_token_bucketize", "memory_cell", "mux_longest", "on_disk_cache", "open_files_by_fsspec"),
        *("open_files_by_iopath", "parse_csv", "parse_csv_as_dict", "parse_json_files", "pin_memory", "prefetch"),
        *("random_split", "read_from_gdrive", "read_from_http", "read_from_remote", "readlines", "repeat"),
        *("round_robin_demux", "rows2columnar", "save_by_fsspec", "save_by_iopath", "save_to_disk", "set_length"),
        *("shard_expand", "sharding_round_robin_dispatch", "shuffled_flatmap", "slice", "threadpool_map"),
        *("to_iter_datapipe", "to_map_datapipe", "unzip", "webdataset", "zip_longest", "zip_with_iter", "zip_with_map"),
    }
)


def import_stages() -> bool:
    """Import torchdata's stages, which registers them; return whether it was not imported before and is installed."""
    if "torchdata" in sys.modules:
        return False
    try:
        importlib.import_module("torchdata.datapipes")
    except ImportError:
        return False
    return True
