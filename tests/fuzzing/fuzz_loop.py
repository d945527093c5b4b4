"""Fuzz targets, and the mutation of their inputs: by bytes and words, or by JSON values."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple


def change_bytes(data: bytes, rng: Random, tokens: Sequence[bytes] = ()) -> bytes:
    """Replace, insert or remove some bytes."""
    at = rng.randrange(len(data) + 1)
    end = min(at + rng.choice((0, 1, 2, 8, 64, 512)), len(data))
    number = rng.choice((0, 1, 127, 1 << 31, 1 << 63)) + rng.choice((-1, 0, 1))
    parts = [
        b"",
        rng.randbytes(end - at),
        data[at:end] * 2,
        (number % (1 << 64)).to_bytes(8, rng.choice(("little", "big"))),
        bytes([rng.choice((0, 32, 46, 47, 255))]) * (end - at),
    ]
    return data[:at] + rng.choice([*parts, *tokens]) + data[end:]


ODD: list[Any] = [None, True, 0, 1, -1, 1.5, 1e308, float("inf"), float("nan"), "", "a", "0", "\0", "\ud800", "..", "/"]
ODD += [512, 1 << 31, 1 << 63, -(1 << 63), 10**30, [], {}, [[]], [0], {"a": 0}, [None] * 20, "x" * 1000]


def change_json(data: bytes, rng: Random) -> bytes:
    """Replace, copy or remove one value of a JSON text; other texts are changed by bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(data, rng, [b"[" * 100_000, b"1" * 5000])
    within = value
    while isinstance(within, dict | list) and within:
        keys = list(within) if isinstance(within, dict) else list(range(len(within)))
        key: Any = rng.choice(keys)
        if isinstance(within[key], dict | list) and rng.random() < 0.7:
            within = within[key]
            continue
        if rng.random() < 0.2:
            del within[key]
        else:
            within[key] = rng.choice([*ODD, within[rng.choice(keys)]])
        return json.dumps(value).encode()
    return json.dumps(rng.choice(ODD)).encode()


class Target(NamedTuple):
    """A reader of untrusted bytes.

    Attributes:
        name: the name on the command line.
        run: reads one input. It catches documented errors; any other error is a finding.
        seeds: creates the inputs from which others are made.
        rounds: how many changed inputs the test suite runs.
        tokens: the keywords of the format, also for libFuzzer's dictionary.
        change: changes an input according to its format.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    rounds: int
    tokens: Sequence[bytes] = ()
    change: Callable[[bytes, Random], bytes] = change_bytes


class Finding(AssertionError):
    """A property is violated, although no error was raised."""


class Escaped(BaseException):
    """An input started a process or opened a connection; no ``except Exception`` may hide this."""


_watched = threading.local()
_is_hooked = False
#: Actions that no input may cause: processes and connections.
FORBIDDEN = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"}
FORBIDDEN |= {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto"}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FORBIDDEN and getattr(_watched, "on", False):
        raise Escaped(f"{event} {arguments!r:.200}")


@contextmanager
def confined() -> Iterator[None]:
    """Raise `Escaped` if the code that runs here starts a process or connects to anything."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_watch)
        _is_hooked = True
    _watched.on = True
    try:
        yield
    finally:
        _watched.on = False


def run(target: Target, data: bytes) -> None:
    """Run one input of a target."""
    with confined():
        target.run(data)


def changed_inputs(target: Target, rounds: int, seed: int = 0) -> Iterator[bytes]:
    """Yield inputs made from the seeds of a target by one to four changes each, deterministically."""
    rng, seeds = Random(f"{target.name} {seed}"), target.seeds()
    for _ in range(rounds):
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.change(data, rng) if rng.random() < 0.6 else change_bytes(data, rng, target.tokens)
        yield data
