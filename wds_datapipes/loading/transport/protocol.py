"""The protocol of the socket between two processes: headers, and the messages that they announce.

The socket preserves message boundaries (``SOCK_SEQPACKET``): a message arrives completely or not at all, even if the
sender is killed. The body of a large message stays in shared memory; only its header is sent.
"""

from __future__ import annotations

import enum
import errno
import socket
import struct
from typing import NamedTuple

#: The maximum size of items sent through the socket itself, and of the records of pipeline positions, in bytes.
INLINE = 16 * 1024

#: The size of a number in the table of the items of a message, in bytes.
NUMBER = 8


class Kind(enum.IntEnum):
    """A kind of message from a process with items."""

    #: The descriptor of the sender's `StatusPage`.
    STATUS = 1
    #: Some items: a table, their pickles, and their large arrays, which are in a segment. The table lists the length of
    #: each pickle and, if there are arrays, the number of arrays of each item, and the position and size of each array.
    #: The other kinds have the same form, with one item or none.
    ITEMS = 2
    #: Some small items of plain values: the table, which holds only the length of a pickle, and the pickle of their
    #: list.
    PLAIN_ITEMS = 7
    #: The end of the items of the epoch.
    END = 3
    #: The end of the items because of an exception, in pickled form.
    ERROR = 4
    #: The items that the process has skipped so far.
    COUNTERS = 5
    #: Long records of the pipeline's position after each of the next items, or, without a number of items, after the
    #: last one.
    STATE = 6


class Command(enum.IntEnum):
    """A command to the sending process."""

    #: The number of messages of this epoch taken so far, and the segments returned, or, as complements, dropped.
    TAKEN = 1
    #: Begin an epoch.
    RESET = 2
    #: A part of the data of the next command, which does not fit into one message.
    PART = 3


class Header(NamedTuple):
    """The fixed part of a message, which announces its body.

    Attributes:
        kind: a `Kind` or a `Command`.
        epoch: the epoch that it belongs to.
        number: the number of items, or of messages taken.
        arrays: the number of their arrays.
        segment: the segment that holds the arrays and, unless it follows the header, the rest of the body; or -1.
        begin: the position in the segment of the rest of the body, which follows the arrays.
        size: the size of the body, including the arrays, in bytes.
        records: the size of the records of these items, in bytes. They follow the header, before the body.
    """

    kind: int
    epoch: int = 0
    number: int = 0
    arrays: int = 0
    segment: int = -1
    begin: int = 0
    size: int = 0
    records: int = 0


HEADER = struct.Struct("=IIQIiQQI")

#: The maximum size of a message with a command.
COMMAND_BYTES = 64 * 1024


def new_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket that preserves message boundaries.

    Raises:
        NotImplementedError: the system does not support such sockets.
    """
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT):
            raise
        raise NotImplementedError(
            f"ShardReadingService requires Unix sockets that preserve message boundaries, as on Linux ({error}). "
            "Use num_workers=0 here, or torchdata's MultiProcessingReadingService."
        ) from error
