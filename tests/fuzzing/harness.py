"""Fuzz targets, and how their inputs are changed: by bytes, by fields of tar headers, by values of JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

BLOCK = 512


class Target(NamedTuple):
    """A reader of untrusted bytes.

    Attributes:
        name: the name on the command line.
        run: reads one input. It catches documented errors; any other error is a finding.
        seeds: creates the inputs from which others are made.
        tokens: the keywords of the format, for libFuzzer's dictionary.
        change: changes an input according to its format.
        rounds: how many changed inputs the test suite runs.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    tokens: Sequence[bytes]
    change: Callable[[bytes, Random], bytes]
    rounds: int


class Finding(AssertionError):
    """A violated property, although nothing was raised."""


class Escaped(BaseException):
    """An input started a process or opened a connection. No ``except Exception`` may hide that."""


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
    """Yield inputs made from the seeds of a target by one to four changes each, always the same ones."""
    rng, seeds = Random(f"{target.name} {seed}"), target.seeds()
    for _ in range(rounds):
        data = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = change_bytes(data, rng, target.tokens) if rng.random() < 0.4 else target.change(data, rng)
        yield data


#: Numbers at the limits of common types.
EDGES = [0, 1, 2, 127, 128, 255, 256, 511, 512, 513, 32767, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
EDGES += [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -512, -(1 << 31), -(1 << 63)]


def change_bytes(data: bytes, rng: Random, tokens: Sequence[bytes] = ()) -> bytes:
    """Change, insert or remove some bytes."""
    content = bytearray(data)
    at = rng.randrange(len(content) + 1)
    end = min(at + rng.choice((1, 1, 2, 4, 8, 64, 512)), len(content))
    what = rng.randrange(9)
    if what == 0 and at < len(content):
        content[at] ^= 1 << rng.randrange(8)
    elif what == 1:
        content[at:end] = rng.randbytes(end - at)
    elif what == 2:
        del content[at:end]
    elif what == 3:
        content[at:at] = content[at:end] * rng.choice((1, 2, 3))
    elif what == 4:
        del content[at:]
    elif what in (5, 6) and tokens:
        token = rng.choice(tokens)
        content[at : at + (len(token) if what == 5 else 0)] = token
    elif what == 7:
        size = rng.choice((2, 4, 8))
        number = (rng.choice(EDGES) + rng.choice((-1, 0, 1))) % (1 << 8 * size)
        content[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    else:
        content[at:end] = bytes([rng.choice((0, 32, 46, 47, 255))]) * (end - at)
    return bytes(content)


def change_after(start: int, tokens: Sequence[bytes] = ()) -> Callable[[bytes, Random], bytes]:
    """Return a function that changes the bytes from a position on."""
    return lambda data, rng: data[:start] + change_bytes(data[start:], rng, tokens)


ODD: list[Any] = [None, True, False, 0, 1, -1, 1.5, 1e308, float("inf"), float("nan"), "", "a", "0", "\0", "\ud800"]
ODD += ["..", "/", *EDGES, 10**30, [], {}, [[]], [0], {"a": 0}, {"": []}, [None] * 20, "x" * 1000]


def change_json(data: bytes, rng: Random) -> bytes:
    """Change, insert or remove one value or key of a JSON text; other texts are changed by bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(data, rng)
    if rng.random() < 0.02:
        return rng.choice((b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b""))
    return json.dumps(change_value(value, rng)).encode()


def change_value(value: Any, rng: Random) -> Any:
    """Return a value of JSON with one change somewhere in it."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return _other(value, rng)
    if isinstance(value, list):
        items = list(value)
        at = rng.randrange(len(items))
        what = rng.randrange(8)
        if what == 0:
            del items[at]
        elif what == 1:
            items.insert(at, items[rng.randrange(len(items))])
        elif what == 2:
            items.reverse()
        else:
            items[at] = change_value(items[at], rng)
        return items
    entries = dict(value)
    key = rng.choice(list(entries))
    what = rng.randrange(8)
    if what == 0:
        del entries[key]
    elif what == 1:
        entries[rng.choice(("", "a", "__class__", f"{key}s", rng.choice(list(entries))))] = entries[key]
    elif what == 2:
        entries[key] = entries[rng.choice(list(entries))]
    else:
        entries[key] = change_value(entries[key], rng)
    return entries


def _other(value: Any, rng: Random) -> Any:
    what = rng.randrange(6)
    if what == 0 and isinstance(value, int):
        return value + rng.choice((-512, -1, 1, 512, 1 << 40))
    if what == 0 and isinstance(value, str):
        return change_bytes(value.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "replace")
    if what == 1 and isinstance(value, dict | list):
        return list(value) if isinstance(value, dict) else dict.fromkeys(map(str, value), 0)
    return rng.choice(ODD)


#: The offsets and lengths of the fields of a tar header.
FIELDS = {"name": (0, 100), "size": (124, 12), "checksum": (148, 8), "kind": (156, 1), "link": (157, 100)}
FIELDS |= {"magic": (257, 8), "prefix": (345, 155)}
KINDS = b"01234567\0xgXLKSMDVNA\xff"
SIZES = [b"%011o\0" % size for size in (0, 1, 511, 512, 513, 1024, 10**6, 8**11 - 1)]
SIZES += [
    b"",
    b"-1",
    b" 7 ",
    b"9",
    b"0x10",
    b"\x80" + bytes(10) + b"\5",
    b"\xff" * 12,
    b"\x80" + b"\xff" * 11,
    b"\x80" + bytes(3) + b"\x7f" * 8,
]


def change_tar(data: bytes, rng: Random) -> bytes:
    """Change a field of a header, or the order of blocks."""
    content = bytearray(data)
    heads = [at for at in range(0, len(content) - BLOCK + 1, BLOCK) if content[at + 257 : at + 262] == b"ustar"]
    if not heads:
        return change_bytes(data, rng)
    at = rng.choice(heads)
    what = rng.randrange(10)
    if what == 0:
        blocks = content[at : at + BLOCK * rng.choice((1, 2, 3))]
        to = rng.choice(heads)
        content[to:to] = blocks
    elif what == 1:
        del content[at : at + BLOCK * rng.choice((1, 2))]
    elif what == 2:
        content[at : at + BLOCK] = bytes(BLOCK)
    else:
        field = rng.choice(("size", "size", "kind", "kind", "name", "magic", "prefix", "checksum"))
        place, length = FIELDS[field]
        if field == "size":
            value = rng.choice(SIZES)
        elif field == "kind":
            value = bytes([rng.choice(KINDS)])
        elif field in ("name", "prefix"):
            value = rng.choice(
                (b"", b"a.txt", b"a/", b"../../x", b"/etc/passwd", b"\xff\xfe.jpg", b"n" * length, b".a", b"__a__/b")
            )
        else:
            value = rng.choice((b"ustar\x0000", b"ustar  \0", b"", rng.randbytes(length)))
        content[at + place : at + place + length] = value[:length].ljust(length, b"\0")
    return bytes(content)


def with_checksums(archive: bytes) -> bytes:
    """Correct the checksum of each header of an archive, as far as headers can be located."""
    content = bytearray(archive)
    at = 0
    while at + BLOCK <= len(content):
        block = content[at : at + BLOCK]
        if any(block):
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            content[at : at + BLOCK] = block
            raw = bytes(block[124:136])
            digits = raw.partition(b"\0")[0].strip(b" ")
            size = int(digits, 8) if digits.isdigit() and not set(digits) & set(b"89") else 0
            if raw[0] == 0x80:
                size = int.from_bytes(raw[1:], "big")
            at += size + -size % BLOCK if block[156] not in b"123456" else 0
        at += BLOCK
    return bytes(content)
