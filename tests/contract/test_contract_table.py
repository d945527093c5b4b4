"""What webdataset does, according to its own tests and to measurements, and what this package does instead.

Rows 1 to 80 are behaviour that the tests of webdataset 0.2.86 to 1.0.2 and of its wids pin; rows a to p were measured
with 1.0.2. Each has one test: `test_07_...` for row 7, `test_measured_c_...` for row c, next to this module, or beside
wids, which 1.0 lacks. Such a test runs webdataset along with this package, on shards that it builds.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

#: The tests of rows that need wids, among others.
BESIDE_WIDS = Path(__file__).parents[1] / "peers/test_wids.py"


class Row(NamedTuple):
    """One thing that webdataset does.

    Attributes:
        number: the number of the row.
        behaviour: what webdataset does.
        difference: what this package does instead, and why; empty if it does the same.
    """

    number: str
    behaviour: str
    difference: str = ""


TABLE = [
    Row("1", "a pipeline begins with any iterable, and takes functions of items and of streams"),
    Row("2", "braces stand for many shards"),
    Row("3", "select_files drops files, and keeps the samples"),
    Row("4", "rename_files changes extensions before grouping"),
    Row("5", "'::' joins lists of shards"),
    Row("6", "decode('rgb') makes float arrays of images, and integers of cls"),
    Row("7", "equal keys in copies of a shard do not clash"),
    Row("8", "resampled(10) reads ten shards, in every pass"),
    Row("9", "split_by_node and split_by_worker change nothing in one process"),
    Row(
        "10",
        "a list of shards has a seed, and one order for it",
        "the seed is the loader's, since all stages follow it, and each epoch has another order",
    ),
    Row("11", "non_empty passes items on, and raises if there are none"),
    Row("12", "resampled, slice and WebDataset.slice yield as many items as asked"),
    Row("13", "'${NAME}' in a pattern is the environment variable WDS_NAME"),
    Row("14", "resampled shards can be read past the size of the dataset"),
    Row("15", "MockDataset has the content and the length that it is given"),
    Row("16", "to_tuple takes one string with blanks, and extract_keys patterns"),
    Row(
        "17",
        "a pipe that is cut is a ReadError, or with ignore_and_stop the end",
        "the error is TruncatedShardError, with the shard; the sample at the cut is held back, as it may lack a field",
    ),
    Row("18", "'pipe:cat FILE' reads what the command writes"),
    Row(
        "19",
        "a failing decoder raises DecodingError; with ignore_and_continue exactly the good samples remain",
        "the error is DecodeError, a ValueError, whose text has shard, key, field, decoder and cause; theirs has none",
    ),
    Row("20", "to_tuple and rename raise ValueError for a field that is missing"),
    Row(
        "21",
        "rename takes alternatives, and with keep=False keeps nothing else",
        "__key__ and __url__ stay with keep=False too: later errors have to tell the sample",
    ),
    Row("22", "rename_keys(keep_unselected=True) keeps the other fields"),
    Row("23", "rsample keeps all with p=1, and about half with p=0.5"),
    Row(
        "24",
        "map gets dicts; errors of functions arrive as they are; map_dict of a missing field is a KeyError",
        "a missing field is MissingFieldError, a ValueError, in map_dict as in all other stages",
    ),
    Row("25", "rgb8 makes uint8 arrays, pil images, and without decode all is bytes"),
    Row("26", "decode(only=...) leaves the other fields as bytes"),
    Row("27", "txt.gz is decompressed and decoded, under its own name"),
    Row("28", "float images are the same in numpy and in torch, bit for bit"),
    Row(
        "29",
        "decoders may be functions of (key, bytes), or made by handle_extension",
        "functions get the field as it is called in the sample, without a dot before it",
    ),
    Row("30", "map_tuple, batched and unbatched work in a row, and pickle"),
    Row(
        "31",
        "with_epoch(n) yields n samples each time, from the start; repeat counts epochs or batches",
        "an epoch goes on where the last one ended; theirs would yield the same first n samples for ever",
    ),
    Row("32", "len() is a TypeError, unless with_length has declared one"),
    Row("33", "tenbin holds arrays of every shape, empty ones too"),
    Row(
        "34",
        "a dataset is a context manager",
        "the loader is one; a pipeline itself leaves nothing open when it is no longer read",
    ),
    Row("35", "with cache_dir, samples tell the local path of the copy"),
    Row(
        "36",
        "Cached and LMDBCached yield the samples again, the latter in another object too",
        "on disk, the order stays and so do samples of one key, which LMDBCached sorts and overwrites",
    ),
    Row(
        "37",
        "with a seed, shards are shuffled the same way in two datasets, and in all epochs",
        "two loaders of one seed agree, and each epoch has another order",
    ),
    Row("38", "two passes over resampled shards differ, and so do two lists"),
    Row(
        "39",
        "a YAML file mixes datasets: all, some (choose) or drawn shards (resample)",
        "shards come in the order of the file until .shuffle(), and it works without ALLOW_OBSOLETE=1",
    ),
    Row("40", "four workers and one shard yield as many batches as one worker"),
    Row("41", "drop_last and unbatched leave the samples of whole batches"),
    Row("42", "WebLoader.repeat(2) yields the batches of two epochs"),
    Row(
        "43",
        "more workers than shards raise ValueError in the workers that have none",
        "they end quietly, as the data is complete; non_empty() asks for an error",
    ),
    Row("44", "shuffle keeps each item, and takes none or one"),
    Row("45", "batched yields a last batch that is smaller, unless partial=False"),
    Row("46", "rsample keeps none with p=0, and all with p=1"),
    Row(
        "47",
        "extract_keys takes alternatives; two matches are an error; ignore_missing makes the tuple shorter",
        "missing='none' puts None in its place, since a shorter tuple mixes up its elements",
    ),
    Row(
        "48",
        "rename_keys(new='old') renames by pattern, and raises where one matches nothing",
        "__key__ and __url__ stay, as in row 21",
    ),
    Row(
        "49",
        "xdecode decodes txt, gives streams to functions, and raises for other fields",
        "wds_decode does it all: functions get bytes, and fields that none takes stay bytes",
    ),
    Row("50", "map leaves out the samples that a handler passes over"),
    Row(
        "51",
        "to_tuple raises for a value that is None, unless none_is_error=False",
        "None is a value, such as json's null; only a field that is missing is an error",
    ),
    Row(
        "52",
        "batches are collated to arrays and tensors, by column",
        "torch's collate makes tensors of numbers and arrays; collate_samples collates as webdataset does",
    ),
    Row("53", "every image spec has its type, shape and range"),
    Row(
        "54",
        "xdecode takes functions of streams by extension, and must_decode=False leaves the rest",
        "wds_decode takes functions of bytes by extension, as in row 49",
    ),
    Row(
        "55",
        "TarWriter writes all kinds of fields, which decode reads back",
        "fields stay in the order of the sample, where theirs are sorted; a value that cannot be read back is an error",
    ),
    Row(
        "56",
        "a name that ends in tgz is compressed, and one in tar is not",
        "the content is the same each time; theirs has the time in it",
    ),
    Row(
        "57",
        "pth and pyd fields are written and read back",
        "both need allow_pickle=True where they hold more than tensors, as for decoding",
    ),
    Row("58", "a single array in ten is read back as a list of one"),
    Row("59", "txt.gz is written compressed and read back"),
    Row(
        "60",
        "TarWriter writes to 'pipe:cat > FILE'",
        "it is killed if the shard is broken off; theirs takes half a shard for a whole one",
    ),
    Row(
        "61",
        "ShardWriter begins another shard after maxcount, and calls post with its name",
        "no shard without samples is written, and none is left half by an error",
    ),
    Row(
        "62",
        "ResampledShards takes its six options by position, and counts epochs from -1",
        "count alone goes by position; the loader gives seeds and epochs",
    ),
    Row(
        "63",
        "DirectoryShardList takes shards as they appear, oldest first or at random, and unlinks or keeps them",
        "a shard in use is in a directory of its reader, which holds a lock, since numbers of processes come again",
    ),
    Row("64", "two detshuffle stages of one seed agree, and their epochs differ"),
    Row("65", "RoundRobin and RandomMix end with the shortest or the longest source"),
    Row(
        "66",
        "url_to_cache_name makes a name of one or more parts of a URL",
        "a digest of the whole URL is the name, since shards of two folders would share a copy",
    ),
    Row("67", "samples of local shards tell the path, and others do not"),
    Row(
        "68",
        "FileCache copies remote shards, and leaves local ones",
        "whoever asks for copies gets them, as of files on a network's disk",
    ),
    Row(
        "69",
        "LRUCleanup deletes the oldest copies until they fit",
        "the one that was used longest ago leaves first, and none that is being read",
    ),
    Row("70", "gopen writes files and pipes, and reads them back"),
    Row("71", "a shard that is not there is an OSError, locally and over http"),
    Row("72", "repeatedly stops after a number of epochs, batches or samples"),
    Row(
        "73",
        "a flag of the process forbids pickles, local files and pipes",
        "pickles are refused unless the stage says allow_pickle=True; pipelines are code, which may open what it names",
    ),
    Row("74", "ShardListDataset knows lengths, and keeps the shards used last"),
    Row("75", "it decodes fields that end in gz"),
    Row("76", "samplers cover the data, disjoint among ranks, with epochs"),
    Row("77", "MMIndexedTar reads ustar, PAX and GNU archives"),
    Row("78", "LRUCache releases what was not used for longest"),
    Row("79", "many downloads of one shard at once are one download"),
    Row("80", "keep_most_recent_files deletes files by size and age"),
    Row(
        "a",
        "names are split at the first dot of their last part",
        "a hidden file in a folder, as macOS writes them, is in no sample; theirs all share the key 'folder/'",
    ),
    Row("b", "names like __meta__, and what is in such a folder, are in no sample"),
    Row("c", "fields that differ in case alone are duplicates"),
    Row("d", "a file without extension between two files of a sample is ignored"),
    Row("e", "a key at the end of a shard and at the beginning of the next is two samples"),
    Row(
        "f",
        "a key that comes back later in a shard is another sample",
        "it is, and a warning tells of it, or an error on request",
    ),
    Row(
        "g",
        "an empty archive has no samples; an empty file and garbage are ReadErrors",
        "the errors are TruncatedShardError and CorruptShardError, which tell the shard",
    ),
    Row("h", "a file of no bytes is a field of no bytes"),
    Row("i", "links and folders are passed over"),
    Row("j", "content tells the compression, and names do not"),
    Row(
        "k",
        "of archives that were concatenated, the first is read",
        "it is an error that says how to read all, since samples would be lost without a word",
    ),
    Row("l", "select_files sees the new names of rename_files"),
    Row("m", "names may have more than a hundred characters"),
    Row(
        "n",
        "environment variables tell rank and worker",
        "the loader tells them; which of them reads a shard is as torch deals, each shard once",
    ),
    Row(
        "o",
        "a handler that stops in the middle of a sample yields what there is of it",
        "a sample that may lack a field is never yielded",
    ),
    Row("p", "without a split, three workers yield everything three times"),
]

NUMBERS = [*map(str, range(1, 81)), *"abcdefghijklmnop"]


def contract_tests() -> list[tuple[str, ast.FunctionDef]]:
    """Return the tests that carry the number of a row, by number."""
    found = []
    for path in [*sorted(Path(__file__).parent.glob("test_*.py")), BESIDE_WIDS]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and (
                match := re.match(r"test_(?:(\d\d)|measured_([a-p]))_", node.name)
            ):
                found.append(((match[1] or match[2]).lstrip("0"), node))
            elif path not in (Path(__file__), BESIDE_WIDS) and isinstance(node, ast.FunctionDef):
                assert not node.name.startswith("test_"), f"{node.name} has no number of a row"
    return found


def test_the_table_contains_every_row_once_and_in_order() -> None:
    assert [row.number for row in TABLE] == NUMBERS


def test_every_row_has_one_test() -> None:
    assert Counter(number for number, _ in contract_tests()) == Counter(row.number for row in TABLE)
    assert all(row.behaviour for row in TABLE)


def test_every_test_also_runs_webdataset() -> None:
    for number, node in contract_tests():
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        assert names & {"theirs", "their_pipe", "webdataset"}, f"row {number}: {node.name} runs this package alone"
