"""Tar writer: writes samples to the members of one tar shard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from wds_datapipes.index.build import index_from_layout
from wds_datapipes.index.file_format import index_url, write_index
from wds_datapipes.io.compression.formats import Compress
from wds_datapipes.io.sinks import Sink
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.header_writer import END, HeaderWriter
from wds_datapipes.writing.sample_packer import Encoder, TarSamplePacker
from wds_datapipes.writing.shard_file import ShardFile, name_of_target

__all__ = ["TarWriter"]


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
        user: the name of the files' owner, whose ID is 0.
        group: the name of the files' group, whose ID is 0.
        mode: the permissions of the files.
        mtime: the modification time of the files, in whole seconds since 1970.
        compress: ``"gz"``, ``"bz2"``, ``"xz"`` or ``"zst"``; ``True`` is ``"gz"``, ``False`` is none, and ``None``
            selects by the name: ``.tar.gz``, ``.tgz`` and so on.
        encoder: ``True`` encodes values as ``wds_encode`` does; a dict gives its keyword arguments, such as
            ``{"jpg": {"quality": 90}}``; a function takes a sample and returns one with bytes; with ``False`` or
            ``None``, all values must be bytes.
        keep_meta: also write the values of keys that begin with ``__``, except ``__key__``; they must be str or bytes.
        allow_pickle: allow codecs whose data can run code when it is decoded, as for ``wds_encode``.
        key_rule: the rule that the shard will be read with. Names that it would split differently are refused, and so
            are repeated keys. ``None`` disables both checks.
        storage_options: passed to the file system of a URL.
        digest: compute the SHA-256 of the shard for ``info``, which takes about as long as writing large fields.
        index: write the `ShardIndex` of the shard next to it when it is finished. With ``digest``, the index includes
            the digest.

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

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | Sink,
        *,
        user: str = "",
        group: str = "",
        mode: int = 0o644,
        mtime: float = 0,
        compress: Compress = None,
        encoder: Encoder = True,
        keep_meta: bool = False,
        allow_pickle: bool = False,
        key_rule: KeyRule | None = first_dot,
        storage_options: Mapping[str, Any] | None = None,
        digest: bool = False,
        index: bool = False,
    ) -> None:
        name = name_of_target(target)
        if index and (not name or key_rule is None):
            raise ValueError("index=True needs a file name, to write the index next to it, and a key_rule")
        headers = HeaderWriter(user=user, group=group, mode=mode, mtime=mtime)
        packer = TarSamplePacker(headers, encoder, allow_pickle=allow_pickle, keep_meta=keep_meta, key_rule=key_rule)
        self._key_rule = key_rule
        self._index_url = index_url(name) if index else ""
        self._storage_options = storage_options
        super().__init__(
            target,
            packer,
            END,
            checks_keys=key_rule is not None,
            compress=compress,
            storage_options=storage_options,
            digest=digest,
        )

    def close(self) -> None:
        """Finish the shard, give it its name, set ``info``, and write the index.

        Raises:
            ShardWriteError: the shard cannot be finished and was removed, or the command has failed.
            MissingSidecarError: the shard is finished, but its index cannot be written.
        """
        if self._closed:
            return
        super().close()
        if self._index_url and self._key_rule is not None and self.info is not None:
            index = index_from_layout(
                self.layout,
                self.info,
                end=self.size,
                compression=self._compression and self._compression.name,
                key_rule=self._key_rule,
            )
            write_index(index, self._index_url, storage_options=self._storage_options)
