"""`redact` hides possible credentials, and keeps what identifies the file and the program."""

from __future__ import annotations

import ast
import logging
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import ShardOpenError
from wds_datapipes.redaction import SAFE_URL, redact, redact_text, short_repr
from wds_datapipes.redaction.storage_options import redactor_of, redactor_of_command
from wds_datapipes.redaction.urls import mask_credentials, redact_urls
from wds_datapipes.user_warnings import warn_user

URLS = [
    ("https://me:pa#ss@host/a.tar", "https://***@host/a.tar"),
    ("https://me:pa?ss@host/a.tar?versionId=3x", "https://***@host/a.tar?versionId=3x"),
    ("https://to#k?en@host/a.tar", "https://***@host/a.tar"),
    ("s3://me:p@s/s@bucket/a.tar", "s3://***@bucket/a.tar"),
    ("http://me:my x1y@127.0.0.1:1/a.tar", "http://***@127.0.0.1:1/a.tar"),
    ("http://me:x1y my@host/a.tar", "http://***@host/a.tar"),
    ("s3://me:a\tx1y b@bucket/a.tar?versionId=3x", "s3://***@bucket/a.tar?versionId=3x"),
    ("https://me:p@ x1y@host.org/a.tar", "https://***@host.org/a.tar"),
    ("http://me:80/x1y@127.0.0.1:1/a.tar", "http://***@127.0.0.1:1/a.tar"),
    ("s3://me:80/x1y@store.example.com/a.tar", "s3://***@store.example.com/a.tar"),
    ("http://me:80/x1y@localhost/a.tar", "http://***@localhost/a.tar"),
    ("file://me:x1y@host/a.tar", "file://***@host/a.tar"),
    ("simplecache::http://me:my x1y@host/a.tar", "simplecache::http://***@host/a.tar"),
    ("http:/me:x1y@127.0.0.1:1", "http:/***@127.0.0.1:1"),
    ("https://host/a.tar?jwt=x1y&hmac=x1y&sign=x1y", "https://host/a.tar?jwt=***&hmac=***&sign=***"),
    ("https://host/a.tar?hdnts=exp=1~acl=/*~hmac=0a", "https://host/a.tar?hdnts=***"),
    ("https://host/a.tar?whatever=x1y;z=x1y#x1y", "https://host/a.tar?whatever=***;z=***#***"),
    ("https://host/a.tar?x1y", "https://host/a.tar?***"),
    ("https://host/a.tar?file=https://me:x1y@h", "https://host/a.tar?file=https://***@h"),
    ("zip://a.tar::https://me:x1y@host/b.zip?sig=x1y", "zip://a.tar::https://***@host/b.zip?sig=***"),
]

COMMANDS = [
    ("curl -H 'X-Api-Key: x1y' https://host/a.tar", "curl -H *** https://host/a.tar"),
    ("curl -sb 'session=x1y' -H 'Cookie: x1y' https://host/a.tar", "curl *** *** -H *** https://host/a.tar"),
    ("curl --header=X-Api-Key:x1y -u me:x1y -o - https://h/a.tar", "curl *** -u *** -o - https://h/a.tar"),
    ("curl 'https://me:x1y@host/a.tar?jwt=x1y' | zcat", "curl 'https://***@host/a.tar?jwt=***' | zcat"),
    ("sshpass -px1y2z3 scp me@host:/data/a.tar -", "sshpass *** *** *** -"),
    ("gpg --batch --passphrase x1y -d a.tar.gpg", "gpg --batch --passphrase *** -d a.tar.gpg"),
    ("gpg --passphrase /x1y -d a.gpg 2>&1", "gpg --passphrase *** -d a.gpg 2>&1"),
    ("echo x1y | gpg --passphrase-fd 0 -d a.gpg", "echo *** | gpg --passphrase-fd *** -d a.gpg"),
    ("rclone cat :s3,access_key_id=x1y,secret_access_key=x1y:bucket/a.tar", "rclone *** ***"),
    ("TOKEN=x1y PATH=/bin get /data/a.tar", "*** *** *** /data/a.tar"),
    ('KEYS=(x1y x1y); get "$KEYS" $1 /data/a.tar', "***(*** ***); *** *** *** /data/a.tar"),
    ("ssh host '/bin/get x1y /data/a.tar'", "ssh *** ***"),
    ("cat <<END\nx1y\nEND", "cat <<***\n***\n***"),
    ('gpg --passphrase "x1y z\\"x1y" a.gpg', "gpg --passphrase *** a.gpg"),
    ("get 'x1y", "get ***"),
]

#: Nothing here is a credential.
HARMLESS = [
    "data/a#b?c=d.tar",
    "file:///data/a#b?c=d.tar",
    "s3://bucket/train-{000..146}.tar",
    "s3://bucket/a@b/*.tar",
    "http://host:8080/a@b.tar?part=1",
    "http://[::1]:8080/a.tar",
    "http://host:8080/datasets/me/set@main/a.tar",
    "http://host:8080/v@1.0/a.tar",
    "hf://datasets/me/set@main/a.tar",
    "https://host/a.tar?X-Amz-Date=20260101T000000Z&X-Amz-Expires=3600&se=2026-01-01&download=true",
    "pipe:zcat /data/train-{000..003}.tar.gz | head -c - 2>/dev/null",
    "pipe:cat /data/me@here/a#1.tar",
    "pipe:cat > x.part && mv x.part /data/x.tar",
]


@pytest.mark.parametrize(("url", "shown"), [*URLS, *((f"pipe:{each}", f"pipe:{shown}") for each, shown in COMMANDS)])
def test_a_secret_is_hidden_and_the_rest_is_shown(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert redact(shown) == shown
    quoted = redact_text(f"There is no file {url!r} here").removeprefix("There is no file ").removesuffix(" here")
    assert ast.literal_eval(quoted) == shown
    assert redact(f"{url.replace('::', ':')}::{url}".replace("::::", "::")).count("x1y") == 0
    assert redact(url.replace("pipe:", "PIPE:")) == shown.replace("pipe:", "PIPE:")


@pytest.mark.parametrize("url", HARMLESS)
def test_harmless_text_is_shown(url: str) -> None:
    assert redact(url) == url
    assert redact_text(f"{url} cannot be opened") == f"{url} cannot be opened"


WORDS = st.text("abcXYZ0189-._~+/=!$%&'\" \\@:?#;|()<>{}\n", max_size=12).map(lambda word: f"Zq7{word}7qZ")


@given(st.from_regex(SAFE_URL, fullmatch=True))
def test_a_safe_url_has_nothing_to_hide(url: str) -> None:
    assert mask_credentials(redact_urls(url)) == url


@settings(max_examples=40)
@given(WORDS)
def test_no_value_of_a_command_is_shown(secret: str) -> None:
    word = "'" + secret.replace("'", "'\\''") + "'"
    for command in (
        f"get --key {word} a.tar",
        f"get --key={word} a.tar",
        f"get -k {word} a.tar",
        f"get -k{word} a.tar",
        f"get {word} a.tar",
        f"KEY={word} get a.tar",
        f"ssh host {word}",
        f"get <<< {word}",
        f"get me:{word}@host",
        f"get $(echo {word})",
    ):
        shown = redact(f"pipe:{command}")
        assert "Zq7" not in shown.replace("ssh host 'Zq7", "")
        assert "7qZ" not in shown
        if "me:" in command:
            continue  # a part of a word that contains separators cannot be found in a message
        assert "Zq7" not in redactor_of_command(command)(f"no such user: {secret}, in {command}")


def test_a_library_may_quote_any_part_of_a_url() -> None:
    hide = redactor_of({}, "http://me:Zq7?x%2F@host/a.tar?x=Zq78y%2F")
    assert (
        hide("Port could not be cast to integer value as 'Zq7'") == "Port could not be cast to integer value as '***'"
    )
    assert hide("GET /a.tar?x=Zq78y/ failed") == "GET /a.tar?x=*** failed"


def test_errors_warnings_and_logs_are_redacted_wherever_they_come_from(caplog: pytest.LogCaptureFixture) -> None:
    text = "nothing at https://me:Zq7@host/a.tar or 'pipe:get Zq7'"
    want = "nothing at https://***@host/a.tar or 'pipe:get ***'"
    assert str(ShardOpenError(text)) == want
    assert ShardOpenError(text).args == (want,)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_user(text)
    assert [str(each.message) for each in found] == [want]
    logging.getLogger("wds_datapipes").warning("%s", text)
    assert caplog.messages == [want]


def test_a_tokenizer_is_not_a_token() -> None:
    assert redact_text("tokenizer: 'bert-base', token: 'Zq7'") == "tokenizer: 'bert-base', token: '***'"


def test_a_value_without_a_repr_is_described_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    assert short_repr(Broken()).startswith("<Broken instance at 0x")


def test_the_identity_of_a_url_ignores_its_signature_only() -> None:
    one, again, other = (f"https://h/?file={name}&sig={sig}" for name, sig in (("a", "1"), ("a", "2"), ("b", "1")))
    assert mask_credentials(one) == mask_credentials(again) != mask_credentials(other)
