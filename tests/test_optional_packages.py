"""Packages that only some pipelines need: the error if one is missing, and the extra that installs it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from fsspec.registry import known_implementations  # type: ignore[import-untyped]  # it carries no types

import wds_datapipes
from wds_datapipes import DatasetSpec, ShardList, TarWriter
from wds_datapipes.codecs import media, plain_values
from wds_datapipes.codecs.pillow_plugins import register_heic, register_jxl
from wds_datapipes.errors import MissingDependencyError
from wds_datapipes.extras import DATALOADER2, NODES
from wds_datapipes.index import build_indexes, parquet_columns
from wds_datapipes.io.file_systems import FILE_SYSTEMS
from wds_datapipes.testing import build_shard, check_resume
from wds_datapipes.tools.plan.figures import draw
from wds_datapipes.tools.prepare.sources.imagenet import find_imagenet

SOURCES = Path(wds_datapipes.__file__).parent
ROOT = Path(__file__).parents[1]
toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
#: For each extra, and for "", which is always installed: the names of what it requires, and of their extras.
REQUIREMENTS: dict[str, list[tuple[str, list[str]]]] = {
    extra: [
        (name, re.findall(r"[\w-]+", extras))
        for name, extras in (re.findall(r"^([\w-]+)(\[.*\])?", text)[0] for text in texts)
    ]
    for extra, texts in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items()
}


def decode(field: str, *words: str, data: bytes = b"\0") -> Callable[[Path], object]:
    from torch.utils.data.datapipes.iter import IterableWrapper

    return lambda _: list(IterableWrapper([{"__key__": "a", field: data}]).wds_decode(*words))


def load(url: str) -> Callable[[Path], object]:
    return lambda _: list(ShardList(url).load_wds_shards())


def read_records(ending: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / f"a.{ending}").write_bytes(b"\x80")
        return list(ShardList(str(folder / f"a.{ending}")).load_wds_records())

    return read


def read_parquet(folder: Path) -> object:
    shard = build_shard(folder / "a.tar", [{"__key__": "a", "txt": "a"}])
    columns = parquet_columns(folder / "a.parquet", ["tokens"])
    return build_indexes(shard, columns=columns, num_workers=0, progress=False)


def load_zst(folder: Path) -> object:
    shard = folder / "a.tar.zst"
    shard.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    return list(ShardList(str(shard)).load_wds_shards())


def read_yaml(folder: Path) -> object:
    (folder / "spec.yaml").write_text("datasets: [{shards: a.tar}]")
    return DatasetSpec(folder / "spec.yaml")


def read_devkit(folder: Path) -> object:
    (folder / "val").mkdir()
    (folder / "val/1.JPEG").write_bytes(b"")
    (folder / "ILSVRC2012_devkit_t12").mkdir()
    return find_imagenet(folder, "val")


def use_module(name: str) -> Callable[[Path], object]:
    return lambda _: importlib.import_module(f"wds_datapipes.integrations.{name}")


#: Each package, the extra that installs it, and something that needs it.
NEEDS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("av", "media", decode("mp4", "torch_video")),
    ("av", "media", decode("wav", "torch_audio")),
    ("cbor2", "cbor", decode("cbor")),
    ("cbor2", "cbor", read_records("cbors")),
    ("pyarrow.parquet", "parquet", read_parquet),
    ("matplotlib.pyplot", "plot", lambda folder: draw(str(folder / "a.png"), [], [])),
    ("msgpack", "msgpack", decode("mp")),
    ("msgpack", "msgpack", read_records("mps")),
    ("nvidia.dali", "dali", use_module("dali")),
    *(("adlfs", "az", load(f"{scheme}://box@account.dfs.core.windows.net/a.tar")) for scheme in ("az", "abfss")),
    ("gcsfs", "gs", load("gs://bucket/a.tar")),
    ("huggingface_hub", "hf", load("hf://datasets/user/name/a.tar")),
    ("pillow_heif", "heic", decode("heic", "rgb8", data=b"\0\0\0\x18ftypheic")),
    ("pillow_jxl", "jxl", decode("jxl", "rgb8", data=b"\xff\x0a")),
    ("paramiko", "sftp", load("sftp://host/a.tar")),
    ("s3fs", "s3", load("s3://bucket/a.tar")),
    ("scipy.io", "imagenet", read_devkit),
    ("ray", "ray", lambda _: wds_datapipes.RayReadingService(2)),
    ("yaml", "yaml", read_yaml),
    ("zstandard", "zst", load_zst),
    ("zstandard", "zst", lambda folder: TarWriter(folder / "a.tar.zst")),
]

#: What needs a release of torchdata, and which one.
TORCHDATA: list[tuple[str, str, Callable[[Path], object]]] = [
    ("torchdata.dataloader2", DATALOADER2, lambda _: wds_datapipes.ShardReadingService),
    ("torchdata.dataloader2", DATALOADER2, lambda _: wds_datapipes.RayReadingService),
    ("torchdata.dataloader2", DATALOADER2, lambda _: check_resume(lambda: ShardList("a.tar"))),
    ("torchdata.nodes", NODES, use_module("nodes")),
]

#: Distributions whose name differs from that of the package.
DISTRIBUTIONS = {
    "nvidia": "nvidia-dali-cuda120",
    "pillow_heif": "pillow-heif",
    "pillow_jxl": "pillow-jxl-plugin",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def required() -> set[tuple[str, str]]:
    """The packages and extras in all calls of ``require``."""
    # The only call whose arguments are not constants.
    found = {(each.package, each.extra) for each in FILE_SYSTEMS.values() if each.package}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
                arguments = [node.args[0], *(keyword.value for keyword in node.keywords if keyword.arg == "extra")]
                values = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
                if len(values) == 2:
                    found.add((str(values[0]), str(values[1])))
    return found


@pytest.mark.parametrize(("package", "extra", "use"), NEEDS)
def test_a_missing_package_is_an_error_that_names_its_extra(
    package: str, extra: str, use: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    # Another test may have imported the package or registered its plugin.
    for remembered in (media.load_av, plain_values.load_msgpack, plain_values.load_cbor, register_heic, register_jxl):
        remembered.cache_clear()
    PIL.Image.init()  # fills the list, once in a process
    monkeypatch.setattr(PIL.Image, "ID", [name for name in PIL.Image.ID if name not in ("HEIF", "JXL")])
    with pytest.raises(
        MissingDependencyError, match=rf"'{package}' is needed to .*pip install \"wds-datapipes\[{extra}\]\""
    ):
        use(tmp_path)


@pytest.mark.parametrize(("package", "release", "use"), TORCHDATA)
def test_a_missing_torchdata_is_an_error_that_names_its_release(
    package: str, release: str, use: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=rf"'{package}' is needed to .*pip install \"{re.escape(release)}\""
    ):
        use(tmp_path)


def test_the_first_command_after_the_installation_can_be_dataloader2() -> None:
    assert DATALOADER2 in PROJECT["dependencies"]


def installed_by(extra: str) -> set[str]:
    """The distributions that an extra installs, including those of the extras that it names."""
    found = set[str]()
    for name, extras in REQUIREMENTS[extra]:
        found.update(*(map(installed_by, extras) if extras else [{name}]))
    return found


def test_the_page_names_each_requirement() -> None:
    page = (ROOT / "docs/how-to/platforms-and-installation.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| (?:`([\w-]+)` )?\| (`[\w`, -]+) \| \S", page)
    found = {(extra, name) for extra, names in rows for name in re.findall(r"[\w-]+", names)}
    needed = {
        (owner, each) for owner, found in REQUIREMENTS.items() for name, extras in found for each in extras or [name]
    }
    assert found == needed


def test_the_table_contains_every_required_package() -> None:
    commands = {"cli", "demo"}  # their tests are those of the commands
    assert {(package, extra) for package, extra, _ in NEEDS} == {
        (package, extra) for package, extra in required() if extra not in commands
    }


def test_each_extra_installs_its_package() -> None:
    for package, extra in required():
        top = package.partition(".")[0]
        name = DISTRIBUTIONS.get(top, top)
        assert name in installed_by(extra), f"the extra {extra!r} does not install {package!r}"


def test_every_scheme_that_needs_a_package_is_in_the_table() -> None:
    assert {"s3", "gs", "az", "hf", "sftp"} <= set(FILE_SYSTEMS)
    needy = {scheme for scheme, each in FILE_SYSTEMS.items() if each.package}
    assert needy <= {*known_implementations, "abfss"}  # adlfs registers it if it is installed


def test_the_extra_all_contains_every_other_one_but_those_that_are_large() -> None:
    extras = REQUIREMENTS.keys() - {""}
    assert {"all", "az", "gs", "hf", "media", "s3", "sftp"} <= extras
    large = {"az", "dali", "dali-cuda13", "gs", "hf", "ray"}
    assert installed_by("all") == set().union(*map(installed_by, extras - large))
