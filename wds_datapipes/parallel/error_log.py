"""Error log: collects the errors skipped by many processes in the one that started them."""

from __future__ import annotations

import errno
import json
import secrets
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_datapipes.errors import WdsError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DaskErrorLog", "ErrorLog", "LoggedError", "message_of"]

#: Errors of the host rather than of a sample, such as a full disk.
HOST_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS, errno.EAGAIN,
}  # fmt: skip


class LoggedError(NamedTuple):
    """An error that was skipped: its class and its message."""

    kind: str
    message: str


class ErrorLog:
    """An ``on_error`` that skips bad samples and shards and records the errors, also in forked processes.

    Errors of the host, such as a full disk, are raised, since they would skip everything.

    Examples:
        >>> with ErrorLog() as log:
        ...     _ = log(ValueError("no number"))
        ...     log.read()
        [LoggedError(kind='ValueError', message='no number')]
    """

    def __init__(self) -> None:
        # A file without a name needs no cleanup, and forked processes inherit it.
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  __exit__ closes it

    def __call__(self, error: Exception) -> bool:
        """Record an error, and return True to continue."""
        if isinstance(error, MemoryError) or (not isinstance(error, WdsError) and _is_host_error(error)):
            raise error
        self._append({"kind": type(error).__name__, "message": message_of(error)})
        return True

    def read(self) -> list[LoggedError]:
        """Return the recorded errors without duplicates, as from a shard that was tried again."""
        return list(dict.fromkeys(LoggedError(each["kind"], each["message"]) for each in self._entries()))

    def _append(self, entry: dict[str, str]) -> None:
        self._file.write(f"{json.dumps(entry)}\n".encode())  # in one call, so that lines of processes do not mix

    def _entries(self) -> list[dict[str, str]]:
        self._file.seek(0)
        return [json.loads(line) for line in self._file.read().splitlines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class DaskErrorLog(ErrorLog):
    """An `ErrorLog` for the workers of a Dask cluster, which send errors to its scheduler.

    Args:
        client: reads the errors; copies on the workers do not need it.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._topic = f"wds-datapipes {secrets.token_hex(8)}"

    def _append(self, entry: dict[str, str]) -> None:
        from distributed import get_worker

        get_worker().log_event(self._topic, entry)

    def _entries(self) -> list[dict[str, str]]:
        return [event for _, event in self._client.get_events(self._topic)]

    def __getstate__(self) -> str:
        return self._topic

    def __setstate__(self, state: str) -> None:
        self._topic = state

    def __exit__(self, *_: object) -> None:
        pass


def message_of(error: BaseException) -> str:
    """Return the message of an error, with its notes if it is not an error of this package."""
    notes = () if isinstance(error, WdsError) else [str(note) for note in getattr(error, "__notes__", ())]
    return f"{error} ({'; '.join(notes)})" if notes else str(error)


def _is_host_error(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in HOST_ERRORS
