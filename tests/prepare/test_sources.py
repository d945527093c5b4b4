"""The sources of samples: folders of images, ImageNet, tables and recipes."""

from __future__ import annotations

import csv
import json
import os
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import EncodeError, SampleSourceError
from wds_datapipes.prepare.sample_spec import FilePart, SampleSpec, Source, UrlPart
from wds_datapipes.prepare.sources.image_folder import find_imagenet, find_images
from wds_datapipes.prepare.sources.listing import Recipe, resolve_file
from wds_datapipes.prepare.sources.table import Table
from wds_datapipes.samples.keys import first_dot

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
    """Return the fields of all samples by their keys; files are given by their paths."""
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


def test_all_files_of_a_key_are_one_sample() -> None:
    put("in/cat/1.jpg", "in/cat/1.seg.png", "in/cat/1.json", "in/cat/2.JPG", "in/cat/3.txt", "in/cat/README")
    faults: list[Exception] = []
    source = find_images("in", key_rule=first_dot, on_fault=faults.append)
    parts = {"jpg": "in/cat/1.jpg", "json": "in/cat/1.json", "seg.png": "in/cat/1.seg.png"}
    assert fields_of(source) == {
        "cat/1": {**parts, "cls": b"0"},
        "cat/2": {"jpg": "in/cat/2.JPG", "cls": b"0"},
    }
    assert [str(fault) for fault in faults] == ["The sample of 'in/cat/3.txt' has no image. Add one"]
    put("in/cat/2.cls")
    with pytest.raises(SampleSourceError, match=r"in/cat/2\.JPG' would have two fields 'cls'"):
        fields_of(find_images("in", key_rule=first_dot, on_fault=faults.append))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["in/1.jpg"], r"image 'in/1\.jpg' is not in the folder of a class"),
        (["in/a/1.jpg", "in/b/1.txt"], r"folder 'in/b' of the class 'b' has no image \(bmp, "),
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
    with pytest.raises(SampleSourceError, match=r"in/dog/again' is a link to one of its parents"):
        find_images("in")


# ImageNet

WNIDS = ["n01440764", "n01443537", "n01484850"]


def test_imagenet_in_folders_is_numbered_by_all_classes_of_train() -> None:
    put(*(f"in/train/{name}/{name}_{number}.JPEG" for name in reversed(WNIDS) for number in (1, 10, 2)))
    put(f"in/val/{WNIDS[2]}/ILSVRC2012_val_00000001.JPEG")
    train = find_imagenet("in", "train")
    assert train.classes == WNIDS
    found = fields_of(train)
    assert list(found)[1:3] == ["n01440764/n01440764_10", "n01440764/n01440764_2"]
    assert [fields["cls"] for fields in found.values()] == [b"0"] * 3 + [b"1"] * 3 + [b"2"] * 3
    assert {(*fields,) for fields in found.values()} == {("jpg", "cls")}
    assert [fields["cls"] for fields in fields_of(find_imagenet("in", "val")).values()] == [b"2"]
    put("in/val/n99999999/1.JPEG")
    with pytest.raises(SampleSourceError, match="n99999999' is not one of the 3 known classes"):
        find_imagenet("in", "val")


def flat() -> None:
    put(*(f"in/val/ILSVRC2012_val_0000000{number}.JPEG" for number in (3, 1, 2)))


def test_missing_files_of_classes_are_reported() -> None:
    with pytest.raises(SampleSourceError, match="no folder 'in/val'"):
        find_imagenet("in", "val")
    flat()
    with pytest.raises(SampleSourceError, match="there is no file of labels"):
        find_imagenet("in", "val")
    for text, message in [
        ("a.JPEG n01440764\n", r"'labels\.txt' is not LOC_val_solution\.csv of Kaggle"),
        ("ImageId,PredictionString\na,n01440764 1\n", r"image 'in/val/ILSVRC2012_val_00000001' has no class"),
    ]:
        Path("labels.txt").write_text(text)
        with pytest.raises(SampleSourceError, match=message):
            find_imagenet("in", "val", labels="labels.txt")


# Tables

ROWS = [
    {"id": "a", "image": "cat/1.JPEG", "label": 3, "caption": 'ein Bär,\nund "noch" einer\u2028'},
    {"id": "b/c", "image": "cat/2.png", "label": -1, "caption": ""},
]


def write_table(kind: str, rows: list[dict[str, Any]]) -> str:
    path = Path(f"tables/t.{kind}")
    path.parent.mkdir(exist_ok=True)
    if kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_row_is_a_sample(kind: str) -> None:
    path = write_table(kind, ROWS)
    caption = ROWS[0]["caption"]
    files = [("", "image")]
    found = fields_of(Table(path, files=files, values=[("cls", "label"), ("txt", "caption")], key="id", root="files"))
    assert found == {
        "a": {"jpg": "files/cat/1.JPEG", "cls": b"3", "txt": str(caption).encode()},
        "b/c": {"png": "files/cat/2.png", "cls": b"-1", "txt": b""},
    }
    found = fields_of(Table(path, files=[("x.jpg", "image")], values=[("txt", "id")]))
    assert list(found) == ["00000000", "00000001"]
    assert found["00000000"]["x.jpg"] == "tables/cat/1.JPEG"
    if kind in ("csv", "tsv"):
        assert list(fields_of(Table(path, files=files, key="id"))["a"]) == ["jpg", "label", "caption"]


def test_values_of_other_types_are_encoded_by_their_fields() -> None:
    path = write_table("parquet", [{"x": b"\0", "n": [1, 2], "d": date(2020, 1, 2), "f": 1.5, "s": None}] * 3)
    found = fields_of(Table(path, values=[("bin", "x"), ("json", "n")]))
    assert found["00000002"] == {"bin": b"\0", "json": b"[1, 2]"}
    with pytest.raises(
        EncodeError, match=r"row 1 of .* has the float 1\.5 for the field 'f', whose name does not determine"
    ):
        fields_of(Table(path, values=[("f", "f")]))
    with pytest.raises(EncodeError, match=r"row 1 of .*bytes.* cannot be represented in JSON"):
        fields_of(Table(write_table("parquet", [{"m": {"x": b"1"}}]), values=[("json", "m")]))
    with pytest.raises(EncodeError, match="the field 'jpg' holds images"):
        fields_of(Table(write_table("jsonl", [{"jpg": "1.jpg"}])))
    path = write_table("jsonl", [{"meta": {"d": 1, "ü": None}, "cls": 3, "name": "ü"}])
    assert fields_of(Table(path, values=[("json", "meta"), ("cls", "cls"), ("name", "name")]))["00000000"] == {
        "json": '{"d": 1, "ü": null}'.encode(),
        "cls": b"3",
        "name": "ü".encode(),
    }
    path = write_table("parquet", [{"m": {"d": date(2020, 1, 2)}}])
    assert fields_of(Table(path, values=[("json", "m")]))["00000000"] == {"json": b'{"d": "2020-01-02"}'}


def test_files_may_be_embedded_in_parquet_as_by_datasets() -> None:
    path = write_table("parquet", [{"image": {"bytes": b"data", "path": "a.PNG"}, "label": 1}])
    found = fields_of(Table(path, files=[("", "image")], values=[("cls", "label")]))
    assert found["00000000"] == {"png": b"data", "cls": b"1"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": None}, r"row 2 of 'tables/t\.jsonl' has no value in its column 'image'"),
        ({"image": ""}, r"row 2 .* has no value in its column 'image'"),
        ({}, r"row 2 .* has no value in its column 'image'"),
        ({"image": 3}, r"row 2 .* has the int 3 in its column 'image', not the name of a file"),
        ({"image": "pipe:cat a.jpg"}, r"row 2 .* in its column 'image' has 'pipe:cat a\.jpg', which is a command"),
        ({"image": "-"}, r"row 2 .* has '-', which is a command"),
        ({"image": "file://host/a.jpg"}, r"row 2 .*: file://host/a\.jpg names a file on the host 'host'"),
        ({"image": "https://me:secret@host/a"}, r"row 2 .* has the file 'https://\*\*\*@host/a' .* has no extension"),
        ({"image": "a"}, r"row 2 .* has the file 'a' .* whose name has no extension"),
        ({"image": "a.jpg", "id": None}, r"row 2 .* in its column 'id'\. A key must be text or a number"),
        ({"image": "a.jpg", "id": True}, r"A key must be text or a number"),
        ({"image": "a.txt", "txt": "x"}, r"row 2 .* would have two fields 'txt'"),
        ({"image": "a.jpg", "note": "\ud800"}, r"row 2 .* has text that is not UTF-8"),
    ],
)
def test_an_invalid_row_is_reported_with_its_number(row: dict[str, Any], message: str) -> None:
    rows: list[dict[str, Any]] = [{"id": 1, "image": "a.jpg"}, {"id": 2, **row}]
    source = Table(write_table("jsonl", rows), files=[("", "image")], key="id")
    assert spec_of(source).key == "1"
    with pytest.raises(SampleSourceError, match=message):
        spec_of(source, 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n3\n", r"row 2 of 't\.csv' has 1 values for 2 columns"),
        ("t.csv", "a,b\n1,2\n3,\xff\n", r"row 2 of 't\.csv' is not UTF-8"),
        ("t.csv", "a,a\n1,2\n", r"first row of 't\.csv' must name each column once"),
        ("t.csv", "", r"first row of 't\.csv' must name each column"),
        ("t.csv", "a\n1\n2" + "x" * 140_000, r"'t\.csv' cannot be read after row 1: field larger than"),
        ("t.jsonl", '{"a": 1}\n{"a": \n', r"row 2 of 't\.jsonl' is not JSON in UTF-8"),
        ("t.jsonl", '{"a": 1}\n[1]\n', r"row 2 of 't\.jsonl' is a JSON list, not an object"),
        ("t.parquet", "no", r"table 't\.parquet' cannot be read"),
    ],
)
def test_a_damaged_table(name: str, text: str, message: str) -> None:
    Path(name).write_bytes(text.encode("latin-1"))
    with pytest.raises(SampleSourceError, match=message):
        fields_of(Table(name, values=[("cls", "a")] if name == "t.jsonl" else None))


# Files that are not on this host


@pytest.mark.parametrize(
    ("root", "name", "place"),
    [
        ("in", "../a.jpg", "in/../a.jpg"),
        ("in", "/a.jpg", "/a.jpg"),
        ("in", "simplecache::memory://a.jpg", "in/simplecache::memory://a.jpg"),
        ("s3://bucket/in", "a.jpg", "s3://bucket/in/a.jpg"),
        ("s3://bucket/in/", "/a.jpg", "/a.jpg"),
        ("s3://bucket/in", "file:a%20b.jpg", "a b.jpg"),
        ("", "memory://a.jpg", "memory://a.jpg"),
    ],
)
def test_names_are_relative_to_the_root(root: str, name: str, place: str) -> None:
    part = resolve_file(name, root, "row 1")
    assert part == (UrlPart(place) if "://" in place and place[:3] != "in/" else FilePart(place))


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
        ("a.txt", r"line 'a\.txt', with no source after the name"),
        ("a text:1", r"line 'a text:1', with a name that is not of the form KEY\.FIELD"),
        (".a.txt text:1", r"not of the form KEY\.FIELD"),
    ],
)
def test_an_invalid_line_of_a_recipe(line: str, message: str) -> None:
    Path("recipe").write_text(f"0.txt text:1\n{line}\n")
    with pytest.raises(SampleSourceError, match=message):
        fields_of(Recipe("recipe"))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("class", "dog", "could not be decoded as 'class': .*, or cls for class names"),
        ("json", "{odd", "could not be decoded as 'json': .*as in txt=json,"),
        ("npy", "1 2 3", "could not be decoded as 'npy'"),
        ("pkl", "text", "could not be decoded as 'pkl': not a pickle"),
        (
            "png",
            "cat/1.png",
            r"field 'png' holds images\. If .*\(files in .*, --file on .* text field, as in txt=png$",
        ),
        ("image", "cat/1.png", "field 'image' holds images"),
    ],
)
def test_a_text_that_its_field_cannot_decode_is_an_error(column: str, value: str, message: str) -> None:
    with pytest.raises(EncodeError, match=message):
        spec_of(Table(write_table("csv", [{column: value}])))
    other = Table(write_table("csv", [{column: value}]), values=[("txt", column)])
    assert fields_of(other) == {"00000000": {"txt": value.encode()}}


def test_an_empty_value_of_a_field_that_is_not_text_is_missing() -> None:
    rows = [{"cls": "", "txt": "", "json": ""}]
    assert fields_of(Table(write_table("csv", rows), missing="keep")) == {"00000000": {"txt": b""}}
    with pytest.raises(SampleSourceError, match="no value in its column 'cls'"):
        spec_of(Table(write_table("csv", rows)))
