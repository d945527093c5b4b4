"""Known stores: what this process has learned about each store from its answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from wds_datapipes.io.remote.overload import StoreLimit

#: A store is near if it has once sent the first bytes of a file after at most this many seconds.
NEAR_S = 0.005


@dataclass
class KnownStore:
    """A store that has answered.

    Attributes:
        is_near: whether a thread that waits for it would take more time than it saves.
        lacks_etags: whether it has sent a part of a file without a strong ETag, so that requesting a part first
            would take another request.
        limit: how many requests it serves at the same time.
    """

    is_near: bool = False
    lacks_etags: bool = False
    limit: StoreLimit = field(default_factory=StoreLimit)

    def note_answer(self, seconds: float) -> None:
        """Note after how many seconds it has sent the first bytes of a file."""
        self.is_near = self.is_near or seconds <= NEAR_S


_stores: dict[str, KnownStore] = {}


def known_store(name: str) -> KnownStore:
    """Return what is known about a store, which all readers of the process have in common."""
    return _stores.get(name) or _stores.setdefault(name, KnownStore())  # of several threads, one adds it


def forget_stores() -> None:
    """Forget all stores."""
    _stores.clear()
