"""The protocol of the socket between two processes: headers, and the messages that they announce.

The socket keeps messages apart (``SOCK_SEQPACKET``): a message arrives whole or not at all, also from a process that is
killed while it sends. A large one stays in shared memory, and only its header is sent.
"""

from __future__ import annotations

import enum
import errno
import socket
import struct
from typing import NamedTuple

__all__ = [
    "AHEAD_BYTES",
    "COMMAND_BYTES",
    "HEADER",
    "INLINE",
    "MESSAGE_BYTES",
    "Command",
    "Header",
    "Kind",
    "new_channel",
]

#: So many bytes may be on their way, or waiting to be used, before a worker makes no more; two messages always may.
AHEAD_BYTES = 64 * 1024 * 1024

#: Up to this many bytes of items go through the socket itself, and of the records of where the pipeline is behind them.
INLINE = 16 * 1024


class Kind(enum.IntEnum):
    """What a process with items says."""

    STATUS = 1
    """Here is the descriptor of my `StatusPage`."""
    ITEMS = 2
    """Here are some items: the lengths of their pickles, where their arrays are, the pickles, the arrays."""
    END = 3
    """The epoch has no more of them."""
    ERROR = 4
    """Nor will there be any, because of the exception that is pickled here."""
    DONE = 5
    """I have done what I was told."""
    COUNTERS = 6
    """This is what I have passed over so far."""
    GIVEN_UP = 7
    """I no longer use this segment, which is free."""
    STATE = 8
    """Where the pipeline is behind each of the items that come next, if that is long; or, without any, behind those
    before."""


class Command(enum.IntEnum):
    """What it is told."""

    TAKEN = 1
    """So many messages of this epoch have been taken; these segments are free again, or, as complements, given up."""
    RESET = 2
    """Begin an epoch."""
    PAUSE = 3
    RESUME = 4
    LIMIT = 5


class Header(NamedTuple):
    """The fixed part of a message; what it announces is its body.

    Attributes:
        kind: a `Kind`, or a `Command`.
        epoch: the epoch that it belongs to.
        number: how many items there are, or how many messages have been taken.
        arrays: how many arrays belong to them.
        segment: which segment the body is in, or -1 if it follows the header.
        size: how long the body is, in bytes.
        records: how long the records of these items are, in bytes. They follow the header, before the body.
    """

    kind: int
    epoch: int = 0
    number: int = 0
    arrays: int = 0
    segment: int = -1
    size: int = 0
    records: int = 0


HEADER = struct.Struct("=IIQIiQI")

#: The largest message of either side.
MESSAGE_BYTES = HEADER.size + 2 * INLINE
COMMAND_BYTES = 64 * 1024


def new_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket that keeps messages apart.

    Raises:
        NotImplementedError: the system has none.
    """
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        if error.errno not in (errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT):
            raise
        raise NotImplementedError(
            f"ShardReadingService needs Unix sockets that keep messages apart, which Linux has ({error}). "
            "Use num_workers=0 here, or torchdata's MultiProcessingReadingService."
        ) from error
