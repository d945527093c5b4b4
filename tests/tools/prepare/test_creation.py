"""Shards created from files: the samples of each shard, and what remains after a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from error_facts import naming
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wds_datapipes import JobOptions, ShardWriter, WriteOptions
from wds_datapipes.errors import EmptySourceError, EncodeError, SampleSourceError, ShardWriteError, WorkerDiedError
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.tools.prepare import create as creation
from wds_datapipes.tools.prepare.create import create_shards
from wds_datapipes.tools.prepare.shard_plan import make_plan
from wds_datapipes.tools.prepare.shard_run import ConvertedShard
from wds_datapipes.tools.prepare.sources.image_folder import find_images
from wds_datapipes.tools.prepare.sources.listing import Recipe

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def when_planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Call a function between planning and writing, when files may change; nothing else can time this."""

    def register(function: Callable[[], object]) -> None:
        def planned(*arguments: Any, **options: Any) -> Any:
            plan = make_plan(*arguments, **options)
            function()
            return plan

        monkeypatch.setattr(creation, "make_plan", planned)

    return register


def create(folder: Path, lines: str, output: str = "a-%02d.tar", **options: Any) -> list[ConvertedShard]:
    """Create shards of a recipe, whose files are in the folder."""
    (folder / "recipe").write_text(lines)
    options = {"num_workers": 0, **options}
    return create_shards(Recipe(folder / "recipe", root=folder), folder / output, **options)


def contents(folder: Path, pattern: str = "a-*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob(pattern))}


def keys(*paths: Path) -> list[str]:
    return [sample["__key__"] for sample in group_samples(read_shards(map(str, paths)))]


NUMBERS = "".join(f"{number:02d}.cls text:{number}\n{number:02d}.jpg {number}.jpg\n" for number in range(10))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write 0.jpg to 9.jpg, each of a different size."""
    for number in range(10):
        (tmp_path / f"{number}.jpg").write_bytes(bytes([number]) * 300 * number)
    return tmp_path


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    long=st.booleans(),
    maxcount=st.integers(1, 6),
    maxsize=st.integers(512, 12_000),
    seed=st.none() | st.integers(0, 3),
)
@example(sizes=[1] * 4, long=False, maxcount=9, maxsize=4608, seed=None)  # two samples, except for the end marker
@example(sizes=[1] * 4, long=False, maxcount=9, maxsize=5120, seed=None)
def test_shards_equal_those_of_a_shard_writer(
    sizes: list[int], long: bool, maxcount: int, maxsize: int, seed: int | None
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"{'ä' * 60 * long}{number}" for number in range(len(sizes))]
        lines = [f"{key}.txt text:{'x' * size}\n{key}.jpg {key}\n" for key, size in zip(names, sizes, strict=True)]
        for key, size in zip(names, reversed(sizes), strict=True):
            (folder / key).write_bytes(b"j" * size)
        made = create(folder, "".join(lines), maxcount=maxcount, maxsize=maxsize, seed=seed)
        order = [key for shard in made for key in keys(Path(shard.info.url))]
        assert sorted(order) == sorted(names)
        assert seed is not None or order == names
        with ShardWriter(folder / "b-%02d.tar", maxcount=maxcount, maxsize=maxsize, verbose=False) as writer:
            for key in order:
                number = names.index(key)
                writer.write({"__key__": key, "txt": "x" * sizes[number], "jpg": b"j" * sizes[-1 - number]})
        assert list(contents(folder).values()) == list(contents(folder, "b-*").values())
        assert [shard.info.samples for shard in made] == [info.samples for info in writer.shards]


@pytest.mark.parametrize("limits", [{"maxcount": 3}, {"maxsize": 3000}])
def test_limits_of_numbered_shards_are_refused_for_one_archive(tmp_path: Path, limits: Any) -> None:
    (tmp_path / "recipe").write_text("a.txt text:1\n")
    with pytest.raises(ValueError, match=r"maxcount and maxsize limit numbered shards, but .*one\.tar' is one archive"):
        create_shards(Recipe(tmp_path / "recipe"), tmp_path / "one.tar", **limits)


def test_a_function_that_drops_everything_warns(tmp_path: Path) -> None:
    (tmp_path / "recipe").write_text("a.txt text:1\nb.txt text:2\n")
    with pytest.warns(UserWarning, match=naming("2 samples", "1 new shard")):
        create_shards(Recipe(tmp_path / "recipe"), tmp_path / "%d.tar", function=lambda sample: None, num_workers=0)


def test_new_keys_count_in_the_source_also_in_another_order(files: Path) -> None:
    create(files, NUMBERS.replace("00.", "a/00."), "a.tar", rekey="{name}/{number:03d}", seed=1)
    assert sorted(keys(files / "a.tar")) == [f"{number:02d}/{number:03d}" for number in range(10)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", ["longer", "gone", "folder"])
def test_a_file_that_changes_before_it_is_read_leaves_no_partial_shard(
    files: Path, when_planned: Callable[..., None], change: str, workers: int
) -> None:
    def do() -> None:
        if change == "longer":
            with (files / "7.jpg").open("ab") as stream:
                stream.write(b"x")  # within the last block, so the archive would keep its size
        else:
            (files / "7.jpg").unlink()
            if change == "folder":
                (files / "7.jpg").mkdir()

    told = {
        "longer": r"sample '07' of .* has changed since.*had 2101 bytes, but now have 2102",
        "gone": r"field 'jpg' of the sample '07' of .* cannot be read: the file '.*7\.jpg': No such file",
        "folder": r"7\.jpg': Is a directory",
    }[change]
    when_planned(do)
    with pytest.raises(SampleSourceError, match=told):
        create(files, NUMBERS, maxcount=3, num_workers=workers)
    when_planned(lambda: None)
    left = contents(files)
    assert set(left) <= {"a-00.tar", "a-01.tar", "a-03.tar"}
    assert workers or set(left) == {"a-00.tar", "a-01.tar"}
    (files / "7.jpg").rmdir() if change == "folder" else None
    (files / "7.jpg").write_bytes(bytes([7]) * 2100)
    create(files, NUMBERS, maxcount=3)
    assert {name: contents(files)[name] for name in left} == left
    assert not contents(files, "*.part")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_file_changes_no_other_shard(files: Path, when_planned: Callable[..., None], workers: int) -> None:
    create(files, NUMBERS, maxcount=3)
    whole = contents(files)
    faults: list[Exception] = []

    def skip(error: Exception) -> bool:
        faults.append(error)
        return True

    when_planned((files / "7.jpg").unlink)
    create(files, NUMBERS, maxcount=3, on_error=skip, num_workers=workers)
    when_planned(lambda: None)
    assert [type(fault) for fault in faults] == [SampleSourceError]
    assert keys(files / "a-02.tar") == ["06", "08"]
    assert {name for name, data in contents(files).items() if data != whole[name]} == {"a-02.tar"}
    # A file found missing before the plan is complete leaves no gap.
    made = create(files, NUMBERS, maxcount=3, on_error="skip", num_workers=workers, job=JobOptions(remove_old=True))
    assert [shard.info.samples for shard in made] == [3, 3, 3]
    assert keys(files / "a-02.tar") == ["06", "08", "09"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a.txt text:1\nb.txt text:2\na.cls text:3", r"Both the sample 'a' of .* and .* have the key 'a'"),
        ("a.txt text:1\na.txt text:2", r"the sample 'a' of .* would have two fields 'txt'"),
        ("a.txt ./no.txt", r"cannot be read: the file '.*no\.txt': No such file"),
        ("a.txt .", r"it is a folder\. Provide"),
        ("a.txt /dev/zero", r"it is not a regular file"),
        ("a.txt loop", r"loop', a broken or circular link: Too many levels"),
        ("a.txt nothing", r"nothing', a broken or circular link: No such file"),
        ("a.txt pipe:echo gone >&2; exit 3", r"field 'txt' of the sample 'a'.*status 3"),
        ("a.txt memory://no.txt", r"field 'txt' of the sample 'a' of .* memory://no\.txt cannot be opened"),
        ("__a__/b.txt text:1", r"'__a__/b' cannot be written: its files .*no sample.*For new keys, pass rekey=[^;]*$"),
        ("a.__b text:1", r"The sample 'a' has no field to write"),
    ],
)
def test_invalid_samples_are_reported_before_anything_is_written(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("gone")
    with pytest.raises((SampleSourceError, EncodeError), match=message):
        create(tmp_path, "0.txt text:zero\n" + lines, "a.tar")
    assert not contents(tmp_path, "*.tar*")
    create(tmp_path, "0.txt text:zero\n" + lines, "a.tar", on_error="skip")
    assert "0" in keys(tmp_path / "a.tar")


def test_a_name_that_is_not_text_needs_a_new_key(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/in")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/in/\xff.jpg")).write_bytes(b"j")
    source = find_images(tmp_path / "in", has_classes=False)
    with pytest.raises(SampleSourceError, match=r"the key of .*\.jpg has text that is not UTF-8"):
        create_shards(source, tmp_path / "a.tar")
    create_shards(source, tmp_path / "a.tar", rekey="{number}")
    assert keys(tmp_path / "a.tar") == ["0"]


def test_without_a_sample_nothing_is_written(tmp_path: Path) -> None:
    for lines in ("", "\n \n"):
        with pytest.raises(EmptySourceError, match="no samples to write"):
            create(tmp_path, lines, "new/a-%d.tar")
    with pytest.raises(EmptySourceError):
        create(tmp_path, "a.txt no.txt", "new/a-%d.tar", on_error="skip")
    assert not (tmp_path / "new").exists()


def test_an_unwritable_shard_is_reported(files: Path) -> None:
    (files / "a-01.tar").mkdir()
    with pytest.raises(ShardWriteError, match=r"a-01\.tar' cannot be written: it is a folder"):
        create(files, NUMBERS, maxcount=3, num_workers=2)


def test_a_killed_worker_is_reported_with_its_shard(files: Path) -> None:
    # $PPID is the process that ends the shell along with the worker; its own parent is the worker.
    lines = NUMBERS.replace("03.cls text:3", "03.cls pipe:kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)")
    with pytest.raises(WorkerDiedError, match=r"may have been killed.*while writing .*a-01\.tar"):
        create(files, lines, maxcount=3, num_workers=1)
    assert set(contents(files, "a-*.tar")) == {"a-00.tar"}
    create(files, NUMBERS, maxcount=3)
    assert not contents(files, "*.part")  # a killed process cannot remove it


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_call_writes_only_missing_or_changed_shards(files: Path, workers: int) -> None:
    options: dict[str, Any] = {"maxcount": 3, "num_workers": workers, "options": WriteOptions(digest=True)}
    options["job"] = JobOptions(journal=True, remove_old=True)

    def new(lines: str = NUMBERS, **others: Any) -> list[int]:
        made = create(files, lines, **{**options, **others})
        return [number for number, shard in enumerate(made) if shard.is_new]

    whole = create(files, NUMBERS, maxcount=3, options=WriteOptions(digest=True), output="b-%02d.tar")
    (files / "9.jpg").rename(files / "other")
    with pytest.raises(SampleSourceError):
        create(files, NUMBERS.replace("09.jpg 9.jpg", "09.jpg pipe:cat 9.jpg"), **options)
    (files / "other").rename(files / "9.jpg")
    made = create(files, NUMBERS, **options)
    assert workers or not made[0].is_new  # with several processes, one may reach the error first
    assert made[3].is_new
    assert [shard.info[1:] for shard in made] == [shard.info[1:] for shard in whole]
    assert list(contents(files, "a-*.tar").values()) == list(contents(files, "b-*.tar").values())
    assert new() == []
    (files / "a-02.tar").unlink()
    assert new() == [2]
    (files / "4.jpg").write_bytes(b"4" * 1200)  # of the same size
    assert new() == [1]
    assert new(NUMBERS.replace("text:9", "text:8")) == [3]
    assert new(maxcount=4) == [0, 1, 2]
    assert new(maxcount=4, seed=1) == [0, 1, 2]
    dated = WriteOptions(digest=True, mtime=7)
    assert new(maxcount=4, seed=1, options=dated) == [0, 1, 2]
    assert new(maxcount=4, seed=1, options=dated) == []
