"""Writers of one shard: `TarWriter`, and `RecordWriter` for shards of records."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

from wds_datapipes.io.sinks import Sink
from wds_datapipes.shards.record_formats import find_format
from wds_datapipes.writing.options import WriteKeywords, WriteOptions
from wds_datapipes.writing.shard_file import ShardFile, name_of_target

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TarWriter(ShardFile):
    """Writes samples to one shard, which appears under its name when it is complete.

    It is a context manager: leaving it finishes the shard; an error or Ctrl-C removes it, including temporary files. A
    local file gets its name after all of it was synced to disk; if two writers write the same file, the one that
    finishes last wins. Data written to a command, to standard output or to an open stream cannot be removed; after an
    error it lacks the end marker, and a command is killed before it sees the end of its input.

    Output is deterministic: the same samples give the same bytes, compressed or not. Headers are plain ustar, with a
    PAX header only for names that do not fit (long or non-ASCII ones) and sizes of 8 GiB or more.

    Args:
        target: a path, a URL of a file system that fsspec supports, ``pipe:COMMAND``, ``-`` (standard output) or an
            open binary stream, which stays open.
        options: the arguments of `WriteOptions`: ``compress``, ``encoder``, ``mtime`` and so on.

    Attributes:
        samples: the number of samples written.
        size: the size of the archive so far, in bytes before compression, without the end marker.
        info: the `ShardInfo` of the finished shard, ``None`` before that.

    Raises:
        ShardWriteError: the shard cannot be written, or the command has failed.

    Examples:
        >>> with TarWriter("a.tar") as shard:
        ...     for number in range(2):
        ...         _ = shard.write({"__key__": f"{number:03d}", "txt": "a cat", "cls": number})
        >>> shard.info.samples, shard.info.bytes
        (2, 5120)
        >>> [member.name for member in ShardList("a.tar").load_wds_shards()]
        ['000.txt', '000.cls', '001.txt', '001.cls']
    """

    def __init__(self, target: str | os.PathLike[str] | BinaryIO | Sink, **options: Unpack[WriteKeywords]) -> None:
        if options.get("format") not in (None, "tar"):
            raise ValueError(f"TarWriter writes no {options['format']!r}. Use RecordWriter, or ShardWriter")
        super().__init__(target, WriteOptions(**options))


class RecordWriter(ShardFile):
    """Writes samples to one record shard, which appears under its name when it is complete.

    It behaves as `TarWriter` does. ``load_wds_records`` reads the samples back as they were, except that tuples become
    lists, and, in JSON lines, the keys of nested maps become text.

    Args:
        target: as for `TarWriter`. Its name tells the format, as for ``load_wds_records``, unless ``format`` is given.
        options: the arguments of `WriteOptions` that records have: ``format``, ``compress``, ``encoder``,
            ``keep_meta``, ``key_rule``, ``storage_options`` and ``digest``.

    Attributes:
        samples: the number of samples written.
        size: the size of the shard so far, in bytes before compression.
        info: the `ShardInfo` of the finished shard, ``None`` before that.

    Raises:
        SpecError: the name does not tell the format, and ``format`` is not given.
        ShardWriteError: the shard cannot be written, or the command has failed.

    Examples:
        >>> with RecordWriter("a.jsonl") as shard:
        ...     _ = shard.write({"__key__": "000", "text": "a cat", "tokens": [4, 9]})
        >>> [(sample["__key__"], sample["tokens"]) for sample in ShardList("a.jsonl").load_wds_records()]
        [('000', [4, 9])]
    """

    def __init__(self, target: str | os.PathLike[str] | BinaryIO | Sink, **options: Unpack[WriteKeywords]) -> None:
        found = WriteOptions(**options)
        if found.format == "tar":
            raise ValueError("RecordWriter writes no 'tar'. Use TarWriter, or ShardWriter")
        super().__init__(target, found, find_format(name_of_target(target), found.format))
