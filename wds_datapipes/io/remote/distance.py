"""Distance of stores: how soon each has answered a request, which decides whether reading ahead pays off."""

from __future__ import annotations

#: A store is near if it has once sent the first bytes of a file after at most this many seconds.
NEAR_S = 0.005

_near_stores: set[str] = set()


def note_answer(store: str, seconds: float) -> None:
    """Note after how many seconds a store has sent the first bytes of a file."""
    if seconds <= NEAR_S:
        _near_stores.add(store)


def is_near(store: str) -> bool:
    """Whether a store is near, so that a thread that waits for it would take more time than it saves."""
    return store in _near_stores


def forget_distances() -> None:
    """Forget all answers."""
    _near_stores.clear()
