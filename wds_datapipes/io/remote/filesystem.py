"""Opener for remote files: web servers, and every file system of fsspec, such as ``s3``, ``gs`` and ``hf``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it carries no types
from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]  # the same

from wds_datapipes.errors import MissingDependencyError, ShardOpenError, UnknownSchemeError
from wds_datapipes.extras import require
from wds_datapipes.io.redaction import raise_alone, redact, redactor_of
from wds_datapipes.io.remote.fsspec_file import BLOCK_BYTES, FsspecSource
from wds_datapipes.io.remote.http import HttpClient, HttpSource, is_web
from wds_datapipes.io.remote.resuming_stream import ResumingStream, StreamSource
from wds_datapipes.io.remote.retry import NO_RETRIES, RetryPolicy, concerns_all, is_untrusted
from wds_datapipes.io.remote.sftp import connect, is_sftp
from wds_datapipes.io.remote.throughput import MonitoredSource, ThroughputMonitor
from wds_datapipes.io.remote.timeouts import StoreTimeouts, with_timeouts
from wds_datapipes.io.urls import known_schemes, split_scheme

__all__ = ["BLOCK_BYTES", "open_remote", "redactor_of", "remote_filesystem"]

#: Scheme -> the package that it needs and the extra of ours that installs it.
EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "az")),
    "hf": ("huggingface_hub", "hf"),
    **dict.fromkeys(("sftp", "ssh"), ("paramiko", "sftp")),
}

#: How an authority of one's own is made known to a file system.
AUTHORITY = "the environment variable SSL_CERT_FILE"
AUTHORITIES = {
    **dict.fromkeys(("http", "https"), 'storage_options={"ca_file": "authority.pem"}'),
    **dict.fromkeys(("s3", "s3a"), 'storage_options={"client_kwargs": {"verify": "authority.pem"}}'),
}

#: The file systems that a process had when it was forked, and before that its parent.
_inherited: list[list[Any]] = []


def _keep_filesystems() -> None:
    """Keep file systems in the process that will be forked, where fsspec drops them.

    That would close their connections, and the two processes share what the parent waits for answers with. The parent
    would no longer see that an answer has come, and wait until its time is up.
    """
    kinds = {*registry.values()}
    _inherited.append([instance for kind in kinds for instance in [*getattr(kind, "_cache", {}).values()]])


os.register_at_fork(before=_keep_filesystems, after_in_parent=_inherited.pop)


def open_remote(
    url: str,
    /,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
    pause: Callable[[float], object] | None = None,
    **_options: object,
) -> BinaryIO:
    """Open a file of a file system of fsspec, to read it from begin to end.

    Args:
        url: ``scheme://...``.
        storage_options: passed to the file system: credentials, an endpoint and so on. None of it is ever printed.
        timeout_s: see `StoreTimeouts`.
        retries: see `StoreTimeouts`.
        pause: waits for a number of seconds; ``time.sleep`` by default.
    """
    options, waiting = StoreTimeouts.split(storage_options, timeout_s, retries)
    hide, retry = redactor_of(options), waiting.retry_policy(pause)
    filesystem, path = remote_filesystem(url, options, waiting.timeout_s, retry)
    scheme, _ = split_scheme(url)
    monitor = ThroughputMonitor(hide(url), waiting.seconds)
    origin: StreamSource = FsspecSource(filesystem, path, scheme, monitor)
    if is_web(scheme):
        origin = MonitoredSource(HttpSource(filesystem, path), monitor)
    try:
        stream = ResumingStream(origin, hide(url), lambda error: reason(error, scheme, hide), retry)
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        told = f"{reason(error, scheme, hide)}{retry.attempts_text()}"
        refused = ShardOpenError(f"{hide(url)} cannot be opened: {told}")
        refused.concerns_all = concerns_all(error)
        raise_alone(refused)
    return cast(BinaryIO, stream)


def remote_filesystem(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
) -> tuple[Any, str]:
    """The file system of a URL and the path in it.

    Args:
        url: ``scheme://...``.
        storage_options: what the file system is made with.
        timeout_s: the seconds without a byte after which it has failed, where ``storage_options`` say nothing of that.
        retry: how often it is tried again to connect to it, for those which do that at once.

    Raises:
        UnknownSchemeError: fsspec does not know the scheme.
        MissingDependencyError: the scheme's package is not installed.
        ShardOpenError: the file system refuses its options.
    """
    options, waiting = StoreTimeouts.split(storage_options, timeout_s)
    timeout_s = waiting.timeout_s
    scheme, rest = split_scheme(url)
    if scheme in EXTRAS:
        package, extra = EXTRAS[scheme]
        require(package, extra=extra, purpose=f"read {scheme}: URLs")
    known = {*known_implementations, *registry}
    if scheme not in known:
        raise UnknownSchemeError(
            f"No opener answers for the scheme {scheme!r} of {redact(url)}. Known are {', '.join(known_schemes())} "
            f"and, by fsspec, {', '.join(sorted(known))}. Register your own with "
            f"register_opener({scheme!r}, function), or read the output of a command with pipe:COMMAND"
        )
    hide = redactor_of(options)
    retry = NO_RETRIES if retry is None else retry

    def make() -> tuple[Any, str]:
        if is_web(scheme):
            return HttpClient(scheme, options, waiting.seconds), f"{scheme}:{rest}"
        asked = with_timeouts(scheme, options, timeout_s)
        if is_sftp(scheme):
            return connect(f"{scheme}:{rest}", asked)
        return cast("tuple[Any, str]", url_to_fs(f"{scheme}:{rest}", **asked))

    try:
        filesystem, path = retry.call(make, f"{hide(url)} cannot be opened")
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact(url)} cannot be read: {error}. Install the package that its file system needs"
        ) from error
    except Exception as error:  # noqa: BLE001  the same
        refused = ShardOpenError(f"{hide(url)} cannot be opened: {reason(error, scheme, hide)}{retry.attempts_text()}")
        refused.concerns_all = concerns_all(error)
        raise_alone(refused)
    return filesystem, path


def reason(error: Exception, scheme: str, hide: Callable[[str], str]) -> str:
    """Return the message of a file system's error, without credentials."""
    status = getattr(error, "status", None)
    if is_untrusted(error) and is_sftp(scheme):
        return (
            f"it is not the server whose key is known ({hide(str(error))}). Compare the key with what its owner says, "
            "and put it into the file that storage_options['known_hosts'] names"
        )
    if is_untrusted(error):
        return (
            f"no authority that is trusted here vouches for its certificate ({hide(str(error))}). If that is one of "
            f"your own, name the file with its certificate: {AUTHORITIES.get(scheme, AUTHORITY)}"
        )
    if isinstance(error, FileNotFoundError):
        return "HTTP status 404, not found" if is_web(scheme) else "there is no such file"
    if status is not None:
        return f"HTTP status {status}, {hide(str(getattr(error, 'message', '')))}"
    if isinstance(error, PermissionError) or "AuthenticationEx" in type(error).__name__:
        return f"permission denied ({hide(str(error))}). Check the credentials in storage_options or the environment"
    return f"{type(error).__name__}: {hide(str(error))}"
