"""Fingerprints change with code and values, and are the same in every process."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_datapipes
from wds_datapipes.fingerprint import fingerprint


def scaled(factor: int, offset: int = 1) -> Callable[[int], int]:
    return lambda number: number * factor + offset


class Caller:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        return number * self.factor

    def method(self, number: int) -> int:
        return number + self.factor


class Unpicklable(Caller):
    def __init__(self, factor: int) -> None:
        super().__init__(factor)
        self.lock = threading.Lock()


def test_different_functions_have_different_fingerprints() -> None:
    makers: list[Callable[[], Any]] = [
        lambda: scaled(1),
        lambda: scaled(2),
        lambda: functools.partial(scaled, 2),
        lambda: functools.partial(scaled, factor=2),
        lambda: Caller(1),
        lambda: Caller(2),
        lambda: Caller(1).method,
        lambda: Caller(2).method,
        lambda: lambda number, by=2: number * by,
        lambda: lambda number, by=3: number * by,
        lambda: len,
        lambda: Unpicklable(1),
        lambda: lambda number: number in {1, 2},
        lambda: lambda number: number in {1, 3},
        lambda: lambda number: [(lambda n: n + 1)(number)],
        lambda: lambda number: [(lambda n: n + 2)(number)],
        lambda: functools.partial(re.sub, re.compile("a")),
        lambda: functools.partial(re.sub, re.compile("a", re.IGNORECASE)),
        lambda: functools.partial(print, file=io.BytesIO(b"1")),
        lambda: functools.partial(print, file=io.BytesIO(b"2")),
        lambda: types.MethodType(lambda _self: 1, Caller(1)),
        lambda: types.MethodType(lambda _self: 2, Caller(1)),
    ]
    prints = [fingerprint(make()) for make in makers]
    assert len(set(prints)) == len(makers)
    assert [fingerprint(make()) for make in makers] == prints


def test_a_constant_that_a_function_reads_counts() -> None:
    def reads(names: dict[str, Any]) -> str:
        names["__name__"] = "script"
        exec("def read(number):\n    return number, SIZE, calls\n", names)
        return fingerprint(names["read"])

    assert reads({"SIZE": 1, "calls": 1}) == reads({"SIZE": 1, "calls": 2}) != reads({"SIZE": 2, "calls": 1})


def test_an_object_without_a_value_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"An object of generator cannot be dist.* Give the class a method fing"):
        fingerprint(number for number in range(3))


#: This avoids importing the package, which takes seconds.
SCRIPT = """
import sys, types
package = sys.modules["wds_datapipes"] = types.ModuleType("wds_datapipes")
package.__path__ = [{folder!r}]
from wds_datapipes.fingerprint import fingerprint
{comment}
def keep(sample, words={{'a', 'b', 'c'}}):
    {comment}
    return sample['txt'] in {{'x', 'y', 'z'}} | words or 'é' in sample
print(fingerprint(keep, {{'words': frozenset(('one', 'two', 'three'))}}))
"""


def test_a_fingerprint_is_the_same_in_another_process_and_below_another_line(tmp_path: Path) -> None:
    script, prints = tmp_path / "script.py", set()
    for seed, comment in {"1": "", "2": "# another line"}.items():
        script.write_text(SCRIPT.format(folder=str(Path(wds_datapipes.__file__).parent), comment=comment))
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        prints.add(subprocess.run([sys.executable, script], env=environment, capture_output=True, check=True).stdout)
    (only,) = prints
    assert len(only) == 17


def test_long_lists_of_strings_are_digested_by_blocks_as_if_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"s3://bucket/train-{number:06d}.tar" for number in range(5000)]
    lists = [urls[:count] for count in (1001, 2000, 5000)]
    lists += [[*urls, last] for last in ("ü", "", "https://host/?token=x", "pipe:get --token x")]
    found = [*map(fingerprint, lists)]
    assert len({*found}) == len(lists)
    monkeypatch.setattr("wds_datapipes.fingerprint._digest_by_blocks", lambda _: None)
    assert [*map(fingerprint, lists)] == found
