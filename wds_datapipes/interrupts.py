"""Deferred signals, for moments at which their exception would be lost or would leave something behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupts(number: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Defer a signal, by default Ctrl-C.

    Python drops exceptions raised during a fork, and the new process would print a traceback. A forked process must set
    its own handler. Other resources may lack an owner that removes them when an exception is raised.
    """
    before = signal.getsignal(number)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(number, before)
    if received:
        signal.raise_signal(number)
