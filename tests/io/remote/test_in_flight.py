"""Requests that another thread aborts: only theirs, whatever both threads do at the same moment."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import cast

import pytest
from site_server import Site

from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote.in_flight import abort_request, wait_for_headers
from wds_datapipes.io.remote.resuming_stream import ResumingStream

LIMIT_S = 300.0
#: How long a thread is given to do what it must not do.
MOMENT_S = 0.2


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_thread_that_has_ended_aborts_no_request_of_a_later_one_with_its_identifier(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, sent = threading.Thread(target=int), list[int]()

    def request() -> None:
        if threading.get_ident() == ended.ident:
            with wait_for_headers(pair[0]):
                abort_request(ended)
                sent.append(pair[0].send(b"not shut down"))

    for thread in (ended, *(threading.Thread(target=request) for _ in range(1000))):  # the first one has it
        thread.start()
        thread.join()
        monkeypatch.setattr(ended, "is_alive", lambda: True)  # as it was a moment ago
        if sent:
            break
    assert sent == [13]


@pytest.fixture
def on_shutdown(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[bool]]:
    """Return a function that calls another one in a thread while a socket is shut down, and notes whether it ends."""

    def call(function: Callable[[], object]) -> list[bool]:
        shut_down, ended = socket.socket.shutdown, list[bool]()

        def observed(sock: socket.socket, how: int) -> None:
            monkeypatch.setattr(socket.socket, "shutdown", shut_down)  # the server in this process may do so as well
            thread = threading.Thread(target=function)
            thread.start()
            thread.join(MOMENT_S)
            ended.append(not thread.is_alive())
            shut_down(sock, how)

        monkeypatch.setattr(socket.socket, "shutdown", observed)
        return ended

    return call


def test_a_request_ends_only_before_or_after_it_is_aborted(
    pair: tuple[socket.socket, socket.socket], on_shutdown: Callable[[Callable[[], object]], list[bool]]
) -> None:
    """Otherwise, the connection of a request that has just been answered could be aborted in another one."""
    waits, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def request() -> None:
        with wait_for_headers(pair[0]):
            waits.set()
            may_end.wait(LIMIT_S)
        has_ended.set()

    def end() -> None:
        may_end.set()
        has_ended.wait(LIMIT_S)

    ended = on_shutdown(end)
    thread = threading.Thread(target=request)
    thread.start()
    assert waits.wait(LIMIT_S)
    abort_request(thread)
    thread.join(LIMIT_S)
    assert ended == [False]
    assert has_ended.is_set()


def test_a_connection_is_kept_only_before_or_after_the_reading_of_its_answer_is_aborted(
    site: Site, on_shutdown: Callable[[Callable[[], object]], list[bool]]
) -> None:
    site.body = bytes(1000)
    with closing(cast(ResumingStream, open_url(site.url()))) as stream:
        assert len(stream.read(1000)) == 1000
        ended = on_shutdown(stream.close)
        stream.abandon()
    assert ended == [False]
    with closing(open_url(site.url(), retries=0)) as stream:
        assert len(stream.read()) == 1000
    assert len(site.accepted) == 2
