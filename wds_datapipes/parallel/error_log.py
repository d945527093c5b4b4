"""What many processes have passed over, told to the one that has begun them."""

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

#: Errors of the host and not of a sample, which would be gone with more room or memory.
NOT_OF_A_SAMPLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS, errno.EAGAIN,
}  # fmt: skip


class LoggedError(NamedTuple):
    """An error that was passed over: its class and its message."""

    kind: str
    message: str


class ErrorLog:
    """An ``on_error`` that passes over bad samples and shards, and notes each, also in processes that are forked.

    Errors of the host, such as a full disk, are raised: they would pass over everything.

    Examples:
        >>> with ErrorLog() as notes:
        ...     _ = notes(ValueError("no number"))
        ...     notes.read()
        [LoggedError(kind='ValueError', message='no number')]
    """

    def __init__(self) -> None:
        # It has no name that could be left behind, and who is forked has it open.
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  __exit__ closes it

    def __call__(self, error: Exception) -> bool:
        """Note an error, and go on."""
        if isinstance(error, MemoryError) or (not isinstance(error, WdsError) and _is_of_the_host(error)):
            raise error
        self._note({"kind": type(error).__name__, "message": message_of(error)})
        return True

    def read(self) -> list[LoggedError]:
        """Return what was noted, the same once: a shard that was tried again has noted it each time."""
        return list(dict.fromkeys(LoggedError(each["kind"], each["message"]) for each in self._notes()))

    def _note(self, told: dict[str, str]) -> None:
        self._file.write(f"{json.dumps(told)}\n".encode())  # in one call, so that lines of processes do not mix

    def _notes(self) -> list[dict[str, str]]:
        self._file.seek(0)
        return [json.loads(line) for line in self._file.read().splitlines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class DaskErrorLog(ErrorLog):
    """The same on the workers of a Dask cluster, which tell its scheduler.

    Args:
        client: reads what was noted; the workers, to which this is sent, do without.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._topic = f"wds-datapipes {secrets.token_hex(8)}"

    def _note(self, told: dict[str, str]) -> None:
        from distributed import get_worker

        get_worker().log_event(self._topic, told)

    def _notes(self) -> list[dict[str, str]]:
        return [event for _, event in self._client.get_events(self._topic)]

    def __getstate__(self) -> str:
        return self._topic

    def __setstate__(self, state: str) -> None:
        self._topic = state

    def __exit__(self, *_: object) -> None:
        pass


def message_of(error: BaseException) -> str:
    """Return an error's message, with what was noted of the place where it was raised, unless it tells that itself."""
    notes = () if isinstance(error, WdsError) else [str(note) for note in getattr(error, "__notes__", ())]
    return f"{error} ({'; '.join(notes)})" if notes else str(error)


def _is_of_the_host(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in NOT_OF_A_SAMPLE
