"""The sources of samples: folders of images, ImageNet and recipes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.samples.keys import first_dot, last_dot
from wds_datapipes.tools.prepare.sample_spec import FilePart, SampleSpec, Source, UrlPart, measure_sample, read_sample
from wds_datapipes.tools.prepare.sources.image_folder import find_images
from wds_datapipes.tools.prepare.sources.listing import Recipe, resolve_file

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")


def put(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(name.encode())


def all_specs(source: Source) -> list[SampleSpec]:
    """Return the specs of all samples, and raise the first error."""
    specs = []
    for spec in source:
        if isinstance(spec, Exception):
            raise spec
        specs.append(spec)
    return specs


def spec_of(source: Source, number: int = 0) -> SampleSpec:
    """Return the spec of a sample, or raise its error."""
    spec = list(source)[number]
    if isinstance(spec, Exception):
        raise spec
    return spec


def fields_of(source: Source) -> dict[str, dict[str, Any]]:
    """Return the fields of all samples by key, with files as paths."""
    specs = all_specs(source)
    return {
        key: {field: part.path if isinstance(part, FilePart) else part for field, part in parts.items()}
        for key, parts, _ in specs
    }


# Folders of images


def test_folders_are_classes_in_the_order_of_their_names() -> None:
    put("in/dog/2.jpg", "in/dog/10.JPEG", "in/cat/a/x.png", "in/cat/Z.webp", "in/cat/notes.txt", "in/cat/a/README")
    put("in/.git/1.jpg", "in/cat/.hidden.jpg", "in/bird/b.c/e.jpg", "in/about.txt")
    source = find_images("in")
    assert source.classes == ["bird", "cat", "dog"]
    assert fields_of(source) == {
        "bird/b.c/e": {"jpg": "in/bird/b.c/e.jpg", "cls": b"0"},
        "cat/Z": {"webp": "in/cat/Z.webp", "cls": b"1"},
        "cat/a/x": {"png": "in/cat/a/x.png", "cls": b"1"},
        "dog/10": {"jpg": "in/dog/10.JPEG", "cls": b"2"},
        "dog/2": {"jpg": "in/dog/2.jpg", "cls": b"2"},
    }
    assert source.left_out == {".txt": 2, "without an ending": 1}
    assert list(fields_of(find_images("in", endings=["txt"], has_classes=False))) == ["about", "cat/notes"]


@given(
    st.dictionaries(
        st.text("ab. é-", min_size=1, max_size=3).filter(lambda name: name[0] != "." and name.strip() == name),
        st.sets(st.sampled_from(["1", "2", "a/1", "a/b/1", "a.b/1", "é/ü", "A/9"]), min_size=1),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=15, deadline=None)
def test_images_are_those_of_torchvision(classes: dict[str, set[str]]) -> None:
    root = Path(mkdtemp(dir="."))
    for name, stems in classes.items():
        put(*(f"{root}/{name}/{stem}.png" for stem in stems))
    expected = []
    for label, name in enumerate(sorted(classes)):
        for folder, _, files in sorted(os.walk(root / name)):  # as torchvision's ImageFolder does
            expected += [(f"{folder}/{file}", label) for file in sorted(files)]
    found = fields_of(find_images(root))
    assert [(fields["png"], int(fields["cls"])) for fields in found.values()] == expected


def test_images_that_are_joined_because_of_a_dot_are_recorded() -> None:
    put("in/v1.2.jpg", "in/v1.3.jpg", "in/a.jpg", "in/a.json", "in/a.seg.png", "in/b.left.jpg")
    source = find_images("in", has_classes=False, key_rule=first_dot)
    assert (len(source), source.joined) == (3, [("v1", ("2.jpg", "3.jpg"))])
    assert find_images("in", has_classes=False, key_rule=last_dot).joined == []
    assert find_images("in", has_classes=False).joined == []


def test_all_files_of_a_key_are_one_sample() -> None:
    put("in/cat/1.jpg", "in/cat/1.seg.png", "in/cat/1.json", "in/cat/2.JPG", "in/cat/3.txt", "in/cat/README")
    faults: list[Exception] = []
    source = find_images("in", key_rule=first_dot, on_fault=faults.append)
    parts = {"jpg": "in/cat/1.jpg", "json": "in/cat/1.json", "seg.png": "in/cat/1.seg.png"}
    assert fields_of(source) == {"cat/1": {**parts, "cls": b"0"}, "cat/2": {"jpg": "in/cat/2.JPG", "cls": b"0"}}
    assert [str(fault) for fault in faults] == ["The sample of 'in/cat/3.txt' has no image. Add one"]
    put("in/cat/2.cls")
    with pytest.raises(SampleSourceError, match=r"in/cat/2\.JPG' would have two fields 'cls'"):
        fields_of(find_images("in", key_rule=first_dot, on_fault=faults.append))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["in/1.jpg"], r"image 'in/1\.jpg' is not in the folder of a class"),
        (["in/a/1.jpg", "in/b/1.txt"], r"folder 'in/b' of the class 'b' has no image \(avif, bmp, "),
        (["elsewhere"], r"folder 'in' cannot be read: No such file"),
    ],
)
def test_a_folder_without_classes(files: list[str], message: str) -> None:
    put(*files)
    with pytest.raises(SampleSourceError, match=message):
        find_images("in")


def test_a_skipped_class_without_images_keeps_its_number() -> None:
    put("in/a/1.txt", "in/b/1.jpg")
    faults: list[Exception] = []
    assert fields_of(find_images("in", on_fault=faults.append)) == {"b/1": {"jpg": "in/b/1.jpg", "cls": b"1"}}
    assert len(faults) == 1


def test_links_are_followed_but_not_in_circles() -> None:
    put("there/1.jpg", "in/cat/1.jpg")
    Path("in/dog").symlink_to("../there")
    assert list(fields_of(find_images("in"))) == ["cat/1", "dog/1"]
    Path("there/again").symlink_to("../in")
    with pytest.raises(SampleSourceError, match=naming("in/dog/again'", "link")):
        find_images("in")


# Files that are not on this host


@pytest.mark.parametrize(
    ("root", "name", "place"),
    [
        ("in", "../a.jpg", "in/../a.jpg"),
        ("in", "/a.jpg", "/a.jpg"),
        ("s3://bucket/in", "a.jpg", "s3://bucket/in/a.jpg"),
        ("s3://bucket/in/", "/a.jpg", "/a.jpg"),
        ("s3://bucket/in", "file:a%20b.jpg", "a b.jpg"),
        ("", "memory://a.jpg", "memory://a.jpg"),
    ],
)
def test_names_are_relative_to_the_root(root: str, name: str, place: str) -> None:
    part = resolve_file(name, root, "row 1")
    assert part == (UrlPart(place) if "://" in place else FilePart(place))


def test_a_chain_of_file_systems_is_no_file_name() -> None:
    with pytest.raises(SampleSourceError, match=naming("row 1", "'simplecache::memory://a.jpg'")):
        resolve_file("simplecache::memory://a.jpg", "in", "row 1")


# Recipes


def test_the_forms_of_a_recipe() -> None:
    Path("my recipe").write_text(
        "a/1.jpg   some file.jpg\n\na/1.CLS\ttext:3\na/2.txt text:two words: yes \nb.x.y file:d/f\nb.z file:///f%20g\n"
        "c.txt pipe:echo a b\nd.txt text:\r\n"
    )
    source = Recipe("my recipe", root="files")
    assert fields_of(source) == {
        "a/1": {"jpg": "files/some file.jpg", "cls": b"3"},
        "a/2": {"txt": b"two words: yes "},
        "b": {"x.y": "files/d/f", "z": "/f g"},
        "c": {"txt": UrlPart("pipe:echo a b")},
        "d": {"txt": b""},
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.txt", r"'a\.txt' in line 3, with no source after the name"),
        ("a text:1", r"'a text:1' in line 3, with a name that is not KEY\.FIELD"),
        (".a.txt text:1", r"a name that is not KEY\.FIELD"),
    ],
)
def test_an_invalid_line_of_a_recipe(line: str, message: str) -> None:
    Path("recipe").write_text(f"0.txt text:1\n\n{line}\n")
    with pytest.raises(SampleSourceError, match=message):
        fields_of(Recipe("recipe"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("b.txt text:1\nb.cls text:2\nb.TXT text:3", r"the sample 'b' of 'recipe' \(lines 2 to 4\) .*'txt'"),
        ("b.cls -", r"The recipe 'recipe', line 2, has '-', which is a command"),
    ],
)
def test_an_invalid_sample_of_a_recipe_names_its_lines(lines: str, message: str) -> None:
    Path("recipe").write_text(f"0.txt text:1\n{lines}\n1.txt text:2\n")
    (error,) = [each for each in Recipe("recipe") if isinstance(each, Exception)]
    assert re.search(message, str(error), re.IGNORECASE)


def test_a_recipe_may_begin_with_a_byte_order_mark() -> None:
    Path("recipe").write_bytes(b"\xef\xbb\xbfa.txt text:1\n")
    assert fields_of(Recipe("recipe")) == {"a": {"txt": b"1"}}


def test_photographs_of_phones_are_images() -> None:
    put("a/1.HEIC", "a/2.heif", "a/3.jxl", "a/4.avif", "a/5.mov")
    found = find_images("a", has_classes=False)
    assert [spec.key for spec in all_specs(found)] == ["1", "2", "3", "4"]
    assert found.left_out == {".mov": 1}


@pytest.mark.parametrize(
    ("offset", "size", "content"), [(0, None, b"0123"), (1, None, b"123"), (1, 2, b"12"), (4, 0, b"")]
)
def test_the_part_of_a_file_is_measured_as_it_is_read(
    tmp_path: Path, offset: int, size: int | None, content: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123")
    spec = SampleSpec("a", {"bin": FilePart(str(file), offset, size)}, "the sample a")
    assert measure_sample(spec).sizes == [len(content)]
    assert read_sample(spec) == {"__key__": "a", "bin": content}


def test_a_part_that_begins_after_the_end_of_its_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123")
    with pytest.raises(SampleSourceError, match="it ends at byte 4, before byte 5"):
        measure_sample(SampleSpec("a", {"bin": FilePart(str(tmp_path / "file"), 5)}, "the sample a"))
