"""The command ``map``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from wds_datapipes import TarWriter, convert_shards
from wds_datapipes.parallel import executors
from wds_datapipes.redaction import redact_command
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard

Read = list[tuple[str, dict[str, bytes]]]

MODULE = """
from wds_datapipes import ShardList

def label(sample):
    if sample["cls"] == b"2":
        return None
    return {**sample, "label": b"n" + sample["cls"]}

def twice(sample):
    for number in range(2):
        yield {**sample, "__key__": f"{sample['__key__']}-{number}"}

def doubled(sample):
    return {"__key__": sample["__key__"], "cls": 2 * sample["cls"]}

def no_eleven(sample):
    if sample["__key__"] == "11":
        raise LookupError("no label\\\\x1b[31m")
    return sample

def last(samples):
    yield list(samples)[-1]

def full(sample):
    raise OSError(28, "No space left on device")

number = 7

class Maps:
    @staticmethod
    def same(sample):
        return sample
"""


@pytest.fixture(autouse=True)
def module(folder: Path) -> Iterator[None]:
    """Write a module to the current folder, under a name that no other test has imported."""
    Path("mapping.py").write_text(MODULE.replace("\\\\", "\\"))
    Path("broken.py").write_text("import nosuchpackage\n")
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("mapping", "broken"):
        sys.modules.pop(name, None)


def read(*urls: str) -> Read:
    samples = group_samples(read_shards(urls))
    return [(sample["__key__"], {f: v for f, v in sample.items() if f[:2] != "__"}) for sample in samples]


def written(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.tar")}


def test_map_equals_convert_shards_and_a_loop(program: Any, shards: list[str], nothing_left: None) -> None:
    def label(sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if sample["cls"] == b"2" else {**sample, "label": b"n" + sample["cls"]}

    Path("looped").mkdir()
    for shard in shards:
        with TarWriter(f"looped/{shard}") as target:
            for sample in group_samples(read_shards([shard])):
                if made := label(sample):
                    target.write(made)
    convert_shards(label, shards, "converted/")
    for workers in (0, 1, 2):
        done = program("map", "a-{0..2}.tar", "-f", "mapping:label", "-o", f"{workers}/", "--workers", str(workers))
        assert (done.code, done.err) == (0, "")
        assert done.lines[0] == f"{workers}/a-0.tar: 3 samples of 4 read, 9.73 kB"
        assert written(str(workers)) == written("converted") == written("looped")
        assert len(written(str(workers))) == 3


def test_a_command_is_the_same_in_any_number_of_processes(program: Any, shards: list[str], nothing_left: None) -> None:
    command = "test $(cat sample.cls) != 2 || { rm sample.*; exit; }; { printf n; cat sample.cls; } > sample.label"
    program("map", *shards, "-f", "mapping:label", "-o", "wanted/")
    for workers in ("0", "2"):
        done = program("map", *shards, "-c", command, "-o", f"{workers}/", "--workers", workers)
        assert (done.code, done.err) == (0, "")
        assert written(workers) == written("wanted")


def test_a_function_may_return_several_samples(program: Any, shards: list[str]) -> None:
    assert program("map", "a-0.tar", "-f", "mapping:twice", "-o", "f/").code == 0
    assert [key for key, _ in read("f/a-0.tar")] == [f"0{n}-{m}" for n in range(4) for m in range(2)]
    command = "for n in 0 1; do cp sample.cls sample-$n.cls; echo $(cat sample.__key__)-$n > sample-$n.__key__; done"
    done = program("map", "a-0.tar", "-m", command, "-o", "c/{name}.tar.gz")
    assert done.out == "c/a-0.tar.gz: 8 samples of 4 read, 181 B\n"
    assert read("c/a-0.tar.gz") == [(key, {"cls": fields["cls"]}) for key, fields in read("f/a-0.tar")]


def test_values_are_decoded_and_encoded_again(program: Any, shards: list[str]) -> None:
    assert program("map", *shards, "-f", "mapping:doubled", "-d", "basic", "-o", "o-%d.tar", "--workers", "0").code == 0
    assert read("o-1.tar") == [(f"1{n}", {"cls": str(2 * n).encode()}) for n in range(4)]


def test_a_function_gets_a_whole_shard(program: Any, shards: list[str]) -> None:
    assert (
        program("map", *shards, "-f", "mapping:last", "--whole-shards", "-o", "o/", "--index", "--workers", "0").code
        == 0
    )
    assert [key for key, _ in read("o/a-0.tar", "o/a-1.tar", "o/a-2.tar")] == ["03", "13", "23"]
    assert len(list(Path("o").iterdir())) == 7


def test_a_second_call_writes_the_missing_shards(program: Any, shards: list[str]) -> None:
    call = ["map", *shards, "-f", "mapping:Maps.same", "-o", "o/", "--workers", "0", "--json"]
    assert [shard["new"] for shard in json.loads(program(*call).out)["shards"]] == [True] * 3
    whole = written("o")
    Path("o/a-1.tar").unlink()
    facts = json.loads(program(*call).out)
    assert [shard["new"] for shard in facts["shards"]] == [False, True, False]
    assert facts["shards"][1]["source"] == "a-1.tar"
    assert facts["failed"] == facts["skipped"] == []
    assert written("o") == whole
    assert ", already finished" in program(*call[:-1]).lines[0]


@pytest.mark.parametrize("other", [["-f", "mapping:label"], ["-c", ":"]])
def test_another_function_is_an_error_or_redoes_everything(program: Any, shards: list[str], other: list[str]) -> None:
    program("map", *shards, "-c", "echo x > sample.x", "-o", "o/", "--workers", "0")
    before = written("o")
    done = program("map", *shards, *other, "-o", "o/", "--workers", "0")
    assert done.code == 2
    assert "a-0.tar (another function), a-1.tar (another function)" in done.err
    assert "Use --if-changed redo to convert them again, --if-changed keep to keep them" in done.err
    assert program("map", *shards, *other, "-o", "o/", "--if-changed", "keep", "--workers", "0").code == 0
    assert written("o") == before
    assert program("map", *shards, *other, "-o", "o/", "--if-changed", "redo", "--workers", "0").code == 0
    assert written("o").keys() == before.keys()
    assert written("o") != before


def test_failed_shards_are_named_and_the_others_written(program: Any, shards: list[str], nothing_left: None) -> None:
    done = program("map", *shards, "-f", "mapping:no_eleven", "-o", "o/", "--shard-retries", "1")
    assert done.code == 1
    assert sorted(written("o")) == ["a-0.tar", "a-2.tar"]
    assert [line.partition(":")[0] for line in done.lines] == ["o/a-0.tar", "o/a-2.tar"]
    lines = done.err.splitlines()
    assert lines[0] == r"Warning: a-1.tar could not be converted, and will be retried: LookupError: no label\x1b[31m"
    assert lines[1].startswith(r"Error: a-1.tar: LookupError: no label\x1b[31m")
    assert lines[2:] == ["Error: 1 of 3 shards failed. Run the same command again to convert only the missing ones"]
    facts = json.loads(
        program("map", *shards, "-f", "mapping:no_eleven", "-o", "o/", "--shard-retries", "0", "--json").out
    )
    assert [shard["new"] for shard in facts["shards"]] == [False, False]
    assert [(each["source"], each["kind"]) for each in facts["failed"]] == [("a-1.tar", "LookupError")]


def test_bad_samples_are_skipped_and_reported_once(program: Any, shards: list[str], nothing_left: None) -> None:
    command = "echo no such label >&2; test $(cat sample.__key__) != 11"
    for workers in ("0", "2"):
        done = program("map", *shards, "-c", command, "-o", f"{workers}/", "--skip-bad", "--workers", workers)
        assert done.code == 0
        assert done.lines[1].startswith(f"{workers}/a-1.tar: 3 samples of 4 read")
        assert done.err == (
            f"Skipped: SampleSourceError: The command {redact_command(command)!r} exited with status 1 for the "
            f"sample '11' of a-1.tar. Its last output is: no such label\n"
        )
        assert [key for key, _ in read(f"{workers}/a-1.tar")] == ["10", "12", "13"]


def test_a_broken_shard_is_a_fault_or_skipped(program: Any, shards: list[str]) -> None:
    Path("a-1.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    call = ["map", *shards, "-c", ":", "-o", "o/", "--shard-retries", "0"]
    done = program(*call)
    assert done.code == 1
    assert "Error: a-1.tar: TruncatedShardError: a-1.tar ends " in done.err
    done = program(*call, "--skip-bad", "--json")
    assert done.code == 0
    assert [each["kind"] for each in json.loads(done.out)["skipped"]] == ["TruncatedShardError"]


def test_a_full_disk_is_not_a_bad_sample(program: Any, shards: list[str]) -> None:
    done = program("map", "a-0.tar", "-f", "mapping:full", "-o", "o/", "--skip-bad", "--shard-retries", "0")
    assert done.code == 1
    assert "OSError: [Errno 28] No space left on device" in done.err
    assert written("o") == {}


def test_hostile_names_write_nothing_outside(program: Any, folder: Path) -> None:
    names = [
        f"a.{'x' * 300}",
        f"b.{'../' * 10}{folder}/evil.txt",
        "c.x/../../../evil",
        "d..",
        "e.$(touch evil)",
        "f.\n",
    ]
    with TarWriter("h.tar", key_rule=None) as shard:
        for name in names:
            key, _, field = name.partition(".")
            shard.write({"__key__": key, field: b"evil"})
    before = sorted(path.name for path in folder.rglob("*"))
    done = program("map", "h.tar", "-c", "cat sample.* > /dev/null", "-o", "o/", "--skip-bad", "--json")
    facts = json.loads(done.out)
    assert facts["skipped"][0]["kind"] == "EncodeError"
    assert "file names have at most 255 bytes" in facts["skipped"][0]["message"]
    made = sorted(path.name for path in folder.rglob("*"))
    assert [name for name in made if name not in before] == ["o", "shards.journal"]
    assert read("o/h.tar")[-2:] == [("e", {"$(touch evil)": b"evil"}), ("f", {"\n": b"evil"})]


def test_a_cluster_does_the_same(program: Any, shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import LocalCluster

    monkeypatch.setattr(executors, "CONNECT_S", 600)  # of a busy machine
    program("map", *shards, "-f", "mapping:label", "-o", "wanted/")
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster:  # Dask has types in part
        on_it = ["--executor", "dask", "--address", cluster.scheduler_address]
        done = program("map", *shards, "-f", "mapping:label", "-o", "o/", *on_it)
        assert (done.code, done.err) == (0, "")
        assert written("o") == written("wanted")
        done = program("map", *shards, "-c", "test $(cat sample.__key__) != 11", "-o", "p/", "--skip-bad", *on_it)
        assert done.code == 0
        assert done.err.startswith("Skipped: SampleSourceError: ")
        assert done.err.count("\n") == 1
        assert sum(len(read(f"p/{shard}")) for shard in shards) == 11


#: The seconds for which commands sleep, by which those of this process are found.
LONG_S = f"600.{os.getpid()}"


def test_a_killed_process_is_replaced_and_leaves_nothing(program: Any, shards: list[str], nothing_left: None) -> None:
    """The first command kills the worker that runs it, and would keep its process group busy for a minute."""
    # $PPID is the process that ends the shell along with the worker; its own parent is the worker.
    kill = "kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)"
    command = f"mkdir {Path.cwd()}/once 2>/dev/null && {{ {kill}; sleep {LONG_S}; }}; :"
    place = Path("scratch")
    place.mkdir()
    before = tempfile.tempdir
    tempfile.tempdir = str(place)
    try:
        done = program("map", *shards, "-c", command, "-o", "o/")
    finally:
        tempfile.tempdir = before
    assert done.code == 0
    assert "will be retried: WorkerDiedError" in done.err
    assert [read(f"o/{shard}") for shard in shards] == [read(shard) for shard in shards]
    assert list(place.iterdir()) == []
    while any(each.info["cmdline"] == ["sleep", LONG_S] for each in psutil.process_iter(["cmdline"])):
        time.sleep(0.02)  # a killed process takes a moment to end


def test_ctrl_c_ends_commands_and_leaves_nothing(shards: list[str]) -> None:
    Path("scratch").mkdir()
    command = f"echo >> {Path('begun').absolute()}; sleep {LONG_S} & sleep {LONG_S}"
    call = [sys.executable, "-m", "wds_datapipes", "map", *shards, "-c", command, "-o", "o/"]
    running = subprocess.Popen(
        [*call, "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(Path("scratch").absolute())},
    )
    try:
        while not Path("begun").exists() or Path("begun").stat().st_size < 2:
            assert running.poll() is None
            time.sleep(0.02)
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=600)
    finally:
        running.kill()
    assert (running.returncode, said) == (130, b"Interrupted\n")
    assert len(family) >= 2
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert list(Path("scratch").iterdir()) == []
    assert [path.name for path in Path("o").iterdir()] == ["shards.journal"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-o o/", "map requires exactly one of --function, --command and --multi-command"),
        ("-o o/ -f a:b -c x", "map requires exactly one of"),
        ("-o o/ -f mapping", "--function must be MODULE:FUNCTION"),
        ("-o o/ -f mapping:1", "--function must be MODULE:FUNCTION"),
        ("-o o/ -f nosuchmodule:f", "No module named 'nosuchmodule', neither installed nor in "),
        ("-o o/ -f mapping:nope", "has no 'nope'"),
        ("-o o/ -f mapping:Maps.nope", "'Maps' (no file) has no 'nope'"),
        ("-o o/ -f mapping:number", "'mapping:number' is not a function, but int"),
        ("-o o/ -f mapping:label --command-timeout 3", "--command-timeout requires --command or --multi-command"),
        ("-o o/ -c : --command-timeout 0", "time limit must be positive"),
        ("-o o/ -c : -d pil", "--decode and --whole-shards require --function"),
        ("-o o/ -f mapping:label -d nosuchword", "--decode: there is no decoder 'nosuchword'"),
        ("-o o/ -c : --executor dask", "--executor dask and --address require each other"),
        ("-o o/ -c : --address x:1", "--executor dask and --address require each other"),
        ("-o o/ -c : -", "Standard input cannot be read again"),
        ("-o o.tar -c :", "o.tar"),
        ("-o ./ -c :", "would be overwritten"),
        ("-o o/ -c : --compress rar", "rar"),
        ("-o memory://o/ -c :", "journal"),
        ("-o o/ -c : none.tar", "none.tar"),
    ],
)
def test_wrong_use(program: Any, shards: list[str], arguments: str, message: str) -> None:
    done = program("map", "a-0.tar", *arguments.split())
    assert message in done.err
    assert done.code == (1 if "none.tar" in arguments else 2)
    assert done.err.count("\n") == 1 + 3 * ("none.tar" in arguments)


@pytest.mark.parametrize("output", ["file/", "file/deep/%d.tar", "/proc/none/"])
@pytest.mark.parametrize("command", ["map a-0.tar -c : -o OUTPUT", "create recipe recipe -o OUTPUT%d.tar"])
def test_a_folder_that_cannot_be_created_is_an_error_of_one_line(
    program: Any, shards: list[str], command: str, output: str
) -> None:
    Path("file").touch()
    Path("recipe").write_text("a.txt text:a\n")
    if "create" in command:
        output = output.removesuffix("%d.tar")
    done = program(*command.replace("OUTPUT", output).split())
    assert done.err.startswith(f"Error: The folder '{output.rpartition('/')[0]}' cannot be created: ")
    assert (done.code, done.err.count("\n")) == (1, 1)


def test_an_error_in_the_module_keeps_its_traceback(program: Any, shards: list[str]) -> None:
    with pytest.raises(ModuleNotFoundError, match="nosuchpackage"):
        program("map", "a-0.tar", "-o", "o/", "-f", "broken:f")


def test_mapped_shards_on_a_store_are_read_back(program: Any, folder: Path) -> None:
    build_shard("m.tar", [{"__key__": "a", "txt": "x"}])
    program("cat", "m.tar", "-o", "memory://in/m.tar")
    arguments = ["memory://in/m.tar", "-c", "cp sample.txt sample.b", "-o", "memory://out/", "--journal", "j"]
    assert program("map", *arguments, "--workers", "0").code == 0
    assert read("memory://out/m.tar") == [("a", {"txt": b"x", "b": b"x"})]
