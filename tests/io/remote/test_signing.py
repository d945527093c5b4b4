"""Signed requests: the HTTP client reads S3 with the options and credentials of s3fs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultProxy, fault_proxy
from nginx_server import Nginx

from wds_datapipes.errors import ShardOpenError
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.signing import TOKEN_S, RequestSigner, SignedRequest, signer_of
from wds_datapipes.io.timeouts import Timeouts

BODY = bytes(range(256)) * 40


@pytest.fixture
def proxy(nginx: Nginx, tmp_path: Path) -> Iterator[FaultProxy]:
    (nginx.files / "signed").mkdir(exist_ok=True)
    (nginx.files / "signed" / "a.tar").write_bytes(BODY)
    with fault_proxy(("127.0.0.1", nginx.http)) as made:
        yield made


def options(proxy: FaultProxy, **more: Any) -> dict[str, Any]:
    return {"key": "access", "secret": "hunter2hunter2", "endpoint_url": f"http://127.0.0.1:{proxy.port}", **more}


def test_reading_a_file_takes_one_request_and_a_range_one_more(proxy: FaultProxy) -> None:
    with open_url("s3://signed/a.tar", storage_options=options(proxy)) as stream:
        assert stream.read() == BODY
    parts = open_parts("s3://signed/a.tar", storage_options=options(proxy))
    assert parts is not None
    assert [parts.part(at, at + 9).read() for at in (700, 8)] == [BODY[700:709], BODY[8:17]]
    paths, ranges = zip(*proxy.asked, strict=True)
    assert ranges == (None, "bytes=0-511", "bytes=700-708", "bytes=8-16")
    assert all("X-Amz-Signature=" in path and "X-Amz-Algorithm=AWS4-HMAC-SHA256" in path for path in paths)
    assert proxy.heads == 0


def test_a_redirect_to_another_region_is_an_error_that_names_it(proxy: FaultProxy, nginx: Nginx) -> None:
    """The signature holds for one host only, so following it would be refused as if the credentials were wrong."""
    there = f"http://localhost:{nginx.http}/signed/a.tar"
    proxy.faults[:] = [Fault(status=307, headers={"Location": there, "X-Amz-Bucket-Region": "eu-west-1"})]
    with pytest.raises(ShardOpenError, match=r"HTTP status 307, .* region eu-west-1"):
        open_url("s3://signed/a.tar", storage_options=options(proxy), retries=0)
    proxy.faults[:] = [Fault(status=307, headers={"Location": there})]  # without a signature
    with open_url("s3://signed/a.tar", storage_options=options(proxy, anon=True)) as stream:
        assert stream.read() == BODY


@pytest.mark.parametrize(
    ("more", "query"),
    [
        ({"anon": True}, ""),
        ({"token": "session"}, "X-Amz-Security-Token=session"),
        ({"requester_pays": True}, "SignedHeaders=host%3Bx-amz-request-payer"),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, "%2Feu-west-1%2Fs3%2F"),
        ({"config_kwargs": {"signature_version": "s3"}}, "AWSAccessKeyId=access"),
    ],
)
def test_the_options_of_s3fs_apply(proxy: FaultProxy, more: dict[str, Any], query: str) -> None:
    with open_url("s3://signed/a.tar", storage_options=options(proxy, **more)) as stream:
        assert stream.read() == BODY
    ((path, _),) = proxy.asked
    assert query in path
    assert ("?" in path) == bool(query)


@pytest.mark.parametrize(
    "more",
    [
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
        {"client_kwargs": {"verify": False}},
        {"s3_additional_kwargs": {"SSECustomerKey": "k" * 32, "SSECustomerAlgorithm": "AES256"}},
    ],
)
def test_s3fs_reads_what_only_its_client_can(proxy: FaultProxy, more: dict[str, Any]) -> None:
    assert signer_of(RemotePath("s3://signed/a.tar", options(proxy))) is not None
    assert signer_of(RemotePath("s3://signed/a.tar", options(proxy, **more))) is None


@pytest.mark.parametrize(
    ("headers", "limits", "signing_s"),
    [
        ({}, {}, Timeouts().signing_s),
        ({}, {"signature_s": 60}, 30.0),  # not until it is invalid
        ({"authorization": "Bearer token"}, {}, TOKEN_S),
        ({"Authorization": "Bearer token"}, {"signing_s": 20}, 20.0),
    ],
)
def test_a_signature_is_used_for_minutes(
    proxy: FaultProxy, headers: dict[str, str], limits: dict[str, Any], signing_s: float
) -> None:
    urls, now = iter(("http://a/1", "http://a/2")), [0.0]
    remote = RemotePath("s3://signed/a.tar", options(proxy), timeout_s=Timeouts(**limits))
    signer = RequestSigner(remote, lambda *_: SignedRequest(next(urls), {"headers": headers}), lambda: now[0])
    for now[0], number in ((0.0, 1), (signing_s - 1.0, 1), (signing_s, 2)):
        assert signer()[1] == f"http://a/{number}"


def test_an_error_shows_its_code_and_the_region_to_pass(proxy: FaultProxy) -> None:
    body = b"<?xml version='1.0'?><Error><Code>%s</Code><Secret>hunter2</Secret>%s</Error>"
    xml: dict[str, str | None] = {"Content-Type": "application/xml"}
    for status, code, region, message in (
        (403, b"InvalidAccessKeyId", b"", r"Forbidden \(InvalidAccessKeyId\)\. Check the credentials"),
        (
            400,
            b"AuthorizationQueryParametersError",
            b"<Region>eu-west-1</Region>",
            r'region eu-west-1: pass storage_options={"client_kwargs": {"region_name": ',
        ),
    ):
        proxy.faults[:] = [Fault(sent_status=status, body=body % (code, region), headers=xml)]
        with pytest.raises(
            ShardOpenError, match=rf"s3://signed/a\.tar cannot be opened: HTTP status {status}, "
        ) as found:
            open_url("s3://signed/a.tar", storage_options=options(proxy))
        assert found.match(message)
        assert "hunter2" not in str(found.value)


def test_a_forked_process_reads_after_its_parent(
    proxy: FaultProxy, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    def read() -> None:
        with open_url("s3://signed/a.tar", storage_options=options(proxy)) as stream:
            assert stream.read() == BODY

    read()
    assert forked(read) == 0
