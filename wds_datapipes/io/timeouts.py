"""Time limits for stores: connecting, responses, stalled connections, retries, idle connections and signatures."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from wds_datapipes.arguments import checks_calls

#: The defaults of the limits that follow from others: the time to connect, at most that for a response; the time for a
#: response; the shortest time after which a silent store is given up; the shortest total time of a request.
CONNECT_S, RESPONSE_S, SILENT_S, REQUEST_S = 10.0, 30.0, 60.0, 300.0
#: By default, this many times ``response_s`` is the limit of a block that a library reads or writes, and of a silent
#: store.
BLOCK_RESPONSES, SILENT_RESPONSES = 10, 2


@checks_calls
@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits for stores, in seconds.

    Pass it as ``timeout_s`` to ``.load_wds_shards()`` or ``.load_wds_records()``, or with this key in
    ``storage_options`` to all that read and write; a number there stands for ``Timeouts(response_s=number)``. A request
    that exceeds a limit is retried.

    Args:
        connect_s: the connect time-out: how long connecting to a server may take, including the answer of a proxy and
            the handshake of TLS. By default 10, or ``response_s`` if that is less; the libraries of stores have their
            own default, or ``response_s`` if it is given.
        response_s: how long a store may take to send its headers, or from one byte to the next. By default 30, or the
            default of the library of a store.
        stalled_s: for how long a connection may deliver less than 1 KiB per second before a new one replaces it. By
            default ``response_s``.
        block_s: how long the library of a store may take for a block of 8 MiB that it reads or 16 MiB that it writes,
            with its own retries. By default ten times ``response_s``.
        request_s: how long a request of the library of Google Cloud Storage may take altogether. By default 300, or
            ``response_s`` if that is more.
        silent_s: after how long without any response a store has failed, even if retries remain. By default 60, or
            twice ``response_s`` if that is more.
        retry_s: the total time of the pauses between the retries of a shard. By default 300.
        idle_s: how long a process keeps a connection without a request open. By default 15.
        signature_s: how long the signature of a request to S3, Google Cloud Storage or Azure is valid. By default 3600.
        signing_s: after how long requests are signed again, at most half of ``signature_s``, and 180 for a token. By
            default 300.

    Raises:
        ValueError: a limit is not a positive number.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("a.tar", [{"__key__": "a", "txt": "one"}])
        >>> timeouts = Timeouts(connect_s=3, response_s=60)
        >>> [member.name for member in ShardList(shard).load_wds_shards(timeout_s=timeouts)]
        ['a.txt']
    """

    connect_s: float | None = None
    response_s: float | None = None
    stalled_s: float | None = None
    block_s: float | None = None
    request_s: float | None = None
    silent_s: float | None = None
    retry_s: float = 300.0
    idle_s: float = 15.0
    signature_s: float = 3600.0
    signing_s: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name))

    @classmethod
    def of(cls, value: float | Timeouts | None) -> Timeouts:
        """Return the limits that a ``timeout_s`` stands for.

        Raises:
            ValueError: it is not a positive number.
        """
        if isinstance(value, Timeouts):
            return value
        check_seconds("timeout_s", value)
        return cls(response_s=value)

    def resolve(self) -> ResolvedTimeouts:
        """Return a number for each limit."""
        response = RESPONSE_S if self.response_s is None else self.response_s
        defaults = {
            "connect_s": min(CONNECT_S, response),
            "response_s": response,
            "stalled_s": response,
            "block_s": BLOCK_RESPONSES * response,
            "request_s": max(REQUEST_S, response),
            "silent_s": max(SILENT_S, SILENT_RESPONSES * response),
        }
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return ResolvedTimeouts(**vars(replace(self, **missing)))


@dataclass(frozen=True, kw_only=True)
class ResolvedTimeouts:
    """`Timeouts` with a number for each limit."""

    connect_s: float
    response_s: float
    stalled_s: float
    block_s: float
    request_s: float
    silent_s: float
    retry_s: float
    idle_s: float
    signature_s: float
    signing_s: float


def check_seconds(name: str, value: object) -> None:
    """Raise a `ValueError` unless a value is a positive number of seconds or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if value is not None and not is_number:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
