"""Write samples to a single shard."""

from __future__ import annotations

import os
from typing import BinaryIO

from wds_datapipes.arguments import checks_calls
from wds_datapipes.io.output.sink import Sink
from wds_datapipes.writing.options import DEFAULT_WRITING, WriteOptions
from wds_datapipes.writing.shard_file import ShardFile


@checks_calls
class TarWriter(ShardFile):
    """Writes samples to a single shard, which appears under its name once it is complete.

    It is a context manager: leaving it finishes the shard, while an error or Ctrl-C removes it, including temporary
    files. Otherwise, call ``close()``: a writer that is not closed loses its shard, with a warning. A local file gets
    its name only after all of it was synced to disk; if two writers write the same file, the last one to finish wins.
    Data written to a command, to standard output or to an open stream cannot be removed: after an error, it lacks the
    end marker, and a command is killed before it sees the end of its input.

    The output is deterministic: the same samples give the same bytes, compressed or not. Headers are plain ustar, with
    a PAX header only for names that do not fit (long or non-ASCII names) and sizes of 8 GiB or more.

    Args:
        target: a path, a URL of a file system that fsspec supports, ``pipe:COMMAND``, ``-`` (standard output) or an
            open binary stream, which stays open.
        options: how its bytes are written: ``WriteOptions(compress=, encoder=, mtime=...)``.

    Attributes:
        samples: the number of samples written.
        size: the size of the archive so far, in bytes before compression, without the end marker.
        info: the `ShardInfo` of the finished shard; ``None`` before that.

    Raises:
        ShardWriteError: the shard cannot be written, or the command failed.

    Examples:
        >>> with TarWriter("a.tar") as shard:
        ...     for number in range(2):
        ...         _ = shard.write({"__key__": f"{number:03d}", "txt": "a cat", "cls": number})
        >>> shard.info.samples, shard.info.bytes
        (2, 5120)
        >>> [member.name for member in ShardList("a.tar").load_wds_shards()]
        ['000.txt', '000.cls', '001.txt', '001.cls']
    """

    def __init__(
        self, target: str | os.PathLike[str] | BinaryIO | Sink, options: WriteOptions = DEFAULT_WRITING
    ) -> None:
        super().__init__(target, options)
