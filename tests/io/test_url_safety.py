"""``allow_local_files=False``: which URLs of untrusted origin are opened."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from site_server import Site
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import DatasetSpec, DirectoryShards, ErrorBudget, ShardList, register_opener
from wds_datapipes.errors import CorruptSidecarError, UnsafeInputError
from wds_datapipes.index import Manifest, build_indexes, read_manifest, read_wids_index, write_manifest
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.io.urls import check_url
from wds_datapipes.shard_cache import download
from wds_datapipes.testing import build_shard

FOLDER = "memory://test-safe-urls"


@pytest.fixture(autouse=True)
def no_command_runs(tmp_path: Path) -> Iterator[None]:
    """Check that no command was run: it would create the file that stands for `COMMAND` in the texts of these tests."""
    yield
    assert not (tmp_path / "touched").exists(), "a command was run"


@pytest.fixture
def server(site: Site, tmp_path: Path) -> str:
    """Serve a shard at every path."""
    site.body = Path(build_shard(tmp_path / "served.tar", [{"__key__": "a", "txt": "1"}])).read_bytes()
    return site.url("")


def opened_zeros(url: str, /, **_options: object) -> BinaryIO:
    raise AssertionError(f"{url} was opened")


@pytest.fixture
def registered(openers: dict[str, Any]) -> None:
    register_opener("mine", opened_zeros)
    register_opener("s3", opened_zeros)


#: URLs that ``allow_local_files=False`` refuses, and the message of each.
REFUSED = {
    "/etc/hostname": "a local path",
    "a.tar": "a local path",
    "../a.tar": "a local path",
    "": "a local path",
    " https://host/a.tar": "a local path",
    "https:/host/a.tar": "a local path",
    "run:a.tar": "a local path",
    "C:/a.tar": "a local path",
    "-": "standard input",
    "pipe:touch COMMAND": "a command",
    "PIPE:touch COMMAND": "a command",
    "pipe://touch COMMAND": "a command",
    "file:/etc/hostname": "of the scheme 'file'",
    "FILE:///etc/hostname": "of the scheme 'file'",
    "file://elsewhere/etc/hostname": "of the scheme 'file'",
    "local:///etc/hostname": "of the scheme 'local'",
    "memory://a.tar": "of the scheme 'memory'",
    "data://text/plain,a": "of the scheme 'data'",
    "zip://a.tar": "of the scheme 'zip'",
    "reference://a.tar": "of the scheme 'reference'",
    "github://owner:repository@main/a.tar": "of the scheme 'github'",
    "nowhere://a.tar": "of the scheme 'nowhere'",
    "simplecache::https://host/a.tar": "a local path",
    "https://host/a.tar::file:///etc/hostname": "a chain of file systems",
    "https://[::file:///etc/hostname]/": "a chain of file systems",
    "mine:a.tar": "of the scheme 'mine'",
    "mine://a.tar": "of the scheme 'mine'",
    "s3://bucket/a.tar": "of the scheme 's3', for which an opener was registered",
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("url", REFUSED)
def test_refused_urls_from_any_origin(url: str, tmp_path: Path) -> None:
    told = f"was refused: it is {REFUSED[url]}"
    url = url.replace("COMMAND", str(tmp_path / "touched"))
    untrusted: dict[str, Any] = {"allow_local_files": False}
    shards, copies = IterableWrapper([url]), tmp_path / "copies"
    ways: list[Callable[[], object]] = [
        lambda: check_url(url, **untrusted),
        lambda: open_url(url, **untrusted),
        lambda: open_parts(url, **untrusted),
        lambda: list(shards.load_wds_shards(**untrusted)),
        lambda: list(shards.load_wds_shards(**untrusted, on_error="skip")),
        lambda: list(shards.load_wds_shards(**untrusted, on_error=ErrorBudget(max_errors=9))),
        lambda: list(shards.cache_wds_shards(copies).load_wds_shards(**untrusted)),
    ]
    for way in ways:
        with pytest.raises(UnsafeInputError, match=f"{re.escape(told)}\\W"):
            way()
    assert not copies.exists() or not [place for place in copies.iterdir() if place.stat().st_size]
    in_lists: list[Callable[[], object]] = [
        lambda: ShardList(url, **untrusted),
        lambda: ShardList(["https://host/a.tar", url], **untrusted),
        lambda: ShardList("https://host/a.tar", rewrite=[("https://.*", url)], **untrusted),
        lambda: DatasetSpec({"datasets": [{"shards": url}]}, **untrusted),
    ]
    for way in in_lists if url else ():
        with pytest.raises(UnsafeInputError, match="was refused"):
            way()


# Variables, rules, globs


def test_environment_variables_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_NAME", "https://host/secret.tar")
    for pattern in ("https://host/${NAME}.tar", "${NAME}", "https://host/{a,${NAME}}.tar"):
        with pytest.raises(UnsafeInputError, match=r"environment variables such as \$\{NAME\} are not substituted"):
            ShardList(pattern, allow_local_files=False)
        with pytest.raises(UnsafeInputError):
            DatasetSpec({"datasets": [{"shards": pattern}]}, allow_local_files=False)


@pytest.mark.parametrize("home", ["~", "~root/../x"])
def test_home_folders_are_not_expanded(home: str, site: Site, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, an untrusted specification could have the user's name sent to a server."""
    monkeypatch.setenv("HOME", "/home/SECRET")
    one = {"shards": f"{home}/a.tar"}
    for spec in (
        {"prefix": f"{server}/", "datasets": [one]},
        {"prefix": server, "buckets": "/x", "datasets": [one]},
        {"prefix": f"{server}/", "buckets": home, "datasets": [{"shards": "a.tar"}]},
        {"buckets": f"{server}/", "datasets": [one]},
        {"datasets": [{"shards": f"{server}/{home}/a.tar"}]},
    ):
        site.pages["/spec.json"] = json.dumps(spec)
        for given_spec in (f"{server}/spec.json", spec):
            (url,) = DatasetSpec(given_spec, allow_local_files=False)
            assert url.startswith(f"{server}/")
            assert url.endswith("/a.tar")
            assert home in url
    for refused in ({"datasets": [one]}, {"buckets": home, "datasets": [{"shards": "a.tar"}]}):
        with pytest.raises(UnsafeInputError, match=f"'{home}/a.tar' was refused: it is a local path"):
            DatasetSpec(refused, allow_local_files=False)


def test_refused_files_are_not_looked_up(tmp_path: Path) -> None:
    """The kind of error would reveal whether a file exists."""
    (tmp_path / "there.tar").touch()
    for name in ("there.tar", "absent.tar", "*.tar", "none-*.tar", "", "absent/"):
        with pytest.raises(UnsafeInputError):
            ShardList(f"{tmp_path}/{name}", allow_local_files=False)
    with pytest.raises(UnsafeInputError):
        ShardList(tmp_path, allow_local_files=False)
    with pytest.raises(UnsafeInputError):
        next(iter(DirectoryShards(tmp_path, timeout_s=0).load_wds_shards(allow_local_files=False)))


def test_urls_rewritten_by_a_rule_are_checked() -> None:
    rules = [("mirror:", "https://mirror/"), ("https://host/", "/data/"), ("https://pipe/", "pipe:cat ")]
    assert list(ShardList("mirror:{a,b}.tar", rewrite=rules, allow_local_files=False)) == [
        "https://mirror/a.tar",
        "https://mirror/b.tar",
    ]
    for url in ("https://host/a.tar", "https://pipe/a.tar; touch x"):
        with pytest.raises(UnsafeInputError):
            ShardList(url, rewrite=rules, allow_local_files=False)


def test_urls_of_a_listing_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "wds_datapipes.shards.patterns.list_urls", lambda _url, _options: ["https://host/a.tar", "/etc/hostname"]
    )
    with pytest.raises(UnsafeInputError, match="'/etc/hostname' was refused"):
        ShardList("https://host/*.tar", allow_local_files=False)


def test_the_next_shard_is_not_fetched_before_it_is_checked(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are fetched while the previous shard is read."""
    asked: list[str] = []

    def asked_for(url: str, **_: object) -> FileFacts:
        asked.append(url)
        return FileFacts()

    monkeypatch.setattr(download, "file_facts", asked_for)
    command, path = f"pipe:touch {tmp_path}/touched", str(tmp_path / "served.tar")
    source = IterableWrapper([f"{server}/a.tar", command, path, f"{server}/b.tar"])
    members = iter(source.cache_wds_shards(tmp_path / "copies", prefetch=3).load_wds_shards(allow_local_files=False))
    assert next(members).name == "a.txt"
    while f"{server}/b.tar" not in asked:  # the last of those that are fetched meanwhile
        time.sleep(0.01)
    with pytest.raises(UnsafeInputError, match="it is a command"):
        next(members)
    assert asked == [f"{server}/a.tar", f"{server}/b.tar"]


def test_a_refusal_hides_credentials_and_is_short() -> None:
    with pytest.raises(UnsafeInputError) as caught:
        check_url(f"nowhere://me:secret@host/{'x' * 5000}?token=secret", allow_local_files=False)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 500


# Files read over a network


def manifest_of(tmp_path: Path, place: str, *urls: str) -> str:
    """A manifest at ``place`` that names these shards."""
    shard = build_shard(tmp_path / "x.tar", [{"__key__": "a", "txt": "1"}])
    (entry,) = build_indexes(shard)
    write_manifest(Manifest([entry._replace(url=url) for url in urls]), place)
    return place


COMMANDS = ["PIPE:touch COMMAND", "-"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_a_manifest_from_a_network(command: str, tmp_path: Path) -> None:
    remote = manifest_of(tmp_path, f"{FOLDER}/manifest.json", f"{FOLDER}/a.tar", command)
    with pytest.raises(
        UnsafeInputError, match=r"listed in memory://test-safe-urls/manifest\.json, which is not a local file"
    ):
        read_manifest(remote)
    with pytest.raises(UnsafeInputError, match="With allow_local_files=False"):
        read_manifest(remote, allow_local_files=False)
    local = manifest_of(tmp_path, str(tmp_path / "manifest.json"), "/a.tar", command)
    assert read_manifest(local).urls == ["/a.tar", command]
    with pytest.raises(UnsafeInputError, match=r"manifest\.json' was refused: it is a local path"):
        read_manifest(local, allow_local_files=False)


def test_a_manifest_for_a_service_names_only_files_on_a_network(site: Site, server: str, tmp_path: Path) -> None:
    def text(*urls: str) -> str:
        place = manifest_of(tmp_path, str(tmp_path / "manifest.json"), "https://host/a.tar", *urls)
        return Path(place).read_text()

    site.pages["/manifest.json"] = text()
    assert read_manifest(f"{server}/manifest.json", allow_local_files=False).urls == ["https://host/a.tar"]
    for url in ("/etc/hostname", "file:///etc/hostname", "memory://a.tar"):
        site.pages["/manifest.json"] = text(url)
        with pytest.raises(UnsafeInputError, match=f"'{url}' was refused"):
            read_manifest(f"{server}/manifest.json", allow_local_files=False)
    site.pages["/manifest.json"] = "{}"
    with pytest.raises(CorruptSidecarError):
        read_manifest(f"{server}/manifest.json", allow_local_files=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_a_wids_index_from_a_network(command: str, tmp_path: Path) -> None:
    command = command.replace("COMMAND", str(tmp_path / "touched"))
    shards = [{"url": command, "nsamples": 1}]
    for facts in ({"wids_version": 1, "shardlist": shards}, {"wids_version": 1, "datasets": [{"source_url": command}]}):
        with fsspec.open(f"{FOLDER}/index.json", "w") as file:
            file.write(json.dumps(facts))
        with pytest.raises(UnsafeInputError, match=r"index\.json, which is not a local file"):
            read_wids_index(f"{FOLDER}/index.json")


def spec_of(place: str, shards: Any, **more: Any) -> str:
    with fsspec.open(place, "w") as file:
        file.write(json.dumps({**more, "datasets": [{"shards": shards}]}))
    return place


@pytest.mark.parametrize(
    "facts",
    [
        {"shards": "pipe:touch COMMAND"},
        {"shards": ["a.tar", "-"]},
        {"shards": "{pipe,file}:touch"},
        {"shards": "touch COMMAND", "prefix": "pipe:"},
        {"shards": "${RUN}"},
        {"shards": "rewritten://x; touch COMMAND"},
    ],
    ids=["a command", "standard input", "braces", "the prefix", "a variable", "a rule"],
)
def test_commands_in_a_specification_from_a_network(
    facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDS_RUN", f"pipe:touch {tmp_path}/touched")
    monkeypatch.setenv("WDS_REWRITE", "rewritten://=pipe:cat ")
    facts = json.loads(json.dumps(facts).replace("COMMAND", str(tmp_path / "touched")))
    with pytest.raises(UnsafeInputError, match=r"listed in memory://.*spec\.json, which is not a local file"):
        DatasetSpec(spec_of(f"{FOLDER}/spec.json", **facts))
    assert len(DatasetSpec(spec_of(str(tmp_path / "spec.json"), **facts))) >= 1
    assert len(DatasetSpec({"prefix": facts.get("prefix", ""), "datasets": [{"shards": facts["shards"]}]})) >= 1
