"""Everything that fsspec knows: ``http``, ``s3``, ``gs``, ``hf``, ``memory`` and many more."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it carries no types
from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]  # the same

from wds_datapipes.core.openers.patience import Patience, concerns_all
from wds_datapipes.core.openers.redaction import redact, secrets_in
from wds_datapipes.core.openers.schemes import known_schemes, split_scheme
from wds_datapipes.core.openers.steady import Opened, SteadyStream, version_of
from wds_datapipes.core.openers.web import WebOrigin
from wds_datapipes.core.optional import require
from wds_datapipes.errors import MissingDependency, ShardNotOpened, UnknownScheme

__all__ = ["hiding", "open_remote", "remote_filesystem"]

#: Scheme -> the package that it needs and the extra of ours that installs it.
EXTRAS = {
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
}

#: How much of a remote file is asked for in one request, in bytes, where the store is read by ranges.
BLOCK_BYTES = 8 << 20

#: How often a shard is asked for again, and how many seconds are waited for that, in all.
RETRIES, RETRY_S = 10, 300.0
#: What fsspec's file systems tell of the version of a file, each in its words.
VERSION_FACTS = (
    *("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "generation", "version_id"),
    *("blob_id", "created", "modified"),
)

#: The file systems that a process had when it was forked, and before that its parent.
_inherited: list[list[Any]] = []


def _hold() -> None:
    """Keep file systems in the process that will be forked, where fsspec drops them.

    That would close their connections, and the two processes share what the parent waits for answers with. The parent
    would no longer see that an answer has come, and wait until its time is up.
    """
    kinds = {*registry.values()}
    _inherited.append([instance for kind in kinds for instance in [*getattr(kind, "_cache", {}).values()]])


os.register_at_fork(before=_hold, after_in_parent=_inherited.pop)


def open_remote(
    url: str,
    /,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    retries: int = RETRIES,
    retry_s: float = RETRY_S,
    pause: Callable[[float], object] = time.sleep,
    **_options: object,
) -> BinaryIO:
    """Open a file of a file system that fsspec knows, for reading from its begin to its end.

    Args:
        url: ``scheme://...``.
        storage_options: passed to the file system: credentials, an endpoint and so on. None of it is ever printed.
        timeout_s: the seconds without a byte after which a web server has failed.
        retries: how often it is asked for again, in all.
        retry_s: how many seconds are waited for that, in all.
        pause: waits for so many seconds.
    """
    options = storage_options or {}
    hide = hiding(options)
    filesystem, path = remote_filesystem(url, options)
    scheme, _ = split_scheme(url)
    is_web = scheme in ("http", "https")
    origin = WebOrigin(filesystem, path, options, timeout_s) if is_web else FileOrigin(filesystem, path)
    patience = Patience(retries, retry_s, pause)
    try:
        stream = SteadyStream(origin, hide(url), lambda error: reason(error, scheme, hide), patience)
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        told = f"{reason(error, scheme, hide)}{patience.told()}"
        refused = ShardNotOpened(f"{hide(url)} cannot be opened: {told}")
        refused.concerns_all = concerns_all(error)
        raise refused from None
    return cast(BinaryIO, stream)


class FileOrigin:
    """A file of fsspec, from any byte on.

    Args:
        filesystem: its file system.
        path: where it is there.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path

    def open_at(self, start: int) -> Opened:
        """Open the file at a byte, or at its beginning where one cannot seek."""
        if start and callable(forget := getattr(self._filesystem, "invalidate_cache", None)):
            forget()  # or it would tell what it was told before
        file = self._filesystem.open(self._path, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        details = getattr(file, "details", None)
        details = details if isinstance(details, Mapping) else {}
        version = version_of(*(details.get(name) for name in VERSION_FACTS))
        if start:
            try:
                file.seek(start)
            except (AttributeError, OSError, ValueError):  # that of io.UnsupportedOperation, too
                start = 0
        return Opened(file, start, details.get("size"), version)


def remote_filesystem(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The file system of a URL and the path in it.

    Raises:
        UnknownScheme: fsspec does not know the scheme.
        MissingDependency: the scheme's package is not installed.
        ShardNotOpened: the file system refuses its options.
    """
    options = dict(storage_options or {})
    scheme, rest = split_scheme(url)
    if scheme in EXTRAS:
        package, extra = EXTRAS[scheme]
        require(package, extra=extra, purpose=f"read {scheme}: URLs")
    known = {*known_implementations, *registry}
    if scheme not in known:
        raise UnknownScheme(
            f"No opener answers for the scheme {scheme!r} of {redact(url)}. Known are {', '.join(known_schemes())} "
            f"and, by fsspec, {', '.join(sorted(known))}. Register your own with "
            f"register_opener({scheme!r}, function), or read the output of a command with pipe:COMMAND"
        )
    try:
        return cast("tuple[Any, str]", url_to_fs(f"{scheme}:{rest}", **options))
    except ImportError as error:
        raise MissingDependency(
            f"{redact(url)} cannot be read: {error}. Install the package that its file system needs"
        ) from error
    except Exception as error:  # noqa: BLE001  the same
        hide = hiding(options)
        raise ShardNotOpened(f"{hide(url)} cannot be opened: {reason(error, scheme, hide)}") from None


def hiding(storage_options: Mapping[str, Any]) -> Callable[[str], str]:
    """A `redact` that also hides every text in the options."""
    words = sorted({re.escape(secret) for secret in secrets_in(storage_options) if secret}, key=len, reverse=True)
    if not words:
        return redact
    secret = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)")
    return lambda text: redact(secret.sub("***", text))


def reason(error: Exception, scheme: str, hide: Callable[[str], str]) -> str:
    """What a file system's error says, in words and without credentials."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError):
        return "HTTP status 404, not found" if scheme in ("http", "https") else "there is no such file"
    if status is not None:
        return f"HTTP status {status}, {hide(str(getattr(error, 'message', '')))}"
    if isinstance(error, PermissionError):
        return f"permission denied ({hide(str(error))}). Check the credentials in storage_options or the environment"
    return f"{type(error).__name__}: {hide(str(error))}"
