"""A shell command that maps a sample, and its working folder."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from error_facts import naming

from wds_datapipes.errors import EncodeError, SampleSourceError
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.tools.prepare.shell_command import SampleCommand

SAMPLE: dict[str, Any] = {"__key__": "d/a", "__url__": "x.tar", "txt": b"a cat", "seg.png": b"\x89", "cls": b"7"}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put temporary folders in a separate location, which must be empty at the end."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


def run(command: str, **options: Any) -> Any:
    return SampleCommand(command, **options)(SAMPLE)


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("rm sample.txt", {"seg.png": b"\x89", "cls": b"7"}),
        (
            "tr a-z A-Z < sample.txt > sample.b; mv sample.cls sample.a",
            {"txt": b"a cat", "seg.png": b"\x89", "a": b"7", "b": b"A CAT"},
        ),
        (
            "rm sample.txt sample.cls; mv sample.seg.png sample.JPG; echo 1 > other; mkdir d; echo 2 > d/sample.x",
            {"jpg": b"\x89"},
        ),
        ("rm sample.*; printf x > sample.a.b.json.gz", {"a.b.json.gz": b"x"}),
        ('printf %s "$(cat sample.__key__)" > sample.txt; rm sample.seg.png sample.cls', {"txt": b"d/a"}),
        ("rm sample.*; printf x > sample.x; echo y > sample.__meta__", {"x": b"x"}),
    ],
)
def test_the_resulting_files_are_the_sample(command: str, fields: dict[str, bytes]) -> None:
    made = run(command)
    assert made == {"__key__": "d/a", "__url__": "x.tar", **fields}
    assert list(made)[2:] == list(fields)


def test_a_command_that_leaves_no_file_drops_the_sample() -> None:
    assert run("rm sample.*") is None
    assert run("rm sample.txt sample.cls sample.seg.png") is None
    assert run("rm sample.*; mkdir x", several=True) == []


def test_a_command_may_change_the_key() -> None:
    assert run("echo new > sample.__key__")["__key__"] == "new"
    assert run("rm sample.__key__")["__key__"] == "d/a"
    assert run(": > sample.__key__")["__key__"] == "d/a"


def test_several_samples_have_numbers_and_keys() -> None:
    made = run(
        "printf x > sample-2.txt; printf y > sample-10.txt; echo k > sample-10.__key__; printf z > sample-2.seg.png;"
        "printf n > sample-.txt; printf n > sample-a.txt",
        several=True,
    )
    assert made == [
        {"__key__": "d/a/000002", "__url__": "x.tar", "txt": b"x", "seg.png": b"z"},
        {"__key__": "k", "__url__": "x.tar", "txt": b"y"},
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo one; echo two >&2; exit 7", r"exited with status 7 for .* of x\.tar\. Its last output is: one\ntwo$"),
        ("exit 1", r"exited with status 1 .* It printed nothing\.$"),
        ("false | true", "exited with status 1"),
        ("nosuchcommand", "exited with status 127"),
        ("kill -9 $$", r"exited with status 137 \(signal 9\)"),
        ("yes | head -c 100000; echo the end; exit 2", r"the end$"),
        ("mkdir sample.d", "wrote 'sample.d', which is a folder"),
        ("ln -s /etc/passwd sample.x", "wrote 'sample.x', which is a link"),
        ("rm sample.txt; ln -s sample.cls sample.txt", "wrote 'sample.txt', which is a link"),
        ("mkfifo sample.f", "wrote 'sample.f', which is not a regular file"),
        ("printf x > sample.TXT", r"wrote 'sample\.(txt|TXT)' and another file for the field 'txt'"),
    ],
)
def test_a_fault_names_the_sample_and_what_is_wrong(command: str, message: str, nothing_left: None) -> None:
    with pytest.raises(SampleSourceError, match=f"(?s){message}") as caught:
        run(command)
    assert len(str(caught.value)) < 2500
    assert "'d/a' of x.tar" in str(caught.value)


#: Commands of this process are identified by this sleeping time in seconds.
LONG_S = f"600.{os.getpid()}"


def sleepers() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", LONG_S]]


def wait_until_ended() -> None:
    while sleepers():
        time.sleep(0.01)  # a killed process takes a moment to exit


@pytest.mark.parametrize("silent", ["", "exec >&- 2>&-;"])
def test_a_command_that_times_out_is_ended_with_all_its_children(silent: str, nothing_left: None) -> None:
    with pytest.raises(SampleSourceError, match=naming("0.2 s", "'d/a'")):
        run(f"{silent} trap '' TERM; sleep {LONG_S} & sleep {LONG_S}", timeout_s=0.2)
    wait_until_ended()


def test_background_processes_of_a_command_are_ended_and_not_waited_for(nothing_left: None) -> None:
    assert run(f"sleep {LONG_S} & printf x > sample.txt", timeout_s=600)["txt"] == b"x"
    wait_until_ended()


def test_a_command_that_closes_its_output_is_waited_for() -> None:
    assert run("exec >&- 2>&-; sleep 0.05; printf x > sample.txt")["txt"] == b"x"


def test_a_read_only_folder_is_removed() -> None:
    assert run("mkdir -p x/y; chmod 0 x/y; chmod 500 x") == SAMPLE


@pytest.mark.parametrize(
    "field", ["../x", "/etc/x", "a/b", "x\0y", "x" * 300, "\N{GREEK SMALL LETTER ALPHA}" * 130, "a/../../../tmp/x"]
)
def test_a_name_that_cannot_be_a_file_is_refused_before_anything_runs(field: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(EncodeError, match=r"(?s)of sample 'k' cannot be a file") as caught:
        SampleCommand(f"touch {ran}")({"__key__": "k", "__url__": "x.tar", "txt": b"", field: b"evil"})
    assert not ran.exists()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("field", ["..", ".", "-rf", "$(touch x)", "a b", "*", "\n", "\udcff", ";x"])
def test_an_unusual_name_is_just_a_file(field: str, scratch: Path) -> None:
    sample = {"__key__": "$(touch y)", "__url__": "x.tar", field: b"1"}
    assert SampleCommand("test $(ls -A | wc -l) -ge 2")(sample) == sample


def test_fields_are_bytes() -> None:
    with pytest.raises(TypeError, match=r"field 'cls' of sample 'a'.* is the int 7, but commands"):
        SampleCommand(":")({"__key__": "a", "__url__": "x.tar", "cls": 7})


def test_folders_of_killed_processes_are_removed(scratch: Path) -> None:
    command = SampleCommand(f"sleep {LONG_S}")
    child = os.fork()
    if child == 0:
        try:
            command(SAMPLE)
        finally:
            os._exit(0)
    while not sleepers():
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until_ended()
    SampleCommand(f"sleep {LONG_S}").remove_leftovers()  # another one, which belongs to another process
    assert len(list(scratch.iterdir())) == 1
    command.remove_leftovers()
    assert list(scratch.iterdir()) == []


def test_its_fingerprint_depends_on_what_it_does() -> None:
    same = fingerprint(SampleCommand("a"))
    assert same == fingerprint(SampleCommand("a"))
    others = [SampleCommand("b"), SampleCommand("a", several=True), SampleCommand("a", timeout_s=1)]
    assert len({same, *map(fingerprint, others)}) == 4
    assert pickle.loads(pickle.dumps(SampleCommand("printf x > sample.txt")))(SAMPLE)["txt"] == b"x"
