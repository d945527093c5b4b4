"""Remote file systems: web servers, and every file system of fsspec, such as ``s3``, ``gs`` and ``hf``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
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
from wds_datapipes.io.file_systems import file_system_of
from wds_datapipes.io.remote.retry import CREDENTIAL_STATUSES, RetryPolicy, concerns_all, is_untrusted
from wds_datapipes.io.timeouts import Timeouts
from wds_datapipes.io.urls import STORE_OPTIONS, known_schemes, split_scheme, store_of
from wds_datapipes.redaction import redact
from wds_datapipes.redaction.storage_options import raise_alone, redactor_of

T = TypeVar("T")

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
        timeouts: the time limits.
        file_system: what is special about its file system.
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
        timeout_s: float | Timeouts | None = None,
        retries: int | None = None,
        pause: Callable[[float], object] | None = None,
        counters: Counters | None = None,
        **_options: object,
    ) -> None:
        options, timeouts, retries = split_timeouts(storage_options, timeout_s, retries)
        self.scheme, rest = split_scheme(url)
        self.file_system = file_system_of(self.scheme)
        self._unused: list[Any] = []
        self.timeouts = timeouts.resolve()
        self.options = options
        self.hide = redactor_of(options, url)
        self.name = self.hide(url)
        self.counters = Counters() if counters is None else counters
        self.store = store_of(self.name)
        on_retry = partial(self.counters.count_retry, f"retries/{self.store}")
        limits = self.timeouts
        self.retry = RetryPolicy(retries, limits.retry_s, pause, silent_s=limits.silent_s, on_retry=on_retry)
        if self.file_system.package:
            require(self.file_system.package, extra=self.file_system.extra, purpose=f"read {self.scheme}: URLs")
        known = {*known_implementations, *registry}
        if self.scheme not in known:
            raise UnknownSchemeError(
                f"There is no opener for the scheme {self.scheme!r} of {redact(url)}. The known schemes are "
                f"{', '.join(known_schemes())} and, through fsspec, {', '.join(sorted(known))}. Register your own with "
                f"register_opener({self.scheme!r}, function), or read the output of a command with pipe:COMMAND"
            )
        try:
            self._connect = partial(self._new_filesystem, f"{self.scheme}:{rest}", options, timeouts)
            self.filesystem, self.path = self.call(self._connect)
        except ImportError as error:
            raise MissingDependencyError(
                f"{redact(url)} cannot be read: {error}. Install the package that its file system needs"
            ) from error
        except Exception as error:  # noqa: BLE001  every file system has its own errors
            raise_alone(self.open_error(error))

    def _new_filesystem(self, url: str, options: Mapping[str, Any], timeouts: Timeouts) -> tuple[Any, str]:
        if self.file_system.is_web:
            from wds_datapipes.io.remote.http import HttpClient  # imports urllib3

            return HttpClient(self.scheme, options, self.timeouts), url
        arguments = self.file_system.set_timeouts(options, timeouts)
        if self.scheme == "hf" and (revision := arguments.pop("revision", None)) is not None:
            filesystem, path = url_to_fs(url, **arguments)  # it would ignore the option
            return filesystem, filesystem.resolve_path(path, revision=revision).unresolve()
        if not self.file_system.is_thread_bound:
            return cast("tuple[Any, str]", url_to_fs(url, **arguments))
        from wds_datapipes.io.remote.sftp import connect  # imports paramiko

        filesystem, path = wait_for(start_call(partial(connect, url, arguments)), self.timeouts.silent_s)
        filesystem.ftp.get_channel().settimeout(self.timeouts.response_s)
        weakref.finalize(filesystem.ftp, filesystem.client.close)  # nothing else closes the connection
        self._unused.append(filesystem)
        return filesystem, path

    def filesystem_of_file(self) -> Any:
        """Return the file system for a new file, with its own connection if threads may not share one."""
        if not self.file_system.is_thread_bound:
            return self.filesystem
        try:
            return self._unused.pop()
        except IndexError:
            self._connect()
            return self._unused.pop()

    def of_part(self) -> RemotePath:
        """Return this path for a part of the file, with retries of its own: an outage breaks all parts at once."""
        path = copy(self)
        path.retry = self.retry.renewed()
        return path

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
        return cast("Mapping[str, Any]", self.call(lambda: wait_for(start_call(request), self.timeouts.silent_s)))

    def reason(self, error: Exception) -> str | Message:
        """Return the message of a file system's error, without credentials."""
        status, text = getattr(error, "status", None), self.hide(str(error))
        if is_untrusted(error) and self.file_system.package == "paramiko":
            return (
                f"the key of the server is not trusted ({text}). Ask the server's administrator whether it is right, "
                'and add it to ~/.ssh/known_hosts or to a file that storage_options={"known_hosts": ...} names'
            )
        if is_untrusted(error):
            return (
                f"the certificate of the server is not trusted ({text}). If a private authority issued it, "
                f"name the file with the certificate of the authority: {self.file_system.authority}"
            )
        if isinstance(error, FileNotFoundError):
            return "HTTP status 404, not found" if self.file_system.is_web else "there is no such file"
        if status is not None:
            advice: str | Message = (
                "" if self.file_system.is_web or status not in CREDENTIAL_STATUSES else CREDENTIALS_ADVICE
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


#: Retries for one shard, by default.
RETRIES = 10


def split_timeouts(
    storage_options: Mapping[str, Any] | None, timeout_s: float | Timeouts | None = None, retries: int | None = None
) -> tuple[dict[str, Any], Timeouts, int]:
    """Separate the time limits and the number of retries from the storage options; the arguments take precedence.

    >>> options, timeouts, retries = split_timeouts({"anon": True, "timeout_s": 5, "retries": 2}, retries=3)
    >>> options, timeouts.response_s, retries
    ({'anon': True}, 5, 3)

    Args:
        storage_options: the storage options of a store.
        timeout_s: the time limits; a number stands for ``Timeouts(response_s=number)``.
        retries: the total number of retries for one shard.

    Raises:
        TypeError: ``retries`` is not an integer.
        ValueError: ``timeout_s`` is not a positive number, or ``retries`` is negative.
    """
    options = dict(storage_options or {})
    own_timeout, own_retries = (options.pop(name, None) for name in STORE_OPTIONS)
    timeouts = Timeouts.of(own_timeout if timeout_s is None else timeout_s)
    retries = check_optional_integer("retries", own_retries if retries is None else retries, 0)
    return options, timeouts, RETRIES if retries is None else retries
