"""After how many seconds without a byte a file system gives up, which each library has to be told in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["TIMEOUT_S", "set_timeout", "with_timeouts"]

#: The seconds without a byte after which a store has failed, where its library has no opinion.
TIMEOUT_S = 60.0
#: How long a request to Google's store may take in all, in seconds, as aiohttp has it.
GOOGLE_REQUEST_S = 300.0


def with_timeouts(scheme: str, options: Mapping[str, Any], timeout_s: float | None) -> dict[str, Any]:
    """Return storage options with time-outs, where the user's say nothing about them.

    >>> with_timeouts("s3", {"anon": True}, 20)
    {'anon': True, 'config_kwargs': {'connect_timeout': 20, 'read_timeout': 20}}
    >>> with_timeouts("s3", {"config_kwargs": {"read_timeout": 5}}, 20)
    {'config_kwargs': {'connect_timeout': 20, 'read_timeout': 5}}

    Args:
        scheme: of the URL.
        options: those of the user.
        timeout_s: what the user has asked for; None leaves libraries their own, and sets one for those without.
    """
    if scheme in ("s3", "s3a") and timeout_s is not None:
        asked = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        return {**options, "config_kwargs": {**asked, **options.get("config_kwargs", {})}}
    seconds = TIMEOUT_S if timeout_s is None else timeout_s
    if scheme in ("gs", "gcs"):
        if "requests_timeout" in options or "timeout" in (options.get("session_kwargs") or {}):
            return dict(options)
        from aiohttp import ClientTimeout  # gcsfs is built upon it

        limits = ClientTimeout(total=max(GOOGLE_REQUEST_S, seconds), sock_connect=seconds, sock_read=seconds)
        return {**options, "requests_timeout": limits}
    if scheme in ("sftp", "ssh"):
        names = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
        return {**dict.fromkeys(names, seconds), **options}
    if scheme in ("abfs", "abfss", "az") and timeout_s is not None:
        return {"connection_timeout": timeout_s, "read_timeout": timeout_s, **options}
    if scheme == "ftp" and timeout_s is not None:
        return {"timeout": timeout_s, **options}
    return dict(options)


def set_timeout(scheme: str, filesystem: Any, timeout_s: float | None) -> None:
    """Set what no option of a file system sets: how long an open SFTP connection is waited for."""
    if scheme in ("sftp", "ssh"):
        filesystem.ftp.get_channel().settimeout(TIMEOUT_S if timeout_s is None else timeout_s)
