"""Retry policy: which failures of a store are transient, and how long to wait before the next attempt."""

from __future__ import annotations

import errno
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from copy import copy
from email.utils import parsedate_to_datetime
from ssl import SSLCertVerificationError
from typing import TypeVar

from wds_datapipes.errors import CorruptShardError, ReadLimitError, ShardOpenError

T = TypeVar("T")

LOGGER = logging.getLogger("wds_datapipes")

#: HTTP statuses that mean that a server is overloaded or restarting.
TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
#: HTTP statuses that mean that a server or proxy rejects the credentials.
CREDENTIAL_STATUSES = {401, 403, 407}
#: Errors that a retry cannot resolve.
PERMANENT_ERRORS = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, SSLCertVerificationError),
    ShardOpenError,  # the attempts to open the shard have failed already
)
#: Modules whose errors are connection errors, unless they carry a status.
NETWORK_MODULES = (
    *("aiohttp.", "asyncio.", "azure.core.", "botocore.", "fsspec.", "http.client.", "httpcore", "httpx", "paramiko."),
    *("requests.", "urllib3."),
)
#: Parts of the class names of those modules' errors about the request.
REQUEST_ERRORS = (*("InvalidURL", "InvalidUrl", "ParamValidation", "Certificate", "FileExpired", "IncompatiblePeer"),)
#: Parts of the class names of those modules' errors about the credentials.
CREDENTIAL_ERRORS = ("Credentials", "Authentication", "PasswordRequired")
#: Texts in credential errors whose cause is a broken connection.
CONNECTION_TEXTS = ("Authentication timeout", "transport shut down or saw EOF")
#: Texts in errors of a server whose certificate or key is not trusted.
UNTRUSTED_TEXTS = ("CERTIFICATE_VERIFY_FAILED", "not found in known_hosts", "Host key for server")

#: Errors of this host: no space or quota left on the disk, too many open files, or no memory.
HOST_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: At most this many causes of an error are examined.
DEPTH = 8

#: The upper bound of the first pause in seconds, which doubles with each retry.
FIRST_S = 0.25
#: The maximum of this bound; a server may request a longer pause.
MAX_S = 30.0
#: Retries are logged as INFO before this one, and as WARNING from it on.
WARN_FROM = 4


class RetryPolicy:
    """Retries of one shard: exponential backoff with jitter, within a budget of retries and seconds.

    Args:
        retries: the total number of retries.
        most_s: the total number of seconds to pause.
        pause: sleeps for a number of seconds; ``time.sleep`` by default.
        silent_s: give up after this many seconds without a response, even if retries remain.
        on_retry: called before the pause of each retry.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        retries: int,
        most_s: float,
        pause: Callable[[float], object] | None = None,
        *,
        silent_s: float = math.inf,
        on_retry: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retries = retries
        self._most_s = self._remaining_s = most_s
        self._pause = time.sleep if pause is None else pause
        self._silent_s = silent_s
        self._on_retry = on_retry
        self._retried = 0
        self.clock = clock

    def renewed(self) -> RetryPolicy:
        """Return the same policy with all of its retries."""
        policy = copy(self)
        policy._retried, policy._remaining_s = 0, self._most_s
        return policy

    def wait(self, error: Exception, what: str, since: float) -> bool:
        """Wait before the next attempt; return False if there is none.

        Args:
            error: the error of the last attempt.
            what: the shard and the failed operation, for the log.
            since: the time of the first attempt, by `clock`. It does not count if the store responds with an error
                status, which shows that it is alive.
        """
        if self._retried >= self._retries or not is_transient(error):
            return False
        # A server may request no pause at all, or one that is over by its clock.
        pause_s = max(random.uniform(0, min(FIRST_S * 2**self._retried, MAX_S)), retry_after(error) or 0.0)
        is_silent = status_of(error) is None and self.clock() + pause_s - since > self._silent_s
        if pause_s > self._remaining_s or is_silent:
            return False
        self._retried += 1
        self._remaining_s -= pause_s
        LOGGER.log(
            logging.INFO if self._retried < WARN_FROM else logging.WARNING,
            "%s: %s. Retrying in %.1f s (%d of %d)",
            *(what, type(error).__name__, pause_s, self._retried, self._retries),
        )
        if self._on_retry is not None:
            self._on_retry()
        self.sleep(pause_s)
        return True

    def sleep(self, seconds: float) -> None:
        """Pause before the next attempt."""
        self._pause(seconds)

    def call(self, attempt: Callable[[], T], what: str) -> T:
        """Call ``attempt`` and return its result, with retries after transient errors.

        Raises:
            Exception: the error of the last attempt.
        """
        since = self.clock()
        while True:
            try:
                return attempt()
            except Exception as error:  # noqa: PERF203  the loop is for retries
                if not self.wait(error, what, since):
                    raise

    def attempts_text(self) -> str:
        """Return the number of attempts for an error message; "" if there was only one."""
        return f" ({self._retried + 1} attempts)" if self._retried else ""


def is_transient(error: BaseException) -> bool:
    """Whether an error is transient.

    >>> is_transient(ConnectionResetError()), is_transient(FileNotFoundError()), is_transient(ValueError())
    (True, False, False)
    """
    if is_named(error, CREDENTIAL_ERRORS):
        return any(words in str(error) for words in CONNECTION_TEXTS)
    if (
        isinstance(error, PERMANENT_ERRORS)
        or is_named(error, REQUEST_ERRORS)
        or is_untrusted(error)
        or is_systemic(error)
    ):
        return False
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT_STATUSES
    if f"{type(error).__module__}.".startswith(NETWORK_MODULES):
        return True
    # fsspec's file systems convert the errors of libraries into OSErrors.
    if error.__cause__ is not None and status_of(error.__cause__) is not None:
        return is_transient(error.__cause__)
    return isinstance(error, OSError | TimeoutError | EOFError)


def concerns_all(error: BaseException) -> bool:
    """Whether an error would affect every shard: credentials, an untrusted server, or exhausted resources of this host.

    >>> concerns_all(PermissionError()), concerns_all(FileNotFoundError())
    (True, False)
    """
    is_denied = isinstance(error, PermissionError) or (is_named(error, CREDENTIAL_ERRORS) and not is_transient(error))
    return is_denied or status_of(error) in CREDENTIAL_STATUSES or is_untrusted(error) or is_systemic(error)


def is_untrusted(error: BaseException | None) -> bool:
    """Whether the certificate or the key of a server is not trusted, even if a library has wrapped that error.

    >>> is_untrusted(SSLCertVerificationError()), is_untrusted(ConnectionResetError())
    (True, False)
    """
    for _ in range(DEPTH):
        if error is None or isinstance(error, SSLCertVerificationError):
            break
        if any(text in str(error) for text in UNTRUSTED_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return isinstance(error, SSLCertVerificationError)


def is_named(error: BaseException, words: Iterable[str]) -> bool:
    """Whether the class name of an error contains any of the words."""
    return any(word in type(error).__name__ for word in words)


def was_replaced(error: BaseException) -> bool:
    """Whether a store rejects a range request because the file was replaced since it was opened."""
    return type(error).__name__ == "FileExpired" or status_of(error) == 412


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None; its attribute depends on the library."""
    response = getattr(error, "response", None)
    for found in (*((error, name) for name in ("status", "status_code", "code")), (response, "status_code")):
        status = getattr(*found, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
    return None


def retry_after(error: BaseException) -> float | None:
    """Return the seconds in a ``Retry-After`` header, or None."""
    headers = getattr(error, "headers", None) or {}
    text = headers.get("Retry-After") if hasattr(headers, "get") else None
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, LookupError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def is_systemic(error: BaseException | None) -> bool:
    """Whether an error or its cause is a failure of this host, such as a full disk.

    >>> is_systemic(OSError(errno.EMFILE, "Too many open files")), is_systemic(FileNotFoundError())
    (True, False)
    """
    for _ in range(DEPTH):
        # A MemoryError that a damaged header causes affects only its shard.
        if error is None or isinstance(error, CorruptShardError | ReadLimitError):
            return False
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in HOST_ERRNOS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
