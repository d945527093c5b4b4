"""Remote file systems: web servers, and every file system of fsspec, such as ``s3``, ``gs`` and ``hf``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it carries no types
from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]  # the same

from wds_datapipes.arguments import check_optional_integer
from wds_datapipes.counters import Counters
from wds_datapipes.errors import MissingDependencyError, ShardOpenError, UnknownSchemeError, WdsError
from wds_datapipes.extras import require
from wds_datapipes.hints import REGION, Message
from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.daemon_threads import start_call, wait_for
from wds_datapipes.io.remote.http import HttpClient, is_web
from wds_datapipes.io.remote.retry import CREDENTIAL_STATUSES, RetryPolicy, concerns_all, is_untrusted
from wds_datapipes.io.urls import STORE_OPTIONS, known_schemes, split_scheme, store_of
from wds_datapipes.redaction import redact
from wds_datapipes.redaction.storage_options import raise_alone, redactor_of

T = TypeVar("T")

SFTP = ("sftp", "ssh")
#: Scheme -> the package that it needs, and the extra of wds-datapipes that installs it.
EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "az")),
    "hf": ("huggingface_hub", "hf"),
    **dict.fromkeys(SFTP, ("paramiko", "sftp")),
}

#: How to configure a private certificate authority, by default and by scheme.
AUTHORITY = "the environment variable SSL_CERT_FILE"
AUTHORITIES = {
    **dict.fromkeys(("http", "https"), 'storage_options={"ca_file": "authority.pem"}'),
    **dict.fromkeys(("s3", "s3a"), 'storage_options={"client_kwargs": {"verify": "authority.pem"}}'),
}

#: The end of a message about rejected credentials.
CREDENTIALS_ADVICE = ". Check the credentials in storage_options or the environment"

#: References to the file systems of the forking process; a list of lists, because forked processes may also fork.
_inherited: list[list[Any]] = []


def _hold_filesystems() -> None:
    """Hold references to the cached file systems during a fork, because fsspec drops them in the child.

    Dropping them would close connections and unregister them from the event poll that both processes share: the parent
    would miss responses until its timeout. fsspec drops them in a fork hook, so only a hook before it can hold them.
    """
    kinds = {*registry.values()}
    _inherited.append([instance for kind in kinds for instance in [*getattr(kind, "_cache", {}).values()]])


at_fork("file systems", before=_hold_filesystems, after_in_parent=_inherited.pop)


class RemotePath:
    """A path on a store, with its file system, its retries and its error messages, which contain no credentials.

    Args:
        url: ``scheme://...``.
        storage_options: options for the file system, such as credentials and an endpoint. They are never printed.
        timeout_s: see `split_timeouts`.
        retries: see `split_timeouts`.
        pause: sleeps for a number of seconds; ``time.sleep`` by default.
        counters: the counters of the pipeline that reads the file.

    Attributes:
        name: the URL without credentials.
        options: the storage options, without those of this package.
        store: the scheme and the host or bucket of the URL.
        filesystem: the file system.
        path: the path in it.

    Raises:
        UnknownSchemeError: fsspec does not know the scheme.
        MissingDependencyError: the scheme's package is not installed.
        ShardOpenError: the file system rejects its options, or cannot connect.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        retries: int | None = None,
        pause: Callable[[float], object] | None = None,
        counters: Counters | None = None,
        **_options: object,
    ) -> None:
        options, timeout_s, retries = split_timeouts(storage_options, timeout_s, retries)
        self.scheme, rest = split_scheme(url)
        self._unused: list[Any] = []
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self.options = options
        self.hide = redactor_of(options, url)
        self.name = self.hide(url)
        self.counters = Counters() if counters is None else counters
        self.store = store_of(self.name)
        on_retry = partial(self.counters.count_retry, f"retries/{self.store}")
        self.retry = RetryPolicy(retries, RETRY_S, pause, silent_s=silent_after(self.timeout_s), on_retry=on_retry)
        if self.scheme in EXTRAS:
            package, extra = EXTRAS[self.scheme]
            require(package, extra=extra, purpose=f"read {self.scheme}: URLs")
        known = {*known_implementations, *registry}
        if self.scheme not in known:
            raise UnknownSchemeError(
                f"There is no opener for the scheme {self.scheme!r} of {redact(url)}. The known schemes are "
                f"{', '.join(known_schemes())} and, through fsspec, {', '.join(sorted(known))}. Register your own with "
                f"register_opener({self.scheme!r}, function), or read the output of a command with pipe:COMMAND"
            )
        try:
            self._connect = partial(self._new_filesystem, f"{self.scheme}:{rest}", options, timeout_s)
            self.filesystem, self.path = self.call(self._connect)
        except ImportError as error:
            raise MissingDependencyError(
                f"{redact(url)} cannot be read: {error}. Install the package that its file system needs"
            ) from error
        except Exception as error:  # noqa: BLE001  every file system has its own errors
            raise_alone(self.open_error(error))

    def _new_filesystem(self, url: str, options: Mapping[str, Any], timeout_s: float | None) -> tuple[Any, str]:
        if is_web(self.scheme):
            return HttpClient(self.scheme, options, self.timeout_s), url
        arguments = with_timeouts(self.scheme, options, timeout_s)
        if self.scheme not in SFTP:
            return cast("tuple[Any, str]", url_to_fs(url, **arguments))
        from wds_datapipes.io.remote.sftp import connect  # imports paramiko

        filesystem, path = wait_for(start_call(partial(connect, url, arguments)), silent_after(self.timeout_s))
        filesystem.ftp.get_channel().settimeout(self.timeout_s)
        weakref.finalize(filesystem.ftp, filesystem.client.close)  # nothing else closes the connection
        self._unused.append(filesystem)
        return filesystem, path

    def filesystem_of_file(self) -> Any:
        """Return the file system for a new file.

        Each file on an SFTP server has its own connection, because paramiko mixes up the responses to two threads and
        does not recover from a broken connection.
        """
        if self.scheme not in SFTP:
            return self.filesystem
        try:
            return self._unused.pop()
        except IndexError:
            self._connect()
            return self._unused.pop()

    def call(self, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` and return its result; retry after transient errors.

        Raises:
            Exception: the error of the last attempt.
        """
        return self.retry.call(attempt, f"{self.name} cannot be opened")

    def forget_listing(self) -> None:
        """Drop the metadata that the file system may have cached."""
        with suppress(AttributeError, NotImplementedError):
            self.filesystem.invalidate_cache()

    def info(self) -> Mapping[str, Any]:
        """Return what the file system reports about the file.

        Raises:
            Exception: any error of the store's library.
        """

        def request() -> Any:
            self.forget_listing()
            return self.filesystem_of_file().info(self.path)

        # The timeouts of libraries hold for each byte, and a server may send a response byte by byte.
        return cast("Mapping[str, Any]", self.call(lambda: wait_for(start_call(request), silent_after(self.timeout_s))))

    def reason(self, error: Exception) -> str | Message:
        """Return the message of a file system's error, without credentials."""
        status, text = getattr(error, "status", None), self.hide(str(error))
        if is_untrusted(error) and self.scheme in SFTP:
            return (
                f"the key of the server is not trusted ({text}). Ask the server's administrator whether it is right, "
                'and add it to ~/.ssh/known_hosts or to a file that storage_options={"known_hosts": ...} names'
            )
        if is_untrusted(error):
            return (
                f"the certificate of the server is not trusted ({text}). If a private authority issued it, "
                f"name the file with the certificate of the authority: {AUTHORITIES.get(self.scheme, AUTHORITY)}"
            )
        if isinstance(error, FileNotFoundError):
            return "HTTP status 404, not found" if is_web(self.scheme) else "there is no such file"
        if status is not None:
            advice: str | Message = (
                "" if is_web(self.scheme) or status not in CREDENTIAL_STATUSES else CREDENTIALS_ADVICE
            )
            if region := getattr(error, "region", None):
                advice = Message(f". It is in the region {region}: ", REGION)
            return Message(f"HTTP status {status}, {self.hide(str(getattr(error, 'message', '')))}", advice)
        if isinstance(error, PermissionError) or "AuthenticationEx" in type(error).__name__:
            return f"permission denied ({text}){CREDENTIALS_ADVICE}"
        return f"{type(error).__name__}: {text}"

    @contextmanager
    def replace_errors(self, describe: Callable[[Exception], Exception]) -> Iterator[None]:
        """Replace a library's error, without chaining it, because it may contain credentials.

        Raises:
            WdsError: any error of this package.
        """
        try:
            yield
        except WdsError:
            raise
        except Exception as error:  # noqa: BLE001  every file system has its own errors
            raise_alone(describe(error))

    def open_error(self, error: Exception, where: str = "") -> ShardOpenError:
        """Return the error for a file that a library cannot open."""
        failed = ShardOpenError(
            f"{self.name} cannot be opened{where}: ", self.reason(error), self.retry.attempts_text()
        )
        failed.concerns_all = concerns_all(error)
        return failed


#: A store has failed if it sends no byte for this many seconds, unless its library has its own default.
TIMEOUT_S = 30.0
#: Retries for one shard, and the total seconds of their pauses.
RETRIES, RETRY_S = 10, 300.0
#: A store has failed if it does not respond for this many seconds or two timeouts, whichever is longer.
SILENT_S = 60.0
#: The total timeout of a request to Google Cloud Storage in seconds: aiohttp's default.
GOOGLE_REQUEST_S = 300.0


def split_timeouts(
    storage_options: Mapping[str, Any] | None, timeout_s: float | None = None, retries: int | None = None
) -> tuple[dict[str, Any], float | None, int]:
    """Separate the timeout and the number of retries from the storage options; the arguments take precedence.

    >>> split_timeouts({"anon": True, "timeout_s": 5, "retries": 2}, retries=3)
    ({'anon': True}, 5, 3)

    Args:
        storage_options: the storage options of a store.
        timeout_s: the number of seconds without a byte after which the store has failed; None means the default of its
            library, or else `TIMEOUT_S`.
        retries: the total number of retries for one shard.

    Raises:
        TypeError: ``retries`` is not an integer.
        ValueError: ``timeout_s`` is not a positive number, or ``retries`` is negative.
    """
    options = dict(storage_options or {})
    own_timeout, own_retries = (options.pop(name, None) for name in STORE_OPTIONS)
    timeout_s = own_timeout if timeout_s is None else timeout_s
    retries = own_retries if retries is None else retries
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    retries = check_optional_integer("retries", retries, 0)
    return options, timeout_s, RETRIES if retries is None else retries


def silent_after(timeout_s: float) -> float:
    """Return how many seconds a store may take to respond before it has failed."""
    return max(SILENT_S, 2 * timeout_s)


def with_timeouts(scheme: str, options: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """Add timeouts to storage options, in the form that the library of a scheme expects.

    >>> with_timeouts("s3", {"anon": True}, 20)
    {'anon': True, 'config_kwargs': {'signature_version': 's3v4', 'connect_timeout': 20, 'read_timeout': 20}}
    >>> with_timeouts("s3", {"config_kwargs": {"read_timeout": 5}}, 20)
    {'config_kwargs': {'signature_version': 's3v4', 'connect_timeout': 20, 'read_timeout': 5}}

    Args:
        scheme: the scheme of the URL.
        options: the user's options, which take precedence.
        timeout_s: the timeout in seconds; None means the default of the library, or `TIMEOUT_S` if it has none.
    """
    if scheme in ("s3", "s3a"):
        limits = {} if timeout_s is None else {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        # The default for URLs is an older signature, which newer buckets reject.
        own = {"signature_version": "s3v4", **limits}
        return {**options, "config_kwargs": {**own, **(options.get("config_kwargs") or {})}}
    seconds = TIMEOUT_S if timeout_s is None else timeout_s
    if scheme in ("gs", "gcs"):
        if "requests_timeout" in options or "timeout" in (options.get("session_kwargs") or {}):
            return dict(options)
        from aiohttp import ClientTimeout  # gcsfs uses aiohttp

        total = max(GOOGLE_REQUEST_S, seconds)
        return {**options, "requests_timeout": ClientTimeout(total=total, sock_connect=seconds, sock_read=seconds)}
    if scheme in ("sftp", "ssh"):
        names = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
        return {**dict.fromkeys(names, seconds), **options}
    if scheme in ("abfs", "abfss", "az") and timeout_s is not None:
        return {"connection_timeout": timeout_s, "read_timeout": timeout_s, **options}
    if scheme == "ftp" and timeout_s is not None:
        return {"timeout": timeout_s, **options}
    return dict(options)
