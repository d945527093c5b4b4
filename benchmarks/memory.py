"""How much memory this process has in use, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["in_use", "peak", "restart_peak"]


def in_use() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def restart_peak() -> None:
    """Let `peak` begin anew, from what is in use now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """The most bytes that were in memory since `restart_peak`."""
    return _status("VmHWM")


def _status(mark: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(f"{mark}:")[1].split()[0])
