"""The memory of this process, as reported by Linux."""

from __future__ import annotations

from pathlib import Path

__all__ = ["in_use", "peak", "reset_peak"]


def in_use() -> int:
    """Return the current memory in bytes."""
    return _status("VmRSS")


def reset_peak() -> None:
    """Reset `peak` to the current memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """Return the peak memory since `reset_peak`, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(f"{name}:")[1].split()[0])
