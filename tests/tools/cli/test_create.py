"""The command ``create``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
from page_blocks import ROOT, blocks_of
from PIL import Image


def test_the_files_of_a_recipe_and_shards_may_be_in_a_store(program: Any, folder: Path, s3_store: Any) -> None:
    # This server sends the checksum of a whole file with each part of it.
    options = {**s3_store.options(), "config_kwargs": {"response_checksum_validation": "when_required"}}
    Path("options.json").write_text(json.dumps(options))
    given = ["--storage-options", "@options.json"]
    bucket = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    images = {f"bucket/create/in/{number}.jpg": b"%d" % number * 1000 * number for number in range(1, 6)}
    places = [*(f"in/{number}.jpg" for number in range(1, 5)), "s3://bucket/create/in/5.jpg"]
    bucket.pipe(images)
    Path("recipe").write_text("".join(f"{n}.jpg {place}\n{n}.cls text:{n}\n" for n, place in enumerate(places, 1)))
    out, recipe = "s3://bucket/create/out", ["create", "recipe", "recipe", "--root-dir", "s3://bucket/create"]
    target = ["-o", f"{out}/%d.tar", "--maxcount", "2", "--index", "--manifest", f"{out}/all.json"]
    done = program(*recipe, *target, "--resume", "--journal", "j", "--num-workers", "2", *given)
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        f"{out}/0.tar: 2 samples, 7.17 kB",
        f"{out}/1.tar: 2 samples, 11.3 kB",
        f"{out}/2.tar: 1 sample, 7.68 kB",
        f"Manifest: {out}/all.json",
    ]
    done = program("verify", "--digest", "--manifest", f"{out}/all.json", f"{out}/*.tar", *given)
    assert (done.code, done.out) == (0, "3 shards, 5 samples, 10 files, 26.1 kB, 3 indexed: no faults\n")
    assert program("ls", f"{out}/2.tar", *given).lines == ["5  5001  jpg 5000  cls 1"]
    assert {number: bucket.cat(f"bucket/create/out/{number}.tar")[512:1512] for number in (0, 1, 2)} == {
        0: b"1" * 1000,
        1: b"3" * 1000,
        2: b"5" * 1000,
    }
    assert len(bucket.ls("bucket/create/out")) == 7
    bucket.pipe("bucket/create/in/4.jpg", b"x" * 4000)  # of the same size
    again = program(*recipe, *target, "--resume", "--journal", "j", *given).lines
    assert ["already finished" in line for line in again[:3]] == [True, False, True]
    bucket.rm("bucket/create/in/4.jpg")
    done = program(*recipe, "-o", "a.tar", *given)
    assert done.err.startswith(
        "Error: The field 'jpg' of the sample '4' of 'recipe' (lines 7 to 8) cannot be read: s3://"
    )
    assert "4 samples" in program(*recipe, "-o", "a.tar", "--on-error=skip", *given).lines[0]
    # Errors that concern all files are never skipped.
    Path("here").write_text(f"a.jpg {out}/0.tar\n")
    Path("options.json").write_text(json.dumps({**options, "secret": "wrong" + options["secret"]}))
    done = program("create", "recipe", "here", "-o", "b.tar", "--on-error=skip", *given)
    assert (done.code, Path("b.tar").exists()) == (2, False)
    assert re.match(r"Error: s3://bucket/create/out/0\.tar cannot be opened: permission denied", done.err)
    assert options["secret"] not in done.err


def test_the_pipeline_of_the_readme_reads_photographs_of_any_size(program: Any, folder: Path) -> None:
    sizes = [(640, 480), (480, 640), (31, 200), (64, 64), (1, 1), (1000, 30)]
    modes = {"jpg": ("RGB", "L", "CMYK"), "png": ("RGB", "RGBA", "P", "LA")}
    for label in ("cat", "dog"):
        Path("photos", label).mkdir(parents=True)
        for ending, modes_of_ending in modes.items():
            for mode in modes_of_ending:
                for number, size in enumerate(sizes):
                    Image.new("RGB", size, "red").convert(mode).save(
                        f"photos/{label}/{ending}-{mode}-{number}.{ending}"
                    )
    [command] = re.findall(r"`wds-datapipes (create images [^`]*)`", (ROOT / "README.md").read_text("utf-8"))
    done = program(*(word.strip("'") for word in command.split()), "--maxcount", "20")
    assert (done.code, done.err) == (0, "")
    blocks = [each.text for each in blocks_of((ROOT / "README.md").read_text("utf-8")) if each.kind == "python"]
    script = blocks[0].replace("wds-datapipes-demo/train-{000..011}.tar", "photos-*.tar")
    seen: list[Any] = []
    exec(script.replace("loss =", "seen.append(images.shape); loss ="), {"seen": seen})
    assert sum(shape[0] for shape in seen) == 2 * 7 * len(sizes)
    assert {tuple(shape[1:]) for shape in seen} == {(3, 64, 64)}
