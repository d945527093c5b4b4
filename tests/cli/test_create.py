"""The command ``create``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from PIL import Image

from wds_datapipes.index import read_manifest
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards


def contents(*urls: str) -> dict[str, dict[str, bytes]]:
    samples = group_samples(read_shards(urls))
    return {sample["__key__"]: {f: v for f, v in sample.items() if f[:2] != "__"} for sample in samples}


def names(pattern: str = "*") -> list[str]:
    return sorted(path.name for path in Path().glob(pattern))


@pytest.fixture
def pets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Write images of two classes, and return them as samples."""
    expected = {}
    for label, (kind, count) in enumerate({"cat": 3, "dog": 4}.items()):
        Path("pets", kind).mkdir(parents=True)
        for number in range(count):
            data = f"{kind} {number}".encode() * 100 * number
            Path(f"pets/{kind}/{number}.jpg").write_bytes(data)
            expected[f"{kind}/{number}"] = {"jpg": data, "cls": b"%d" % label}
    Path("pets/cat/notes.txt").write_text("n")
    return expected


def test_shards_of_a_folder_of_images(program: Any, pets: dict[str, dict[str, bytes]]) -> None:
    done = program(
        "create", "images", "pets", "-o", "out/pets-%02d.tar", "--maxcount", "3", "--manifest", "out/pets.json"
    )
    assert (done.code, done.err) == (0, "Ignored files that are not images: .txt 1\n")
    assert done.lines == [
        "out/pets-00.tar: 3 samples, 7.17 kB",
        "out/pets-01.tar: 3 samples, 7.17 kB",
        "out/pets-02.tar: 1 sample, 4.10 kB",
        "Classes: out/pets-classes.json",
        "Manifest: out/pets.json",
    ]
    urls = [f"out/pets-{number:02d}.tar" for number in range(3)]
    assert contents(*urls) == pets
    assert list(contents(*urls)) == sorted(pets)
    assert json.loads(Path("out/pets-classes.json").read_text()) == {"classes": ["cat", "dog"]}
    manifest = read_manifest("out/pets.json")
    assert ([Path(url).name for url in manifest.urls], manifest.samples) == ([Path(url).name for url in urls], 7)
    assert all(entry.sha256 for entry in manifest.entries)


def test_an_order_of_its_own_by_any_number_of_workers(program: Any, pets: dict[str, dict[str, bytes]]) -> None:
    arguments = ["--maxsize", "6kB", "--shuffle", "--seed", "3", "--index", "--class-name", "txt"]
    for workers in (1, 2, 3):
        done = program(
            "create", "images", "pets", "-o", f"{workers}/%d.tar.gz", *arguments, "--workers", str(workers), "--json"
        )
        assert done.code == 0
    facts = json.loads(done.out)
    count = len(facts["shards"])
    assert count > 2
    assert {name: facts[name] for name in ("samples", "held", "classes", "left_out", "skipped")} == {
        "samples": 7,
        "held": 0,
        "classes": "3/classes.json",
        "left_out": {".txt": 1},
        "skipped": [],
    }
    written = [{path.name: path.read_bytes() for path in Path(str(workers)).iterdir()} for workers in (1, 2, 3)]
    assert written[0] == written[1] == written[2]
    assert len(written[0]) == 2 * count + 1
    found = contents(*(f"1/{number}.tar.gz" for number in range(count)))
    assert {key: {**fields, "txt": key[:3].encode()} for key, fields in pets.items()} == found
    assert list(found) != list(pets)


def test_another_part_has_the_same_numbers(program: Any, pets: dict[str, dict[str, bytes]]) -> None:
    assert program("create", "images", "pets", "-o", "train-%d.tar").code == 0
    Path("val/dog").mkdir(parents=True)
    Path("val/dog/1.jpg").write_bytes(b"1")
    arguments = ["create", "images", "val", "--classes-from", "train-classes.json", "-o", "val-%d.tar"]
    assert program(*arguments).code == 0
    assert contents("val-0.tar") == {"dog/1": {"jpg": b"1", "cls": b"1"}}
    assert Path("val-classes.json").read_text() == Path("train-classes.json").read_text()
    Path("val/emu").mkdir()
    Path("val/emu/1.jpg").write_bytes(b"1")
    done = program(*arguments)
    assert (done.code, done.out) == (1, "")
    assert "The folder 'val/emu' is not one of the 2 known classes" in done.err


def test_shards_of_imagenet(program: Any, folder: Path) -> None:
    for name in ("n01440764", "n01443537"):
        Path("in/train", name).mkdir(parents=True)
        Path(f"in/train/{name}/{name}_7.JPEG").write_bytes(name.encode())
    Path("in/val").mkdir()
    Path("in/val/ILSVRC2012_val_00000001.JPEG").write_bytes(b"v")
    Path("labels.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,n01443537 1 2 3 4\n")
    Path("in/LOC_synset_mapping.txt").write_text("n01440764 tench\nn01443537 goldfish\n")
    arguments = ["imagenet", "in"]
    assert program("create", *arguments, "-o", "imagenet-train-%06d.tar").code == 0
    assert contents("imagenet-train-000000.tar") == {
        "0000000": {"jpg": b"n01440764", "cls": b"0"},
        "0000001": {"jpg": b"n01443537", "cls": b"1"},
    }
    assert json.loads(Path("imagenet-train-classes.json").read_text()) == {
        "classes": ["n01440764", "n01443537"],
        "words": ["tench", "goldfish"],
    }
    arguments += ["--split", "val", "--labels", "labels.csv", "--rekey", "{name}", "--class-list", "c.json"]
    assert program("create", *arguments, "-o", "val.tar").code == 0
    assert contents("val.tar") == {"ILSVRC2012_val_00000001": {"jpg": b"v", "cls": b"1"}}
    assert names("*.json") == ["c.json", "imagenet-train-classes.json"]


def test_shards_of_a_table(program: Any, pets: dict[str, dict[str, bytes]]) -> None:
    Path("rows.csv").write_text("id,image,label,caption\na,cat/1.jpg,0,one\nb,dog/1.jpg,1,\n")
    options = ["--file", "image", "--file", "second.jpg=image", "--field", "cls=label", "--field", "json=*"]
    done = program("create", "table", "rows.csv", "-o", "rows.tar", "--root", "pets", "--key", "id", *options)
    assert (done.code, done.lines, done.err) == (0, ["rows.tar: 2 samples, 9.22 kB"], "")
    found = contents("rows.tar")
    assert list(found["a"]) == ["jpg", "second.jpg", "cls", "json"]
    assert found["b"]["jpg"] == found["b"]["second.jpg"] == pets["dog/1"]["jpg"]
    assert json.loads(found["b"]["json"]) == {"id": "b", "label": "1", "caption": ""}


def test_a_recipe_goes_through_a_pipe(process: Any, pets: dict[str, dict[str, bytes]]) -> None:
    Path("recipe").write_text("a.jpg pets/dog/1.jpg\na.cls text:7\nb.txt pipe:echo b\n")
    done = process("create", "recipe", "recipe", "-o", "-")
    assert (done.code, done.err) == (0, "")
    Path("a.tar").write_bytes(done.out)
    assert contents("a.tar") == {"a": {"jpg": pets["dog/1"]["jpg"], "cls": b"7"}, "b": {"txt": b"b\n"}}


def test_table_files_and_shards_may_be_in_a_store(program: Any, folder: Path, s3_store: Any) -> None:
    # This server sends the checksum of a whole file with each part of it.
    options = {**s3_store.options(), "config_kwargs": {"response_checksum_validation": "when_required"}}
    Path("options.json").write_text(json.dumps(options))
    given = ["--storage-options", "@options.json"]
    bucket = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    images = {f"bucket/create/in/{number}.jpg": b"%d" % number * 1000 * number for number in range(1, 6)}
    rows = "".join(f"in/{number}.jpg,{number}\n" for number in range(1, 5)) + "s3://bucket/create/in/5.jpg,5\n"
    bucket.pipe({**images, "bucket/create/rows.csv": f"image,cls\n{rows}".encode()})
    out, table = "s3://bucket/create/out", ["create", "table", "s3://bucket/create/rows.csv", "--file", "image"]
    target = ["-o", f"{out}/%d.tar", "--maxcount", "2", "--index", "--manifest", f"{out}/all.json"]
    done = program(*table, *target, "--resume", "--journal", "j", "--workers", "2", *given)
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        f"{out}/0.tar: 2 samples, 7.17 kB",
        f"{out}/1.tar: 2 samples, 11.3 kB",
        f"{out}/2.tar: 1 sample, 7.68 kB",
        f"Manifest: {out}/all.json",
    ]
    done = program("verify", "--digest", "--manifest", f"{out}/all.json", f"{out}/*.tar", *given)
    assert (done.code, done.out) == (0, "3 shards, 5 samples, 10 files, 26.1 kB, 3 indexed: no faults\n")
    assert program("ls", f"{out}/2.tar", *given).lines == ["00000004  5001  jpg 5000  cls 1"]
    assert {number: bucket.cat(f"bucket/create/out/{number}.tar")[512:1512] for number in (0, 1, 2)} == {
        0: b"1" * 1000,
        1: b"3" * 1000,
        2: b"5" * 1000,
    }
    assert len(bucket.ls("bucket/create/out")) == 7
    bucket.pipe("bucket/create/in/4.jpg", b"x" * 4000)  # of the same size
    assert (
        program(*table, *target, "--resume", "--journal", "j", *given).lines[-1]
        == "2 of 3 shards were already finished"
    )
    bucket.rm("bucket/create/in/4.jpg")
    done = program(*table, "-o", "a.tar", *given)
    assert done.err.startswith("Error: The field 'jpg' of row 4 of 's3://bucket/create/rows.csv' cannot be read: s3://")
    assert "4 samples" in program(*table, "-o", "a.tar", "--skip-bad", *given).lines[0]
    # Errors that concern all files are never skipped.
    Path("here.csv").write_text(f"image\n{out}/0.tar\n")
    Path("options.json").write_text(json.dumps({**options, "secret": "wrong" + options["secret"]}))
    done = program("create", "table", "here.csv", "--file", "image", "-o", "b.tar", "--skip-bad", *given)
    assert (done.code, Path("b.tar").exists()) == (2, False)
    assert re.match(r"Error: s3://bucket/create/out/0\.tar cannot be opened: permission denied", done.err)
    assert options["secret"] not in done.err


MODULE = """
def small(sample):
    if sample["cls"] == 1 and sample["__key__"].endswith("2"):
        return None
    sample["jpg"].thumbnail((16, 16))
    return [sample, {**sample, "__key__": sample["__key__"] + "-again"}] if sample["cls"] == 2 else sample

def marked(sample):
    if sample["jpg"] == b"":
        raise LookupError("nothing in it")
    return 7 if sample["cls"] == b"1" else {**sample, "txt": "seen"}
"""


def test_a_function_makes_other_samples_of_images(program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    Path("making.py").write_text(MODULE)
    expected = {}
    for label, kind in enumerate(("cat", "dog", "emu")):
        Path("photos", kind).mkdir(parents=True)
        for number in range(3):
            image = Image.linear_gradient("L").resize((64, 16 * (1 + number))).convert("RGB")
            image.save(f"photos/{kind}/{number}.jpg")
            with Image.open(f"photos/{kind}/{number}.jpg") as read:
                read.thumbnail((16, 16))
                small = BytesIO()
                read.save(small, "JPEG", quality=50)
            if (kind, number) != ("dog", 2):
                expected[f"{kind}/{number}"] = {"jpg": small.getvalue(), "cls": b"%d" % label}
            if kind == "emu":
                expected[f"{kind}/{number}-again"] = expected[f"{kind}/{number}"]
    options = ["-f", "making:small", "-d", "pil", "--encode", "jpg:quality=50", "--maxcount", "5", "--resume"]
    for workers in ("1", "2"):
        done = program("create", "images", "photos", "-o", f"{workers}-%d.tar", *options, "--workers", workers)
        assert (done.code, done.err) == (0, "")
        assert contents(f"{workers}-0.tar", f"{workers}-1.tar") == expected
        assert Path(f"{workers}-0.tar").read_bytes() == Path("1-0.tar").read_bytes()
    assert (
        program("create", "images", "photos", "-o", "1-%d.tar", *options).lines[-1]
        == "2 of 2 shards were already finished"
    )
    options[5] = "jpg:quality=60"
    assert "already finished" not in program("create", "images", "photos", "-o", "1-%d.tar", *options).out
    assert {len(fields["jpg"]) for fields in contents("1-0.tar").values()} != {
        len(fields["jpg"]) for fields in contents("2-0.tar").values()
    }


def test_a_sample_whose_function_fails_is_reported_and_skipped_on_request(
    program: Any, pets: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("making2.py").write_text(MODULE)
    arguments = ["create", "images", "pets", "-o", "a.tar", "-f", "making2:marked"]
    done = program(*arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err == "Error: marked failed on pets/cat/0.jpg: LookupError: nothing in it\n"
    assert not Path("a.tar").exists()
    done = program(*arguments, "--skip-bad")
    assert done.err.count("Skipped:") == 5
    assert "marked failed on pets/dog/3.jpg: TypeError: it must return a sample, samples or None" in done.err
    assert contents("a.tar") == {key: {**pets[key], "txt": b"seen"} for key in ("cat/1", "cat/2")}


def test_unwritable_samples_are_reported_first_and_skipped_on_request(
    program: Any, pets: dict[str, dict[str, bytes]]
) -> None:
    Path("pets/cat/1.png").write_bytes(b"p")
    Path("pets/cat/1.5.jpg").write_bytes(b"d")
    Path("pets/dog/gone.jpg").symlink_to("nowhere")
    Path("pets/emu").mkdir()
    done = program("create", "images", "pets", "-o", "out/%d.tar")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"Error: The folder 'pets/emu' of the class 'emu' has no image .* with --ending\n", done.err)
    Path("pets/emu").rmdir()
    done = program("create", "images", "pets", "-o", "out/%d.tar")
    assert done.code == 1
    assert re.fullmatch(
        r"Error: pets/cat/1\.5\.jpg: The key 'cat/1\.5' .*; or use --key-rule last-dot, or use --rekey '.*'\n", done.err
    )
    done = program("create", "images", "pets", "-o", "out/%d.tar", "--key-rule", "last-dot")
    assert "pets/dog/gone.jpg' is a broken or circular link" in done.err
    assert names() == ["pets"]
    done = program("create", "images", "pets", "-o", "out.tar", "--skip-bad", "--json")
    assert done.code == 0
    assert contents("out.tar") == pets
    assert [fault["kind"] for fault in json.loads(done.out)["skipped"]] == [
        "EncodeError",
        "SampleSourceError",
        "SampleSourceError",
    ]
    assert "Both pets/cat/1.jpg and pets/cat/1.png have the key" in json.loads(done.out)["skipped"][2]["message"]
    done = program("create", "images", "pets", "-o", "out.tar", "--skip-bad", "--rekey", "{number:03d}")
    assert done.err.count("Skipped:") == 1
    assert len(contents("out.tar")) == 9


def test_a_second_call_resumes(program: Any, pets: dict[str, dict[str, bytes]]) -> None:
    arguments = ["create", "images", "pets", "-o", "%d.tar", "--maxcount", "2", "--resume"]
    assert program(*arguments).code == 0
    Path("1.tar").unlink()
    assert program(*arguments).lines[-1] == "3 of 4 shards were already finished"
    assert contents(*(f"{number}.tar" for number in range(4))) == pets
    fewer = [*arguments, "--maxcount", "3"]
    done = program(*fewer)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1] == (
        "Error: '3.tar' is from an earlier run, and would be read with the new shards. Nothing was written. "
        "Remove them, or use --remove-old"
    )
    assert program(*fewer, "--remove-old").code == 0
    assert [name for name in names() if name.endswith(".tar")] == ["0.tar", "1.tar", "2.tar"]


def test_ctrl_c_leaves_only_finished_shards(folder: Path) -> None:
    wait = "until [ -e 0.tar -a -e 1.tar ]; do sleep 0.05; done"
    Path("recipe").write_text(
        f"a.txt text:1\nb.txt text:2\nc.txt pipe:{wait}; echo begun >&2; sleep 60\nd.txt pipe:sleep 60"
    )
    command = [sys.executable, "-m", "wds_datapipes", "create", "recipe", "recipe", "-o", "%d.tar"]
    with subprocess.Popen(
        [*command, "--maxcount", "1", "--workers", "2"], stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline() == "begun\n"
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(600) == 130
        assert run.stderr.read() == "Interrupted\n"
    assert names() == ["0.tar", "1.tar", "recipe"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("images none -o a.tar", "no file or folder 'none'"),
        ("images pets/cat/1.jpg -o a.tar", "is not a local folder"),
        ("images pets -o - --json", "The archive cannot go to a terminal"),
        ("images pets -o a.tar --no-classes --class-name txt", "--no-classes cannot be used with --class-name"),
        ("images pets -o a.tar --classes-from rows.csv", "but 'rows.csv' is not"),
        ("images pets -o a.tar --compress rar", "compress"),
        ("images pets -o a.tar --no-classes --class-list c.json", "--class-list cannot be used with --no-classes"),
        ("images pets -o %d-%d.tar", "one placeholder for the number"),
        ("images pets -o a.tar --rekey {shard}", "makes the same key"),
        ("images pets -o a.tar --maxsize much", "--maxsize must be"),
        ("images pets -o pipe:cat>%d.tar --resume", "Name a local file for it"),
        ("images pets -o a.tar -d pil", "--decode and --encode require --function"),
        (
            "images pets -o a.tar -f os:getcwd --encode jpg",
            "--encode must be EXT:OPTION=VALUE, as in jpg:quality=90, not",
        ),
        ("images pets -o a.tar -f os:getcwd --encode txt:a=1", "--encode: options are for images"),
        ("images pets -o a.tar -f os:getcwd -d no", "--decode: there is no decoder 'no'"),
        ("images s3://bucket/pets -o a.tar", "'s3://bucket/pets' is not a local folder"),
        ("imagenet s3://bucket/pets -o a.tar", "'s3://bucket/pets' is not a local folder"),
        ("table pets/cat/1.jpg -o a.tar", "the supported extensions are .csv, "),
        ("table rows.csv -o a.tar --key no", "has no column 'no'"),
        ("table rows.csv -o a.tar --file =x", "--file must be FIELD=COLUMN or COLUMN"),
        ("table rows.csv -o a.tar --field *", "--field must be FIELD=COLUMN or COLUMN"),
        ("table rows.csv -o a.tar --field A/b=a", "could not be read back"),
        ("recipe none -o a.tar", "no file or folder 'none'"),
    ],
)
def test_wrong_use(program: Any, pets: dict[str, dict[str, bytes]], arguments: str, message: str) -> None:
    Path("rows.csv").write_text("a,b\n1,2\n")
    before = names()
    done = program("create", *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert names() == before


def write_labels(path: str, labels: list[str]) -> None:
    lines = [f'{{"txt": "{number}", "label": {json.dumps(label)}}}\n' for number, label in enumerate(labels)]
    Path(path).write_text("".join(lines) if path.endswith("jsonl") else "")
    if path.endswith("csv"):
        Path(path).write_text("txt,label\n" + "".join(f"{number},{label}\n" for number, label in enumerate(labels)))


@pytest.mark.parametrize("table", ["rows.csv", "rows.jsonl"])
def test_class_names_of_a_table_are_numbered(program: Any, folder: Path, table: str) -> None:
    write_labels(table, ["dog", "cat", "dog", "emu"])
    options = ["--field", "cls=label", "--field", "name.txt=label"]
    done = program("create", "table", table, "-o", "rows-%d.tar", *options)
    assert (done.code, done.err) == (0, "")
    assert done.lines[-1] == "Classes: rows-classes.json"
    assert json.loads(Path("rows-classes.json").read_text()) == {"classes": ["cat", "dog", "emu"]}
    assert [(each["cls"], each["name.txt"]) for each in contents("rows-0.tar").values()] == [
        (b"1", b"dog"),
        (b"0", b"cat"),
        (b"1", b"dog"),
        (b"2", b"emu"),
    ]
    write_labels(table, ["emu", "dog"])
    options = ["--field", "cls=label", "--classes-from", "rows-classes.json", "--class-list", "val.json"]
    assert program("create", "table", table, "-o", "val.tar", *options).code == 0
    assert [each["cls"] for each in contents("val.tar").values()] == [b"2", b"1"]
    assert Path("val.json").read_text() == Path("rows-classes.json").read_text()
    write_labels(table, ["yak"])
    done = program("create", "table", table, "-o", "new.tar", *options)
    assert (done.code, Path("new.tar").exists()) == (1, False)
    assert "has 'yak' in its column 'label', which is not one of the 3 known classes" in done.err


@pytest.mark.parametrize(
    ("labels", "options", "text"),
    [
        (["dog", "3"], [], "has the text 'dog' in its column 'label', which could not be decoded as 'cls'"),
        (["dog", "3"], [], "or use only names, or only numbers"),
        (["2", "3"], ["--class-list", "x.json"], "require a column of class names for the field cls"),
    ],
)
def test_a_table_with_numbers_is_not_numbered(
    program: Any, folder: Path, labels: list[str], options: list[str], text: str
) -> None:
    write_labels("rows.csv", labels)
    done = program("create", "table", "rows.csv", "-o", "rows.tar", "--field", "cls=label", *options)
    assert done.code in (1, 2)
    assert text in done.err
    assert not Path("rows.tar").exists()
