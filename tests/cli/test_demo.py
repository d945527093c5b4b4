"""The demo does what the README promises, on its own digits and on shards of the user's; and it fails in one line."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import wds_datapipes
from wds_datapipes.cli import COMMANDS, main
from wds_datapipes.cli._app import build_program
from wds_datapipes.testing import build_shard

COLORS = {3: (200, 60, 50), 7: (60, 170, 80), 12: (70, 90, 210)}


def run_python(*arguments: str, folder: Path) -> str:
    """Run Python in a folder and return what it prints, which must be all: no error and no warning."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def run_demo(*arguments: str) -> tuple[int, str]:
    """Run the demo in this process and return its exit code and what it prints."""
    result = CliRunner().invoke(build_program(COMMANDS), ["demo", *arguments])
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result.exit_code, result.output


def code_in(output: str) -> str:
    """Return the printed lines of code, exactly."""
    return output.partition("The code to copy:\n\n")[2]


def size_of(picture: Path) -> tuple[int, int]:
    with Image.open(picture) as image:
        image.load()
        assert len(set(image.convert("L").tobytes())) > 50, f"{picture} is nearly blank"
        size: tuple[int, int] = image.size
        return size


def photo(label: int, dice: random.Random) -> bytes:
    """Return a JPEG file of any size, with most of it in the colour of the label."""
    size = (dice.randint(20, 200), dice.randint(20, 200))
    image = Image.new("RGB", size, COLORS[label])
    image.paste(tuple(dice.randrange(256) for _ in "rgb"), (0, 0, size[0] // 2, size[1] // 2))
    stream = io.BytesIO()
    image.save(stream, "jpeg")
    return stream.getvalue()


def build_photos(path: str, count: int, *, seed: int, image: str = "jpg", label: str = "cls") -> str:
    """Write a shard of photos whose labels are neither dense nor all that there could be."""
    dice = random.Random(seed)
    labels = [dice.choice(list(COLORS)) for _ in range(count)]
    return build_shard(
        path,
        ({"__key__": f"{number:04d}", image: photo(n, dice), label: str(n)} for number, n in enumerate(labels)),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


# The runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # a whole training, with half a minute on a machine that does nothing else
def test_digits(tmp_path: Path) -> None:
    output = run_python("-m", "wds_datapipes.cli", "demo", folder=tmp_path)

    assert float(re.findall(r"^Held-out accuracy: ([\d.]+)%", output, flags=re.MULTILINE)[0]) > 95
    assert "1,437 samples in 12 shards to train on, 360 in 3 shards held out, 10 classes\n" in output
    assert len(re.findall(r"^Epoch +\d+/10 .* samples/s$", output, flags=re.MULTILINE)) == 10
    # 12 batches of 64 or less from each worker, whichever 6 of the 12 shards it gets.
    assert "\nLoading, 10 epochs: 240 items, " in output
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 80

    written = tmp_path / "wds-datapipes-demo"
    assert size_of(written / "samples.png") == (1605, 1290)
    assert size_of(written / "curves.png") == (1425, 585)
    with tarfile.open(written / "train-000.tar") as archive:
        names = archive.getnames()
    assert f"tar tf wds-datapipes-demo/train-000.tar:\n  {names[0]}\n  {names[1]}\n" in output

    code = code_in(output)
    assert len(list(filter(None, code.splitlines()))) == 10
    batches = run_python("-c", code, folder=tmp_path).splitlines()
    assert re.fullmatch(r"64 torch\.Size\(\[3, 8, 8\]\) \d", batches[0])
    assert sum(int(batch.split()[0]) for batch in batches) == 1437


def test_shards_of_the_user(folder: Path) -> None:
    for number in range(3):
        build_photos(f"photos-{number}.tar", 40, seed=number, image="Photo.JPG", label="kind.txt")
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    arguments = ["--shards", "photos-{0..2}.tar", "--image-field", "photo.jpg", "--label-field", "kind.txt"]

    output = run_python(
        *("-m", "wds_datapipes.cli", "demo", *arguments, "--epochs", "2", "--output", "out"), folder=folder
    )

    assert "80 samples in 2 shards to train on, 40 in 1 shard held out, 3 classes\n" in output
    assert size_of(folder / "out" / "samples.png")[0] == 1605
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["curves.png", "notes.txt", "samples.png"]
    batches = run_python("-c", code_in(output), folder=folder).splitlines()
    assert re.fullmatch(r"(64|40) torch\.Size\(\[3, \d+, \d+\]\) (3|7|12)", batches[0])
    assert sum(int(batch.split()[0]) for batch in batches) == 120


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--shards", "a.tar"], "32 samples in 1 shard to train on, 8 in 1 shard held out"),
        (["--shards", "a.tar", "--test-shards", "b.tar"], "40 samples in 1 shard to train on, 10 in 1 shard held out"),
        (["--shards", "a.tar", "--shards", "b.tar"], "40 samples in 1 shard to train on, 10 in 1 shard held out"),
    ],
)
def test_what_is_held_out(folder: Path, arguments: list[str], parts: str) -> None:
    build_photos("a.tar", 40, seed=0)
    build_photos("b.tar", 10, seed=1)
    code, output = run_demo(*arguments, "--epochs", "1", "--workers", "0")
    assert code == 0
    assert output.startswith(f"{parts}, 3 classes\n")


@pytest.mark.usefixtures("own_ledger")
@pytest.mark.parametrize(("workers", "batches"), [("0", 3), ("1", 3), ("3", 4)])
def test_any_number_of_workers_serves(folder: Path, workers: str, batches: int) -> None:
    for number, name in enumerate(["a.tar", "b.tar", "c.tar"]):
        build_photos(name, 70, seed=number)
    code, output = run_demo("--shards", "{a,b,c}.tar", "--epochs", "1", "--workers", workers)
    assert code == 0
    # Of 140 samples in two shards. Each worker with a shard ends with a smaller batch; of three, one has none.
    assert f"\nLoading, 1 epoch: {batches} items, " in output
    assert "passed over: 0\n" in output


def test_a_seed_repeats_a_run(folder: Path) -> None:
    for number, name in enumerate(["a.tar", "b.tar", "c.tar"]):
        build_photos(name, 20, seed=number)

    def numbers(seed: int) -> list[str]:
        _, output = run_demo("--shards", "{a,b,c}.tar", "--epochs", "2", "--seed", str(seed))
        return re.findall(r"loss [\d.]+   accuracy +[\d.]+%, held out +[\d.]+%", output)

    first = numbers(1)
    assert len(set(first)) == 2
    assert numbers(1) == first
    assert numbers(2) != first


# Errors ------------------------------------------------------------------------------------------------------------


def few(path: str, **fields: str) -> None:
    """Write ten samples of two classes, with some fields set for all of them."""
    image = photo(3, random.Random(0))
    build_shard(path, [{"__key__": f"{n:04d}", "jpg": image, "cls": str(n % 2), **fields} for n in range(10)])


def build_faulty() -> None:
    few("good.tar")
    few("broken-image.tar", jpg="no image")
    few("broken-label.tar", cls="seven")
    few("words.tar", txt="cat")
    few("one-class.tar", cls="4")
    build_photos("tiny.tar", 3, seed=0)
    build_shard("no-images.tar", [{"__key__": f"{number}", "cls": str(number % 2)} for number in range(10)])
    build_shard(
        "some-images.tar",
        [{"__key__": "a", "cls": "1"}, {"__key__": "b", "cls": "2", "jpg": photo(3, random.Random(0))}],
    )
    Path("cut.tar").write_bytes(Path("good.tar").read_bytes()[:4000])
    Path("empty.tar").write_bytes(b"")
    Path("file").write_text("not a folder")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--shards none*.tar", 2, r"No file matches 'none\*\.tar'"),
        ("--shards none.tar", 2, r"There is no file 'none\.tar'"),
        ("--shards good.tar --image-field png", 2, r"good\.tar has the field 'png'.* are: cls, jpg\..* --image-field"),
        ("--shards good.tar --label-field kind", 2, r"has the field 'kind'\..* are: cls, jpg\..* --label-field"),
        ("--shards no-images.tar", 2, r"has the field 'jpg' or 'png'\. The fields found are: cls\."),
        ("--shards good.tar --image-field cls", 2, r"'cls' is not the field of an image"),
        ("--shards words.tar --label-field txt", 2, r"integers, and the field 'txt' of the sample '0000' .* 'cat'"),
        ("--shards one-class.tar", 2, r"label 4: training needs two classes"),
        ("--shards tiny.tar", 2, r"tiny\.tar has 3 samples, and one of 5 would be held out"),
        ("--test-shards good.tar", 2, r"--test-shards are held out from training on --shards"),
        ("--shards good.tar --output file", 2, r"The folder file cannot be made: File exists"),
        ("--shards cut.tar", 1, r"cut\.tar ends inside the member '\d+\.jpg'"),
        ("--shards empty.tar", 1, r"empty\.tar is empty"),
        ("--shards broken-label.tar", 1, r"field 'cls' of sample '0000' .* cannot be decoded"),
        ("--shards broken-image.tar --test-shards good.tar", 1, r"field 'jpg' of sample '\d+' .* cannot be decoded"),
        ("--shards some-images.tar --test-shards good.tar", 1, r"'jpg;png' was asked for, and the sample 'a' of some-"),
    ],
)
def test_an_error_is_one_line_and_a_code(folder: Path, arguments: str, code: int, message: str) -> None:
    build_faulty()
    found, output = run_demo(*arguments.split())
    *before, error = output.splitlines()
    assert found == code
    assert re.match(f"Error: .*{message}", error), output
    assert len(before) <= 2
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("package", "extra"), [("typer", "cli"), ("rich", "cli"), ("matplotlib", "demo"), ("sklearn.datasets", "demo")]
)
def test_a_missing_package_is_named_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, extra: str
) -> None:
    missing: Any = None  # what makes an import fail
    monkeypatch.setitem(sys.modules, package, missing)
    monkeypatch.setattr(sys, "argv", ["wds-datapipes", "demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: '{package}' is needed to ")
    assert error.endswith(f'python -m pip install "wds-datapipes[{extra}]"\n')
    assert error.count("\n") == 1


# Help --------------------------------------------------------------------------------------------------------------

# The package itself is not imported here, only the command line and what it needs of the core: they must be quick.
QUICK = """
import sys, types
sys.modules["wds_datapipes"] = types.ModuleType("wds_datapipes")
sys.modules["wds_datapipes"].__path__ = [sys.argv.pop(1)]
from wds_datapipes.cli import main
try:
    main()
finally:
    slow = {"torch", "torchdata", "matplotlib", "sklearn"} & set(sys.modules)
    assert not slow, slow
"""


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_imports_nothing_slow(tmp_path: Path, arguments: list[str]) -> None:
    package = str(Path(str(wds_datapipes.__file__)).parent)
    output = run_python("-c", QUICK, package, *arguments, folder=tmp_path)
    assert re.search(r"Usage: wds-datapipes|^wds-datapipes \d", output)


def test_the_help_page_lists_every_command() -> None:
    output = CliRunner().invoke(build_program(COMMANDS), ["--help"]).output
    assert re.findall(r"^. ([a-z]+)  +\S", output.partition("Commands")[2], flags=re.MULTILINE) == list(COMMANDS)
