"""Retry policy: which failures of a store are transient, and how long to wait before the next attempt."""

from __future__ import annotations

import errno
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from ssl import SSLCertVerificationError
from typing import TypeVar

from wds_datapipes.errors import CorruptShardError, ReadLimitError

__all__ = [
    "NO_RETRIES",
    "RetryPolicy",
    "concerns_all",
    "is_systemic",
    "is_transient",
    "is_untrusted",
    "status_of",
    "was_replaced",
]

T = TypeVar("T")

LOGGER = logging.getLogger("wds_datapipes")

#: HTTP statuses of a server that has too much to do, or is being restarted.
PASSING = {408, 425, 429, 500, 502, 503, 504}
#: HTTP statuses of a server, or of a proxy, that does not accept the credentials.
REFUSED = {401, 403, 407}
#: Errors that no waiting cures.
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, SSLCertVerificationError)
#: Modules whose errors tell of connections, unless they carry a status.
NETWORK = (
    *("aiohttp.", "asyncio.", "azure.core.", "botocore.", "fsspec.", "http.client.", "httpcore", "httpx", "paramiko."),
    *("requests.", "urllib3."),
)
#: Classes there that tell of the request.
OF_THE_REQUEST = (
    *("InvalidURL", "InvalidUrl", "ParamValidation", "Certificate", "FileExpired", "BadHostKey", "IncompatiblePeer"),
)
#: Parts of their names where it tells of the credentials.
OF_THE_USER = ("Credentials", "Authentication", "PasswordRequired")
#: What these say where the connection broke before there was an answer.
MEANWHILE = ("Authentication timeout", "transport shut down or saw EOF")
#: Texts in the errors of a server whose certificate is not trusted.
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "not found in known_hosts")

#: Errors of this host: no disk space or quota, too many open files, no memory.
OF_THE_HOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: At most this many causes of an error are examined.
DEPTH = 8

#: The first pause is up to so long, in seconds, and each up to twice as long as the one before,
FIRST_S = 0.25
#: and never longer than this, unless the server asks for it.
MOST_S = 30.0
#: The first retries, which are not logged.
QUIET = 4


class RetryPolicy:
    """Retries of one shard: how often, and how long to wait.

    Pauses are random, so that a thousand readers that were refused at once do not come back at once.

    Args:
        retries: the number of retries, in all.
        most_s: the most seconds to pause, in all.
        pause: waits for a number of seconds; ``time.sleep`` by default.
        silent_s: give up after this many seconds without a response, however many retries are left.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        retries: int,
        most_s: float,
        pause: Callable[[float], object] | None = None,
        *,
        silent_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retries = retries
        self._left_s = most_s
        self._pause = time.sleep if pause is None else pause
        self._silent_s = silent_s
        self._tried = 0
        #: Returns the time in seconds.
        self.clock = clock

    def wait(self, error: Exception, what: str, since: float) -> bool:
        """Wait before the next attempt; return False if there is none.

        Args:
            error: what has failed.
            what: the shard and the place, for the log.
            since: when the `clock` has begun to wait for what has failed, at the first attempt. A store that answers,
                be it with an error, is alive, and is not given up for that time.
        """
        if self._tried >= self._retries or not is_transient(error):
            return False
        asked_s = retry_after(error)
        pause_s = random.uniform(0, min(FIRST_S * 2**self._tried, MOST_S)) if asked_s is None else asked_s
        is_silent = status_of(error) is None and self.clock() + pause_s - since > self._silent_s
        if pause_s > self._left_s or is_silent:
            return False
        self._tried += 1
        self._left_s -= pause_s
        LOGGER.log(
            logging.INFO if self._tried < QUIET else logging.WARNING,
            "%s: %s. Retrying in %.1f s (%d of %d)",
            *(what, type(error).__name__, pause_s, self._tried, self._retries),
        )
        self.sleep(pause_s)
        return True

    def sleep(self, seconds: float) -> None:
        """Pause before the next attempt."""
        self._pause(seconds)

    def call(self, attempt: Callable[[], T], what: str) -> T:
        """Return the result of ``attempt``, which is retried after transient errors.

        Raises:
            Exception: that of the last attempt.
        """
        since = self.clock()
        while True:
            try:
                return attempt()
            except Exception as error:  # noqa: PERF203  trying again is the point
                if not self.wait(error, what, since):
                    raise

    def attempts_text(self) -> str:
        """Return a text about the attempts so far."""
        return f". It was tried {self._tried + 1} times" if self._tried else ""


#: No retries.
NO_RETRIES = RetryPolicy(0, 0.0)


def is_transient(error: BaseException) -> bool:
    """Whether an error is transient.

    >>> is_transient(ConnectionResetError()), is_transient(FileNotFoundError()), is_transient(ValueError())
    (True, False, False)
    """
    if is_named(error, OF_THE_USER):
        return any(words in str(error) for words in MEANWHILE)
    if isinstance(error, LASTING) or is_named(error, OF_THE_REQUEST) or is_untrusted(error) or is_systemic(error):
        return False
    status = status_of(error)
    if status is not None:
        return status in PASSING
    if f"{type(error).__module__}.".startswith(NETWORK):
        return True
    # The file systems of fsspec put the errors of libraries into the words of the system.
    if error.__cause__ is not None and status_of(error.__cause__) is not None:
        return is_transient(error.__cause__)
    return isinstance(error, OSError | TimeoutError | EOFError)


def concerns_all(error: BaseException) -> bool:
    """Whether a store does not accept the credentials, has got none, or cannot be trusted, or this host is at its end.

    >>> concerns_all(PermissionError()), concerns_all(FileNotFoundError())
    (True, False)
    """
    refused = isinstance(error, PermissionError) or (is_named(error, OF_THE_USER) and not is_transient(error))
    return refused or status_of(error) in REFUSED or is_untrusted(error) or is_systemic(error)


def is_untrusted(error: BaseException | None) -> bool:
    """Whether the certificate of a server is not trusted; libraries wrap that error.

    >>> is_untrusted(SSLCertVerificationError()), is_untrusted(ConnectionResetError())
    (True, False)
    """
    for _ in range(DEPTH):
        if error is None or isinstance(error, SSLCertVerificationError):
            break
        if any(words in str(error) for words in UNTRUSTED) or type(error).__name__ == "BadHostKeyException":
            return True
        error = error.__cause__ or error.__context__
    return isinstance(error, SSLCertVerificationError)


def is_named(error: BaseException, words: Iterable[str]) -> bool:
    """Whether the name of an error's class contains one of some words."""
    return any(word in type(error).__name__ for word in words)


def was_replaced(error: BaseException) -> bool:
    """Whether a store refuses a part of a file, as the file is no longer what it was when it was opened."""
    return type(error).__name__ == "FileExpired" or status_of(error) == 412


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None; each library keeps it elsewhere."""
    response = getattr(error, "response", None)
    for found in (
        *((error, name) for name in ("status", "status_code", "code")),
        (response, "status_code"),
    ):
        status = getattr(*found, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
    return None


def retry_after(error: BaseException) -> float | None:
    """Return the seconds of a ``Retry-After``, or None."""
    headers = getattr(error, "headers", None) or {}
    text = headers.get("Retry-After") if hasattr(headers, "get") else None
    if not text:
        return None
    try:
        waits = float(text)
    except ValueError:
        try:
            waits = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, LookupError, OverflowError):
            return None
    return max(waits, 0.0) if math.isfinite(waits) else None


def is_systemic(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is one of the host, such as a full disk.

    >>> is_systemic(OSError(errno.EMFILE, "Too many open files")), is_systemic(FileNotFoundError())
    (True, False)
    """
    for _ in range(DEPTH):
        # A damaged header asks for more memory than there is, and the next shard does not.
        if error is None or isinstance(error, CorruptShardError | ReadLimitError):
            return False
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in OF_THE_HOST):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
