"""Flow control: how many items a message has, and how far ahead of the loop worker processes run."""

from __future__ import annotations

#: The number of messages that each worker prefetches, and that all workers prefetch together, by default.
WORKER_PREFETCH, MAIN_PREFETCH = 10, 10

#: A worker pauses once this many bytes are in transit or waiting to be used, but not before this many messages.
AHEAD_BYTES, MIN_MESSAGES = 64 * 1024 * 1024, 2

#: The maximum number of items in a message.
MAX_TOGETHER = 256

#: Items share a message up to this many bytes: enough that the cost of a message hardly matters for images of 100 KB,
#: and little enough that the messages in transit fit into the processor's caches.
TOGETHER_BYTES = 512 * 1024

#: Items share a message until the next one does not fit, or until this long after the previous message, in seconds.
TOGETHER_S = 0.5e-3

#: While the pipeline is slow, a waiting message is sent after one to two of these periods, in seconds.
TICK_S = 2e-3

#: The number of calls in flight to each worker on another host; each is answered with a message.
CALLS_AHEAD = 4

#: A call of a worker on another host costs more than a message through a socket, so small items share it for longer.
CALL_TOGETHER_S = 10e-3

#: The maximum number of messages of the dispatching process that a worker has not used yet. They fit into the buffer of
#: the socket, so sending them never blocks.
DISPATCHED_MESSAGES = 4

#: The maximum number of items kept for a worker that has enough, while the dispatching process makes more for another.
MAX_KEPT = 10_000


def messages_ahead(num_workers: int, worker_prefetch: int, main_prefetch: int) -> int:
    """Return how many messages of a worker may be in transit or waiting to be used.

    >>> messages_ahead(4, WORKER_PREFETCH, MAIN_PREFETCH), messages_ahead(4, 0, 0)
    (14, 1)
    """
    return 1 + worker_prefetch + -(-main_prefetch // num_workers)


def items_together(worker_prefetch: int) -> int:
    """Return how many small items may share a message: one, if a worker may not run ahead."""
    return MAX_TOGETHER if worker_prefetch else 1
