"""Shards read from locations other than their URLs, and AIStore's object interface."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from web_server import QuietHandler, web_server

from wds_datapipes import DatasetSpec, ShardList
from wds_datapipes.errors import SpecError
from wds_datapipes.shards.patterns import expand_urls
from wds_datapipes.testing import build_shard


@pytest.mark.parametrize("name", ["WDS_REWRITE", "GOPEN_REWRITE"])
def test_rules_of_the_environment_apply_to_all_lists(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "s3://a/=/mnt/a/;s3://(\\w+)/=https://\\1.host/;;")
    want = ["/mnt/a/0.tar", "https://b.host/0.tar", "0.tar"]
    assert list(ShardList(["s3://a/0.tar", "s3://b/0.tar", "0.tar"])) == want
    assert list(DatasetSpec({"datasets": [{"shards": "s3://{a,b}/0.tar"}]})) == want[:2]
    assert list(ShardList("s3://a.tar", rewrite=[("s3://", "gs://")])) == ["gs://a.tar"]
    assert list(ShardList("s3://a.tar", rewrite=[])) == ["s3://a.tar"]


def test_the_first_rule_that_changes_something_applies() -> None:
    rules = [("a", "a"), ("b", "x"), ("a", "b"), ("b", "c")]
    assert expand_urls(["a.tar", "b.tar", "ca.tar"], variables={}, rewrite=rules) == ["b.tar", "x.tar", "ca.tar"]


def test_globs_are_expanded_after_rewriting(tmp_path: Path) -> None:
    for name in "ab":
        build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "cls": "1"}])
    rules = [("s3://bucket/", f"{tmp_path}/")]
    want = [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    assert list(ShardList("s3://bucket/*.tar", rewrite=rules)) == list(ShardList("s3://bucket/", rewrite=rules)) == want


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WDS_REWRITE": "s3://"}, "The rule 's3://' in WDS_REWRITE has no '='"),
        ({"WDS_REWRITE": "(=b"}, r"The rule that rewrites '\(' to 'b' is not a valid regular expression"),
        ({"WDS_REWRITE": "a=\\2"}, r"The rule that rewrites 'a' to '\\\\2' is no"),
        ({"USE_AIS_FOR": "gs"}, "USE_AIS_FOR is set, but AIS_ENDPOINT is not"),
        ({"USE_AIS_FOR": "gs:ftp", "AIS_ENDPOINT": "http://a"}, "USE_AIS_FOR names 'ftp'"),
    ],
)
def test_an_invalid_rule_is_reported(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        expand_urls("0.tar", variables=variables)


class Cluster(QuietHandler):
    """Answers like AIStore: the gateway redirects requests for an object to the node that stores it."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path.startswith("/v1/objects/"):
            self.send_response(307)
            self.send_header("Location", f"/target/{query}/{path.removeprefix('/v1/objects/')}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.path = path.removeprefix("/target")
        super().do_GET()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    for provider, bucket in (("ais", "one"), ("gcp", "two")):
        folder = tmp_path / f"provider={provider}" / bucket / "train"
        folder.mkdir(parents=True)
        build_shard(folder / "0.tar", [{"__key__": bucket, "cls": "1"}])
    with web_server(functools.partial(Cluster, directory=str(tmp_path))) as url:
        yield url


def test_aistore_is_read_by_its_object_interface(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", f"{cluster}/")
    monkeypatch.setenv("USE_AIS_FOR", "gs:s3")
    pipe = ShardList(["ais://one/train/0.tar", "gs://two/train/0.tar"]).load_wds_shards().group_samples()
    assert [sample["__key__"] for sample in pipe] == ["one", "two"]
