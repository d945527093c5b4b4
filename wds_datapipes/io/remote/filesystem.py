"""Opener for remote files: web servers, and every file system of fsspec, such as ``s3``, ``gs`` and ``hf``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn, cast

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it carries no types
from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]  # the same

from wds_datapipes.counters import Counters
from wds_datapipes.errors import MissingDependencyError, ShardOpenError, UnknownSchemeError
from wds_datapipes.extras import require
from wds_datapipes.io.remote.fsspec_file import BLOCK_BYTES, FsspecSource
from wds_datapipes.io.remote.http import HttpClient, HttpSource, is_web
from wds_datapipes.io.remote.resuming_stream import ResumingStream, StreamSource
from wds_datapipes.io.remote.retry import NO_RETRIES, RetryPolicy, concerns_all, is_untrusted
from wds_datapipes.io.remote.sftp import connect, is_sftp
from wds_datapipes.io.remote.throughput import MonitoredSource, ThroughputMonitor
from wds_datapipes.io.remote.timeouts import StoreTimeouts, with_timeouts
from wds_datapipes.io.urls import known_schemes, split_scheme
from wds_datapipes.redaction import redact
from wds_datapipes.redaction.storage_options import raise_alone, redactor_of

__all__ = ["BLOCK_BYTES", "open_remote", "raise_open_error", "redactor_of", "remote_filesystem"]

#: Scheme -> the package that it needs, and the extra of wds-datapipes that installs it.
EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "az")),
    "hf": ("huggingface_hub", "hf"),
    **dict.fromkeys(("sftp", "ssh"), ("paramiko", "sftp")),
}

#: How to configure a private certificate authority, by default and by scheme.
AUTHORITY = "the environment variable SSL_CERT_FILE"
AUTHORITIES = {
    **dict.fromkeys(("http", "https"), 'storage_options={"ca_file": "authority.pem"}'),
    **dict.fromkeys(("s3", "s3a"), 'storage_options={"client_kwargs": {"verify": "authority.pem"}}'),
}

#: References to the file systems of the process that forks; a list of lists, since forked processes fork too.
_inherited: list[list[Any]] = []


def _hold_filesystems() -> None:
    """Hold references to the cached file systems during a fork, since fsspec drops them in the child.

    Dropping them would close connections and unregister them from the event poll that both processes share: the parent
    would miss responses until its time-out. fsspec drops them in a fork hook, so only a hook before it can hold them.
    """
    kinds = {*registry.values()}
    _inherited.append([instance for kind in kinds for instance in [*getattr(kind, "_cache", {}).values()]])


os.register_at_fork(before=_hold_filesystems, after_in_parent=_inherited.pop)


def open_remote(
    url: str,
    /,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
    pause: Callable[[float], object] | None = None,
    counters: Counters | None = None,
    **_options: object,
) -> BinaryIO:
    """Open a remote file for sequential reading.

    Args:
        url: ``scheme://...``.
        storage_options: passed to the file system, such as credentials and an endpoint. Never printed.
        timeout_s: see `StoreTimeouts`.
        retries: see `StoreTimeouts`.
        pause: sleeps for a number of seconds; ``time.sleep`` by default.
        counters: the counters of the pipeline that reads the file.

    Raises:
        ShardOpenError: the file cannot be opened.
    """
    options, timeouts = StoreTimeouts.split(storage_options, timeout_s, retries)
    hide, retry = redactor_of(options, url), timeouts.retry_policy(pause)
    filesystem, path = remote_filesystem(url, options, timeouts.timeout_s, retry)
    scheme, _ = split_scheme(url)
    monitor = ThroughputMonitor(hide(url), timeouts.seconds, counters)
    source: StreamSource = FsspecSource(filesystem, path, scheme, monitor)
    if is_web(scheme):
        source = MonitoredSource(HttpSource(filesystem, path), monitor)
    try:
        stream = ResumingStream(source, hide(url), lambda error: reason(error, scheme, hide), retry)
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        raise_open_error(error, hide(url), reason(error, scheme, hide), retry)
    return cast(BinaryIO, stream)


def remote_filesystem(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Args:
        url: ``scheme://...``.
        storage_options: the arguments of the file system.
        timeout_s: the seconds without a byte after which it has failed, unless ``storage_options`` set them.
        retry: the retries of file systems that connect immediately.

    Raises:
        UnknownSchemeError: fsspec does not know the scheme.
        MissingDependencyError: the scheme's package is not installed.
        ShardOpenError: the file system rejects its options, or cannot connect.
    """
    options, timeouts = StoreTimeouts.split(storage_options, timeout_s)
    timeout_s = timeouts.timeout_s
    scheme, rest = split_scheme(url)
    if scheme in EXTRAS:
        package, extra = EXTRAS[scheme]
        require(package, extra=extra, purpose=f"read {scheme}: URLs")
    known = {*known_implementations, *registry}
    if scheme not in known:
        raise UnknownSchemeError(
            f"There is no opener for the scheme {scheme!r} of {redact(url)}. Known schemes: "
            f"{', '.join(known_schemes())} and, by fsspec, {', '.join(sorted(known))}. Register your own with "
            f"register_opener({scheme!r}, function), or read the output of a command with pipe:COMMAND"
        )
    hide = redactor_of(options, url)
    retry = NO_RETRIES if retry is None else retry

    def create() -> tuple[Any, str]:
        if is_web(scheme):
            return HttpClient(scheme, options, timeouts.seconds), f"{scheme}:{rest}"
        arguments = with_timeouts(scheme, options, timeout_s)
        if is_sftp(scheme):
            return connect(f"{scheme}:{rest}", arguments)
        return cast("tuple[Any, str]", url_to_fs(f"{scheme}:{rest}", **arguments))

    try:
        filesystem, path = retry.call(create, f"{hide(url)} cannot be opened")
    except ImportError as error:
        raise MissingDependencyError(
            f"{redact(url)} cannot be read: {error}. Install the package that its file system needs"
        ) from error
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        raise_open_error(error, hide(url), reason(error, scheme, hide), retry)
    return filesystem, path


def raise_open_error(error: Exception, name: str, text: str, retry: RetryPolicy, where: str = "") -> NoReturn:
    """Raise `ShardOpenError` without chaining the library's error, which may contain credentials."""
    failed = ShardOpenError(f"{name} cannot be opened{where}: {text}{retry.attempts_text()}")
    failed.concerns_all = concerns_all(error)
    raise_alone(failed)


def reason(error: Exception, scheme: str, hide: Callable[[str], str]) -> str:
    """Return the message of a file system's error, without credentials."""
    status = getattr(error, "status", None)
    if is_untrusted(error) and is_sftp(scheme):
        return (
            f"the key of the server is not trusted ({hide(str(error))}). Compare it with the key that the owner of the "
            "server published, and add it to the file that storage_options['known_hosts'] names"
        )
    if is_untrusted(error):
        return (
            f"the certificate of the server is not trusted ({hide(str(error))}). If a private authority issued it, "
            f"name the file with the certificate of the authority: {AUTHORITIES.get(scheme, AUTHORITY)}"
        )
    if isinstance(error, FileNotFoundError):
        return "HTTP status 404, not found" if is_web(scheme) else "there is no such file"
    if status is not None:
        return f"HTTP status {status}, {hide(str(getattr(error, 'message', '')))}"
    if isinstance(error, PermissionError) or "AuthenticationEx" in type(error).__name__:
        return f"permission denied ({hide(str(error))}). Check the credentials in storage_options or the environment"
    return f"{type(error).__name__}: {hide(str(error))}"
