"""Time-outs and retries of stores, translated into the options of each library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wds_datapipes.arguments import check_optional_integer

#: A store has failed after this many seconds without a byte, unless its library has a default of its own.
TIMEOUT_S = 30.0
#: Retries for one shard, and the total seconds of their pauses.
RETRIES, RETRY_S = 10, 300.0
#: A store has failed after this many seconds without a response, or two time-outs if longer, even if retries remain.
SILENT_S = 60.0
#: The storage options that apply to every store, and are not passed to its library.
STORE_OPTIONS = ("timeout_s", "retries")
#: The total time-out of a request to Google Cloud Storage in seconds: aiohttp's default.
GOOGLE_REQUEST_S = 300.0


def split_timeouts(
    storage_options: Mapping[str, Any] | None, timeout_s: float | None = None, retries: int | None = None
) -> tuple[dict[str, Any], float | None, int]:
    """Split time-out and number of retries off from the storage options; the arguments take precedence.

    >>> split_timeouts({"anon": True, "timeout_s": 5, "retries": 2}, retries=3)
    ({'anon': True}, 5, 3)

    Args:
        storage_options: the storage options of a store.
        timeout_s: the seconds without a byte after which it has failed; None is the default of its library, or
            `TIMEOUT_S`.
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
    """Return the seconds without a response after which a store has failed."""
    return max(SILENT_S, 2 * timeout_s)


def with_timeouts(scheme: str, options: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """Return storage options with time-outs added, in the form that the library of a scheme expects.

    >>> with_timeouts("s3", {"anon": True}, 20)
    {'anon': True, 'config_kwargs': {'connect_timeout': 20, 'read_timeout': 20}}
    >>> with_timeouts("s3", {"config_kwargs": {"read_timeout": 5}}, 20)
    {'config_kwargs': {'connect_timeout': 20, 'read_timeout': 5}}

    Args:
        scheme: the scheme of the URL.
        options: the user's options, which take precedence.
        timeout_s: the time-out in seconds; None keeps a library's default, and is `TIMEOUT_S` for those without one.
    """
    if scheme in ("s3", "s3a") and timeout_s is not None:
        limits = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        return {**options, "config_kwargs": {**limits, **options.get("config_kwargs", {})}}
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
