"""Keys and fields that attack a terminal, a page, a shell or a file system, in all output of the commands."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.tools.cli.steps import row_of
from wds_datapipes.tools.runs.steps import StepSample

#: Each is the name of a file in a shard, up to its first dot.
KEYS = {
    "colours": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "csi": "\x9b2J",
    "bell": "a\x07b\x08c",
    "lines": "one\ntwo\rthree",
    "separators": "a\u2028b\u2029c\x85d",
    "reversed": "abc\u202egnp",
    "isolated": "a\u2066b\u2069",
    "script": "<script>alert(1)</script>",
    "quotes": "\"'><img src=x onerror=alert(1)>",
    "markup": "[bold red]x[/] [link=file:///etc/passwd]y[/link]",
    "shell": "$(touch owned);`touch owned`|touch owned&",
    "option": "--checkpoint-action=exec=touch owned",
    "template": "{number}{0!r}%s%d",
    "long": "k" * 4000,
}
#: Characters that no output may contain: controls other than newlines, and those that change the direction of text.
DANGEROUS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def shard(folder: Path) -> str:
    path = folder / "hostile.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for key in KEYS.values():
            for field, data in (("txt", b"\x1b[31mtext<script>"), ("json", b'{"a": "\\u001b[31m<b>"}')):
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path.name


@pytest.mark.parametrize(
    "arguments",
    [
        "ls {}",
        "show {}",
        "show {} --number 3",
        "stats {}",
        "verify {}",
        "cat {} -o out.tar",
        "split {} -o out-%d.tar --maxcount 2",
        "split {} --part a=1 --part b=1 -o out-{{part}}-%d.tar",
        "shuffle {} -o out-%d.tar",
        "sort {} --by key -o out-%d.tar",
        "cat {} -o out.tar --on-error=skip --rename json=txt",
        "index {}",
    ],
)
def test_a_terminal_receives_no_control_characters(arguments: str, shard: str, program: Any) -> None:
    done = program(*arguments.format(shard).split())
    assert done.code in (0, 1, 2)
    assert not DANGEROUS.search(done.out + done.err), (done.out + done.err).encode("unicode_escape")
    assert not list(Path().rglob("owned"))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_the_table_of_steps_has_no_control_characters(key: str) -> None:
    assert not DANGEROUS.search("".join(row_of(0, StepSample(0, 0, "", f"{key}.tar", 0, key, 0, False))))


def test_json_contains_the_keys_unchanged(shard: str, program: Any) -> None:
    done = program("ls", shard, "--json")
    assert not DANGEROUS.search(done.out)
    assert [json.loads(line)["key"] for line in done.lines] == list(KEYS.values())


def test_a_command_finds_no_file_outside_its_folder(shard: str, program: Any) -> None:
    done = program(
        "map", shard, "-c", "ls > names; cp sample.txt sample.copy; rm names", "-o", "out/", "--num-workers", "0"
    )
    assert not DANGEROUS.search(done.out + done.err)
    assert done.code == 0, done.err
    assert not list(Path().rglob("owned"))
    with tarfile.open("out/hostile.tar") as archive:
        assert {name.rpartition(".")[0] for name in archive.getnames()} == set(KEYS.values())
