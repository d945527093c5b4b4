"""TarWriter: samples that it refuses, and what remains of an interrupted shard."""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from error_facts import naming
from process_stacks import runs

from wds_datapipes import ReadLimits, ShardList, ShardWriter, TarWriter, WriteOptions, last_dot
from wds_datapipes.errors import EncodeError, ShardWriteError, TruncatedShardError
from wds_datapipes.io.output.local import LocalSink
from wds_datapipes.tar.reader import read_members
from wds_datapipes.writing import ShardInfo, packer
from wds_datapipes.writing.closable_writer import OPEN
from wds_datapipes.writing.shard_file import ShardFile

SAMPLE = {"__key__": "a", "__url__": "elsewhere.tar", "txt": "a cat", "cls": 7}
LARGE = {"__key__": "large", "bin": bytes(3 << 20)}


pytestmark = pytest.mark.usefixtures("folder")

Forked = Callable[[Callable[[], object]], "int | None"]


def names(path: str) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def write_and_raise(target: Any, error: BaseException) -> None:
    with TarWriter(target) as shard:
        shard.write(LARGE)
        raise error


def files() -> list[str]:
    return sorted(os.listdir())


def test_a_shard_appears_under_its_name_when_it_is_complete() -> None:
    Path("s.tar").write_bytes(b"the shard of before")
    with TarWriter("s.tar") as shard:
        assert shard.write(SAMPLE) == 6
        shard.write(LARGE)
        assert Path("s.tar").read_bytes() == b"the shard of before"
        assert shard.info is None
    assert files() == ["s.tar"]
    assert names("s.tar") == ["a.txt", "a.cls", "large.bin"]
    assert shard.info == ShardInfo("s.tar", 2, os.path.getsize("s.tar"), "")
    assert os.stat("s.tar").st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
def test_the_digest_is_that_of_the_file_and_leaves_no_thread(name: str) -> None:
    threads = threading.active_count()
    rng = Random(0)
    with TarWriter(name, options=WriteOptions(digest=True)) as shard:
        shard.write(SAMPLE)
        for number, size in enumerate([3 << 20, *[100_000] * 25, 1 << 20, 40_000, 10]):  # alone and in batches
            shard.write({"__key__": f"{number}", "bin": rng.randbytes(size)})
    assert shard.info is not None
    told = subprocess.run(["sha256sum", name], capture_output=True, text=True, check=True).stdout.split()[0]
    assert shard.info == ShardInfo(name, 30, os.path.getsize(name), told)
    assert threading.active_count() == threads


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["s.tar", "s.tgz"])
def test_an_error_leaves_neither_a_partial_shard_nor_a_temporary_file(name: str, error: type[BaseException]) -> None:
    Path(name).write_bytes(b"the shard of before")
    with pytest.raises(error, match="broken off"):
        write_and_raise(name, error("broken off"))
    assert files() == [name]
    assert Path(name).read_bytes() == b"the shard of before"


def test_a_closed_shard_accepts_no_more_samples() -> None:
    with TarWriter("s.tar") as shard:
        shard.write(SAMPLE)
    shard.close()
    shard.discard()
    assert names("s.tar") == ["a.txt", "a.cls"]
    with pytest.raises(ValueError, match=r"'s\.tar' is closed"):
        shard.write(SAMPLE)


def test_a_dropped_writer_leaves_nothing_but_a_warning() -> None:
    shards = [TarWriter("s.tar")]
    shards[0].write(LARGE)
    with pytest.warns(UserWarning, match=naming("'s.tar'", "1 sample")):
        shards.clear()
    assert files() == []


def test_one_warning_is_enough_whichever_part_of_a_writer_is_discarded_first(recwarn: pytest.WarningsRecorder) -> None:
    writer = ShardWriter("s-%d.tar", verbose=False)
    writer.write(SAMPLE)
    shard = next(each for each in OPEN if isinstance(each, ShardFile) and each.samples)
    shard.abandon()
    writer.abandon()
    assert ["'s-0.tar' with 1 sample was discarded" in str(each.message) for each in recwarn] == [True]
    assert files() == []


UNCLOSED = """
from wds_datapipes import ShardWriter, TarWriter
from torch.utils.data.datapipes.iter import IterableWrapper

SAMPLES = [{"__key__": f"{number}", "txt": "text"} for number in range(5)]

def write():
    writer = MAKE
    for sample in SAMPLES:
        writer.write(sample)
    if WHERE == "kept":
        globals()["kept"] = writer
    elif WHERE == "cycle":
        writer.self = writer
    elif WHERE == "error":
        raise KeyError("an error of the user")
    elif WHERE == "fork":
        import os
        if os.fork():
            os.wait()
        else:
            import sys
            sys.exit()

write()
"""


@pytest.mark.parametrize(
    ("where", "make", "written", "lost"),
    [
        *((where, "TarWriter('s.tar')", [], r"The shard 's\.tar' with 5 samples was") for where in ("local", "kept")),
        *((where, "ShardWriter('s-%d.tar')", [], r"'s-0\.tar' with 5 samples was") for where in ("local", "cycle")),
        ("kept", "ShardWriter('s-%d.tar', maxcount=3)", ["s-0.tar"], r"'s-1\.tar' with 2 samples was"),
        ("kept", "ShardWriter('s-%d.tar', maxcount=5)", ["s-0.tar"], ""),
        ("error", "ShardWriter('s-%d.tar', resume='j')", ["j"], r"'s-0\.tar' with 5 samples was"),
        ("fork", "ShardWriter('s-%d.tar')", [], r"'s-0\.tar' with 5 samples was"),
    ],
)
def test_a_program_that_does_not_close_a_writer_is_warned(where: str, make: str, written: list[str], lost: str) -> None:
    code = UNCLOSED.replace("MAKE", make).replace("WHERE", repr(where))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (where == "error")
    assert len(re.findall(f"UserWarning: .*{lost} discarded, because the writer was not closed", done.stderr)) == bool(
        lost
    )
    assert done.stderr.count("Warning") == bool(lost)
    assert ("Traceback" in done.stderr) == (where == "error")
    assert files() == written


def write_and_be_killed() -> None:
    shard = TarWriter("s.tar")
    shard.write(LARGE)
    os.kill(os.getpid(), signal.SIGKILL)


def test_leftovers_of_a_killed_process_are_removed_by_the_next_writer(forked: Forked) -> None:
    assert forked(write_and_be_killed) == -signal.SIGKILL
    [left] = files()
    assert left.startswith("s.tar.")
    with TarWriter("s.tar") as shard:
        shard.write(SAMPLE)
        with TarWriter("s.tar") as other:  # the file of an active writer does not count as abandoned
            other.write(SAMPLE)
    assert files() == ["s.tar"]


def test_a_forked_process_leaves_the_shard_to_the_one_that_writes_it(forked: Forked) -> None:
    shards = [TarWriter("s.tar")]
    shards[0].write(LARGE)
    assert forked(shards.clear) == 0
    assert len(files()) == 1
    with shards.pop() as shard:
        shard.write(SAMPLE)
    assert names("s.tar") == ["large.bin", "a.txt", "a.cls"]


def write_to_a_full_disk(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(
        ShardWriteError, match=r"cannot be written: File too large, after \d+ .* partial file was removed"
    ):
        write_many(size)
    assert files() == []


def write_many(size: int) -> None:
    with TarWriter("s.tar") as shard:
        for number in range(30):
            shard.write({"__key__": str(number), "bin": bytes(size)})


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("size", [3_000_000, 100_000, 38_000])
def test_a_full_disk_is_an_error_and_leaves_nothing(size: int, forked: Forked) -> None:
    assert forked(partial(write_to_a_full_disk, size)) == 0
    assert files() == []


def test_a_device_that_is_full_at_the_end_is_an_error() -> None:
    small = TarWriter("/dev/full")
    small.write(SAMPLE)
    with pytest.raises(ShardWriteError, match="'/dev/full' cannot be written: No space left on device"):
        small.close()
    assert small.info is None


def test_special_files_are_written_to_and_not_replaced() -> None:
    os.mkfifo("pipe")
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE) as reader:
        with TarWriter("pipe") as shard:
            shard.write(SAMPLE)
        data, _ = reader.communicate()
    assert [name for _, name, *_ in read_members(io.BytesIO(data), shard="x")] == ["a.txt", "a.cls"]
    assert files() == ["pipe"]


def test_a_link_stays_and_its_target_is_written() -> None:
    os.mkdir("elsewhere")
    os.symlink("elsewhere/s.tar", "s.tar")
    with TarWriter("s.tar") as shard:
        shard.write(SAMPLE)
    assert os.path.islink("s.tar")
    assert names("elsewhere/s.tar") == ["a.txt", "a.cls"]


@pytest.mark.parametrize(
    ("target", "options", "error", "text"),
    [
        ("none/s.tar", {}, ShardWriteError, "there is no folder 'none'. Create it first"),
        ("link.tar", {}, ShardWriteError, "'link.tar' cannot be written: there is no folder '.*/gone'. Create it"),
        ("/proc/s.tar", {}, ShardWriteError, "'/proc/s.tar' cannot be written: No such file"),
        (".", {}, ShardWriteError, r"'\.' cannot be written: it is a folder"),
        ("http://host/s.tar", {}, ShardWriteError, "use a command|Use a command"),
        (5, {}, TypeError, "written to a path, a URL or a binary stream, not to 5"),
        ("s.tar", {"compress": "lz4"}, ValueError, "compress must be True, False, None or one of bz2"),
        ("s.tar", {"mtime": 8**11}, ValueError, "mtime must be a number of seconds"),
        ("s.tar", {"user": "u" * 32}, ValueError, "user must have at most 31 bytes"),
        ("s.tar", {"encoder": 5}, TypeError, "encoder must be a bool, a dict of encoders"),
    ],
)
def test_wrong_targets_and_options_are_refused_before_anything_is_written(
    target: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    os.symlink("gone/s.tar", "link.tar")
    with pytest.raises(error, match=text):
        TarWriter(target, WriteOptions(**options))
    assert files() == ["link.tar"]


# Names


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"__key__": "scan-1.25mm", "txt": ""}, r"belong to the key 'scan-1' \(a key ends at the first dot"),
        ({"__key__": ".hidden", "txt": ""}, "belong to no sample"),
        ({"__key__": "folder/", "txt": ""}, "belong to no sample"),
        ({"__key__": "__meta__/a", "txt": ""}, "belong to no sample"),
        ({"__key__": "nul\0", "txt": ""}, "The key 'nul"),
        ({"__key__": 5, "txt": ""}, "__key__ must be a str, but 5 is the int 5"),
        ({"__key__": "half \ud800", "txt": ""}, "surrogates not allowed"),
        *(({"__key__": "b", name: b"1"}, r"Field names (are|must be)") for name in ("JPG", "a/b", "", "nul\0", 5)),
        ({"__key__": "b", "txt": "first", "cls": None}, "'cls' of sample 'b'"),
        ({"__key__": "b", "__url__": "x"}, "'b' has no field to write"),
        ({"txt": "a"}, "a dict with __key__ and its fields, not a dict with txt"),
        (["a"], "its fields, not a list"),
    ],
)
def test_a_sample_that_would_be_read_back_differently_is_refused_as_a_whole(sample: Any, text: str) -> None:
    with TarWriter("s.tar") as shard:
        with pytest.raises(EncodeError, match=text):
            shard.write(sample)
        shard.write(SAMPLE)
    assert names("s.tar") == ["a.txt", "a.cls"]
    assert shard.samples == 1


def test_dotted_keys_are_written_for_the_rule_that_reads_them() -> None:
    with TarWriter("s.tar", options=WriteOptions(key_rule=last_dot)) as shard:
        shard.write({"__key__": "scan-1.25mm", "png": b"1"})
        with pytest.raises(EncodeError, match=r"'seg\.png' of sample 'b'.* read back as 'png' of 'k\.seg'"):
            shard.write({"__key__": "b", "seg.png": b"1"})
    [sample] = ShardList("s.tar").load_wds_shards().group_samples(key_rule=last_dot)
    assert sample["__key__"] == "scan-1.25mm"


def test_a_repeated_key_is_refused_unless_checks_are_off() -> None:
    with TarWriter("s.tar") as shard:
        shard.write(SAMPLE)
        with pytest.raises(EncodeError, match=r"'a' was already written to 's\.tar'"):
            shard.write(SAMPLE)
        shard.write({**SAMPLE, "__key__": "b"})
    assert names("s.tar") == ["a.txt", "a.cls", "b.txt", "b.cls"]
    with TarWriter("s.tar", options=WriteOptions(key_rule=None)) as shard:
        with pytest.raises(EncodeError, match="__key__ must be a str"):
            shard.write({"__key__": 5, "txt": ""})
        for key in ("x.y", "x.y", "z"):
            shard.write({"__key__": key, "JPG": b""})
    assert names("s.tar") == ["x.y.JPG", "x.y.JPG", "z.JPG"]


# Encoders


def upper(sample: dict[str, Any]) -> dict[str, Any]:
    return {key: value if key == "__key__" else str(value).upper().encode() for key, value in sample.items()}


@pytest.mark.parametrize(
    ("encoder", "text"), [(True, b"a cat"), (upper, b"A CAT"), ({"txt": lambda text: text[::-1].encode()}, b"tac a")]
)
def test_the_encoder_is_the_table_a_table_or_a_function(encoder: Any, text: bytes) -> None:
    with TarWriter("s.tar", options=WriteOptions(encoder=encoder)) as shard:
        shard.write(SAMPLE)
    [sample] = ShardList("s.tar").load_wds_shards().group_samples()
    assert (sample["txt"], sample["cls"]) == (text, b"7")


@pytest.mark.parametrize("encoder", [False, None])
def test_without_an_encoder_all_values_are_bytes(encoder: Any) -> None:
    with TarWriter("s.tar", options=WriteOptions(encoder=encoder)) as shard:
        with pytest.raises(EncodeError, match=naming("'cls'", "'a'", "int 7")):
            shard.write({"__key__": "a", "txt": b"a cat", "cls": 7})
        shard.write({"__key__": "b", "txt": memoryview(b"a cat"), "cls": bytearray(b"7"), "txt.gz": b"anything"})
    assert [data for _, _, data, _ in ShardList("s.tar").load_wds_shards()] == [b"a cat", b"7", b"anything"]


def test_keys_of_metadata_are_written_on_request() -> None:
    with TarWriter("s.tar", options=WriteOptions(keep_meta=True)) as shard:
        shard.write(SAMPLE)
    assert names("s.tar") == ["a.__url__", "a.txt", "a.cls"]
    [sample] = ShardList("s.tar").load_wds_shards().group_samples()
    assert sample["__url__"] == "s.tar"  # where it is now


# Other targets


def test_a_stream_stays_open_and_is_incomplete_when_interrupted() -> None:
    stream = io.BytesIO()
    with TarWriter(stream) as shard:
        shard.write(SAMPLE)
    whole = stream.getvalue()
    assert shard.info == ShardInfo("", 1, len(whole), "")
    with pytest.raises(ZeroDivisionError):
        write_and_raise(stream, ZeroDivisionError())
    half = stream.getvalue()[len(whole) :]
    with pytest.raises(TruncatedShardError):
        list(read_members(io.BytesIO(half), shard="x"))


class Slow(io.RawIOBase):
    """Accepts a few bytes at a time, as a socket may."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.taken += bytes(data[:1000])
        return min(1000, len(data))


def test_a_stream_may_accept_partial_writes() -> None:
    stream = Slow()
    with TarWriter(stream) as shard:  # type: ignore[arg-type]  # a raw stream
        shard.write(SAMPLE)
    assert [name for _, name, *_ in read_members(io.BytesIO(bytes(stream.taken)), shard="x")] == ["a.txt", "a.cls"]


def test_a_sample_of_more_fields_than_the_system_writes_at_once() -> None:
    sample = {"__key__": "a", **{f"{index}.bin": bytes([index % 251]) * (33 << 10) for index in range(700)}}
    stream = io.BytesIO()
    targets: list[Any] = ["s.tar", stream]
    for target in targets:
        with TarWriter(target) as shard:
            shard.write(sample)
    assert Path("s.tar").read_bytes() == stream.getvalue()


def test_no_byte_is_lost_when_signals_interrupt_a_write() -> None:
    os.mkfifo("pipe")
    received: list[bytes] = []

    def receive() -> None:
        with Path("pipe").open("rb", buffering=0) as file:
            while data := file.read(5000):
                received.append(data)
                time.sleep(0.001)

    reader = threading.Thread(target=receive)
    reader.start()
    chunks = [bytes([index]) * (1000 * index) for index in range(50)]
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        sink = LocalSink("pipe", "pipe")
        sink.write(*chunks)
        sink.finish()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    reader.join()
    assert b"".join(received) == b"".join(chunks)


def write_to_standard_output() -> None:
    with open("out.tar", "wb") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    with TarWriter("-") as shard:
        shard.write(SAMPLE)


def test_standard_output(forked: Forked) -> None:
    assert forked(write_to_standard_output) == 0
    assert names("out.tar") == ["a.txt", "a.cls"]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cat > s.part; cat < /none; exit 3", r"exited with status 3 after it was sent \d+ bytes. .*No such file"),
        ("false | cat > s.part", "exited with status 1"),
        ("head -c 10 > s.part", "stopped reading and exited with status 0|exited with status 0"),
    ],
)
def test_a_command_that_fails_is_an_error(command: str, text: str) -> None:
    shard = TarWriter(f"pipe:{command}")
    with pytest.raises(ShardWriteError, match=text):
        write_large_and_close(shard)


def write_large_and_close(shard: TarWriter) -> None:
    with shard:
        for number in range(5):
            shard.write({**LARGE, "__key__": str(number)})


@pytest.mark.usefixtures("nothing_left")
def test_a_command_is_killed_before_it_accepts_a_partial_shard() -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_raise("pipe:cat > s.part && mv s.part s.tar", ZeroDivisionError())
    assert "s.tar" not in files()


@pytest.mark.usefixtures("nothing_left")
def test_a_command_is_killed_with_the_process_that_writes_to_it() -> None:
    for _ in range(3):  # the command sees either event first at random, unless the watcher decides
        ready, tell = os.pipe()
        pid = os.fork()
        if not pid:
            shard = TarWriter("pipe:(cat; echo end) > s.part && mv s.part s.tar")
            shard.write({"__key__": "a", "bin": bytes(1 << 20)})
            os.write(tell, b"x")
            time.sleep(1000)
            os._exit(1)
        os.close(tell)
        with open(ready, "rb") as said:
            assert said.read(1) == b"x"
            processes = psutil.Process(pid).children(recursive=True)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert processes
        while any(map(runs, processes)):
            time.sleep(0.005)
        assert files() == ["s.part"]
        os.unlink("s.part")


def read(url: str) -> list[str]:
    return [member.name for member in ShardList([url]).load_wds_shards()]


def test_a_file_system_of_fsspec_shows_only_complete_shards(memory: Any) -> None:
    memory.pipe("/d/s.tar", b"the shard of before")
    with TarWriter("memory://d/s.tar") as shard:
        shard.write(LARGE)
        assert memory.cat("/d/s.tar") == b"the shard of before"
    assert read("memory://d/s.tar") == ["large.bin"]
    with pytest.raises(ZeroDivisionError):
        write_and_raise("memory://d/s.tar.gz", ZeroDivisionError())
    assert list(memory.store) == ["/d/s.tar"]


def test_an_error_of_a_file_system_is_raised(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("the store is full")

    monkeypatch.setattr(memory, "mv", fail)
    shard = TarWriter("memory://d/s.tar")
    with pytest.raises(ShardWriteError, match=naming("memory://d/s.tar", "OSError: the store is full")):
        shard.close()
    assert list(memory.store) == []


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_name_that_readers_refuse_is_not_written(letter: str) -> None:
    longest = letter * ((4096 - len(".txt")) // len(letter.encode()))
    with TarWriter("s.tar") as shard:
        shard.write({"__key__": longest, "txt": "a"})
        with pytest.raises(EncodeError, match=r"cannot be written: its name has 4,09[78] bytes, .* at most 4,096"):
            shard.write({"__key__": longest + letter, "txt": "a"})
        with pytest.raises(EncodeError, match="its name has 4,"):
            shard.write({"__key__": "k", longest + letter + "xx": b"a"})
    assert [sample["__key__"] for sample in ShardList("s.tar").load_wds_shards().group_samples()] == [longest]
    with TarWriter("unchecked.tar", options=WriteOptions(key_rule=None)) as shard:
        shard.write({"__key__": longest + letter, "txt": "a"})
    limits = ReadLimits(name_bytes=5000)
    assert len(list(ShardList("unchecked.tar").load_wds_shards(limits=limits))) == 1


def test_data_that_readers_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "DEFAULT_LIMITS", ReadLimits(member_bytes=1000))
    monkeypatch.setattr(packer, "TOO_LARGE", 1000)  # as both are 8 GiB
    with TarWriter("s.tar") as shard:
        shard.write({"__key__": "a", "bin": bytes(1000)})
        with pytest.raises(
            EncodeError, match=r"'b\.bin' cannot be written: its data has 1,001 bytes, .* at most 1,000"
        ):
            shard.write({"__key__": "b", "bin": bytes(1001)})


@pytest.mark.parametrize("key", ["./__meta__/a", "././__meta__/a", "./__meta__"])
def test_a_key_that_is_read_as_metadata_is_not_written(key: str) -> None:
    with TarWriter("s.tar") as shard:
        shard.write({"__key__": "./__a__", "txt": "a"})
        with pytest.raises(EncodeError, match="would belong to no sample"):
            shard.write({"__key__": key, "x__": b"a"})
    assert [sample["__key__"] for sample in ShardList("s.tar").load_wds_shards().group_samples()] == ["./__a__"]
