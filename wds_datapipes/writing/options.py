"""Options for writers, which determine how samples become the bytes of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_datapipes.arguments import checks_calls
from wds_datapipes.io.compression.formats import Compress, find_compression
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.header_writer import HeaderWriter
from wds_datapipes.writing.packer import Encoder, TarSamplePacker


@checks_calls
@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options for writing shards, of all functions and classes that write them.

    Args:
        user: the name of the owner of the files, whose ID is 0.
        group: the name of the group of the files, whose ID is 0.
        mode: the permissions of the files.
        mtime: the modification time of the files, in whole seconds since 1970.
        compress: ``"gz"``, ``"bz2"``, ``"xz"`` or ``"zst"``; ``True`` means ``"gz"``, ``False`` means none, and
            ``None`` selects by the name: ``.tar.gz``, ``.tgz`` and so on.
        encoder: ``True`` encodes values like ``wds_encode``; a dict passes it keyword arguments, such as ``{"jpg":
            {"quality": 90}}``; a function takes a sample and returns one whose values are bytes; with ``False`` or
            ``None``, all values must be bytes.
        keep_meta: also write the values of keys that begin with ``__``, except ``__key__``; they must be str or
            bytes.
        allow_pickle: allow codecs whose data can run code when it is decoded, as for ``wds_encode``.
        key_rule: the rule with which the shard will be read. Names that it would split differently are rejected, as are
            repeated keys. ``None`` disables both checks.
        storage_options: options for the file system of a URL.
        digest: compute the SHA-256 of each shard in a thread; by default, only `convert_shards` does. For large fields,
            this takes about as long as writing.
        index: write the `ShardIndex` of each shard next to it when it is finished. With ``digest``, the index includes
            the digest.

    Raises:
        ValueError, TypeError: an option is invalid.

    Examples:
        >>> from wds_datapipes import ShardWriter
        >>> options = WriteOptions(compress="gz", index=True, encoder={"jpg": {"quality": 90}})
        >>> with ShardWriter("train-%03d.tar.gz", maxcount=1000, options=options) as writer:
        ...     writer.write({"__key__": "a", "cls": 7})
        >>> [shard.samples for shard in writer.shards]
        [1]
    """

    user: str = ""
    group: str = ""
    mode: int = 0o644
    mtime: float = 0
    compress: Compress = None
    encoder: Encoder = True
    keep_meta: bool = False
    allow_pickle: bool = False
    key_rule: KeyRule | None = first_dot
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    digest: bool | None = None
    index: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.mtime):
            raise ValueError(f"mtime must be a number of seconds since 1970, not {self.mtime!r}")
        if self.index and self.key_rule is None:
            raise ValueError("index=True needs a key_rule, because the index records it")
        find_compression(self.compress, "")
        self.packer()

    @property
    def tar_settings(self) -> dict[str, Any]:
        """The options stored in each header."""
        return {"user": self.user, "group": self.group, "mode": self.mode, "mtime": int(self.mtime)}

    def packer(self) -> TarSamplePacker:
        """Return a packer, which turns samples into the bytes of a shard."""
        headers = HeaderWriter(**self.tar_settings)
        return TarSamplePacker(
            headers, self.encoder, allow_pickle=self.allow_pickle, keep_meta=self.keep_meta, key_rule=self.key_rule
        )


#: The default options.
DEFAULT_WRITING = WriteOptions()
