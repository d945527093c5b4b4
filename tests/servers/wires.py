"""A connection between a client and a server that breaks after a number of bytes, in any protocol."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Cut", "Wire", "wire"]


class Cut(NamedTuple):
    """Where and how a connection breaks.

    Attributes:
        at: the number of bytes from the server before it breaks.
        how: ``"reset"`` the connection, ``"close"`` it, ``"stall"``, or ``"held"`` for a reset once the wire's
            `released` is set.
    """

    at: int
    how: str


class Wire:
    """Forwards bytes on each connection until its cut.

    Attributes:
        port: the port that it listens on.
        cuts: the cuts of the next connections, one after the other; None means no cut, as do all later connections.
        sent: the number of bytes from the server that each connection has forwarded, in order.
        released: lets held connections break.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()
        self.port = self._listener.getsockname()[1]
        self.cuts: list[Cut | None] = []
        self.sent: list[int] = []
        self.released = threading.Event()

    def serve(self) -> None:
        """Forward bytes until the connection is closed."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            cut = self.cuts.pop(0) if self.cuts else None
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            self.sent.append(0)
            self._threads.append(threading.Thread(target=self._pass_on, args=(client, server, cut, len(self.sent) - 1)))
            self._threads[-1].start()

    def close(self) -> None:
        """Break all connections, and wait for the threads that forward bytes."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._ending.set()
        self.released.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _pass_on(self, client: socket.socket, server: socket.socket, cut: Cut | None, number: int) -> None:
        others = {client: server, server: client}
        with contextlib.suppress(OSError, ValueError):
            while True:
                for source in select.select([*others], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError
                    if source is server and cut is not None:
                        data = data[: cut.at - self.sent[number]]
                    others[source].sendall(data)
                    if source is server:
                        self.sent[number] += len(data)
                    if cut is not None and self.sent[number] >= cut.at:
                        if cut.how == "stall":
                            self._ending.wait()
                        elif cut.how == "held":
                            self.released.wait()
                        if cut.how in ("reset", "held"):
                            # The system sends RST instead of FIN.
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        raise ConnectionResetError
        client.close()
        server.close()


@contextlib.contextmanager
def wire(server_port: int) -> Iterator[Wire]:
    """Run a wire to a server."""
    made = Wire(server_port)
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join()
