"""No message contains a credential, wherever it comes from and whatever a failing library says."""

from __future__ import annotations

import io
import json
import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from fsspec.registry import _registry  # type: ignore[import-untyped]  # the same
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]  # the same
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data.graph import traverse_dps

from wds_datapipes import ErrorBudget, ShardList, TarWriter, WriteOptions, read_quarantine
from wds_datapipes.errors import WdsError
from wds_datapipes.index import build_index, read_index
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.loading.report import count_skipped

pytestmark = pytest.mark.usefixtures("pauses")
#: A prefix that no message contains.
SECRETS = st.text("abcXYZ0189-._~+/=!$%&'\" \\", min_size=6).map(lambda word: f"Zq7{word}7qZ")


class BasicAuth(NamedTuple):
    """Like aiohttp's."""

    login: str
    password: str


class Slotted:
    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"Slotted({self.key})"


class Leaky(AbstractFileSystem):  # type: ignore[misc]  # it carries no types
    """A library whose errors contain everything it knows."""

    protocol = "leaky"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path)

    def _fail(self, path: str, *_: Any, **__: Any) -> Any:
        found = io.StringIO()
        for value in self.storage_options.values():
            print(value, repr(value), file=found)
            print(*map(str, getattr(value, "values", list)()), file=found)
        try:
            raise ValueError(f"{path} {found.getvalue()}")
        except ValueError as error:
            # Transient, so that it is retried, which is logged.
            raise ConnectionError(f"{path} with {self.storage_options!r}: {found.getvalue()}") from error

    open = info = ls = glob = find = exists = mkdirs = makedirs = _open = _fail


class Half(Leaky):
    """The same, after part of a file was read."""

    protocol = "halfleaky"

    def open(self, path: str, *_: Any, **__: Any) -> Any:
        fail = self._fail

        class File(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                return super().read(min(size or 0, 512)) if self.tell() < 512 else bytes(fail(path))

        return File(bytes(1024))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": 1024, "type": "file"}


@pytest.fixture(autouse=True, scope="module")
def leaky() -> Iterator[None]:
    for kind in (Leaky, Half):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    yield
    for kind in (Leaky, Half):
        del _registry[kind.protocol]


#: The positions of a secret in a URL.
PLACES: dict[str, Callable[[str], str]] = {
    "user": lambda secret: f"me:{quote(secret, safe='')}@host/d/a.tar",
    "AWS": lambda secret: f"host/a.tar?X-Amz-Credential=k&X-Amz-Signature={quote_plus(secret)}&x=1",
    "AWS, for a while": lambda secret: f"host/a.tar?X-Amz-Security-Token={quote(secret)}",
    "Google": lambda secret: f"host/a.tar?X-Goog-Credential=k&X-Goog-Signature={quote(secret, safe='')}",
    "Azure": lambda secret: f"host/a.tar?sv=2026-01-01&se=2027&sig={quote(secret, safe='')}",
    "others": lambda secret: f"host/a.tar?access_token={quote(secret, safe='')}#x",
    "another URL in it": lambda secret: (
        f"host/a.tar?from={quote(f'https://h/b.tar?sig={quote_plus(secret)}', safe='')}"
    ),
}

#: How options contain it.
OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "text": lambda secret: {"token": secret},
    "nested": lambda secret: {"client_kwargs": {"headers": {"X-Api": secret}}},
    "bytes": lambda secret: {"pkey": secret.encode()},
    "list": lambda secret: {"keys": [["a", secret]]},
    "tuple": lambda secret: {"auth": BasicAuth("me", secret)},
    "object": lambda secret: {"credential": SimpleNamespace(inner=SimpleNamespace(password=secret))},
    "slots": lambda secret: {"credential": Slotted(secret)},
    "connection": lambda secret: {"connection_string": f"AccountName=me;AccountKey={secret};End=x"},
    "short": lambda _: {"pin": "Zq7"},
    "number": lambda _: {"pin": 77_7777_7777},
}


def forms_of(secret: str) -> tuple[str, ...]:
    """The secret, and its encoded forms."""
    return (secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1], "Zq7", "7qZ", "7777777777")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error with all its causes and contexts, displayed or not."""
    if error is not None:
        yield error
        yield from chain(error.__cause__)
        yield from chain(error.__context__)


def words_of(error: BaseException) -> str:
    each = [f"{found} {found!r} {found.args} {vars(found)} {getattr(found, '__notes__', '')}" for found in chain(error)]
    return "\n".join([*each, *traceback.format_exception(error)])


def uses(url: str, options: dict[str, Any], folder: str) -> list[Callable[[], Any]]:
    """Everything that is done with a URL."""
    asked: dict[str, Any] = {"storage_options": options}

    def decoded() -> Any:
        return list(ShardList([url]).load_wds_shards(**asked, retries=1).group_samples().wds_decode())

    def ahead() -> Any:
        return list(ShardList([url, url]).load_wds_shards(**asked, retries=1, on_error="skip"))

    def cached() -> Any:
        shards = ShardList([url]).cache_wds_shards(f"{folder}/cache")
        return list(shards.load_wds_shards(**asked, retries=1))

    def ranges() -> Any:
        parts = open_parts(url, retries=1, **asked)
        assert parts is not None
        return parts.part(512, 1024).read()

    return [
        decoded,
        ahead,
        cached,
        ranges,
        lambda: open_url(url, retries=1, **asked).read(),
        lambda: ShardList(url.partition("?")[0].replace("a.tar", "*.tar"), **asked),
        lambda: ShardList(url.partition("?")[0].replace("a.tar", ""), **asked),
        lambda: file_facts(url, retries=1, **asked),
        lambda: build_index(url, **asked),
        lambda: read_index(url, **asked),
        lambda: TarWriter(url, WriteOptions(**asked)).close(),
    ]


def text_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except WdsError as error:
        return words_of(error)
    return ""


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECRETS, st.sampled_from(["leaky", "halfleaky"]), st.sampled_from([*PLACES]), st.sampled_from([*OPTIONS]))
@example("Zq7a'\"b\\ c7qZ", "leaky", "user", "object")
@example("Zq7a/b%+=c7qZ", "halfleaky", "Azure", "connection")
def test_no_log_record_contains_a_secret(
    caplog: pytest.LogCaptureFixture, secret: str, scheme: str, place: str, kind: str
) -> None:
    url, options = f"{scheme}://{PLACES[place](secret)}", OPTIONS[kind](secret)
    caplog.clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        caplog.at_level(logging.DEBUG, "wds_datapipes"),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        budget = ErrorBudget(quarantine=f"{folder}/passed-over", warn=True)
        loader = ShardList([url]).load_wds_shards(storage_options=options, retries=1, on_error=budget)
        pipe = loader.group_samples()
        assert list(pipe) == []
        words = [f"{pipe} {pipe!r} {traverse_dps(pipe)}"]
        failures = [text_of(use) for use in uses(url, options, folder)]
        assert len([*filter(None, failures)]) >= 7
        words.extend(failures)
        assert len(read_quarantine(f"{folder}/passed-over")) == 1
        words.append(Path(f"{folder}/passed-over").read_text())
        words.extend(str(path) for path in Path(folder).rglob("*"))
    skipped = count_skipped(pipe)
    assert skipped.total == 1
    words.extend([str(skipped), loader.counters.shard, *caplog.messages, *(str(each.message) for each in warned)])
    assert caplog.messages
    for line in words:
        assert not [form for form in forms_of(secret) if form in line], line


def test_options_of_commands_can_be_given_secretly(tmp_path: Path, program: Any) -> None:
    options = tmp_path / "options.json"
    options.write_text(json.dumps({"token": "Zq7x7qZ"}))
    done = program("ls", "leaky://host/a.tar", "--storage-options", f"@{options}")
    assert done.code == 2
    assert done.err.startswith("Error: leaky://host/a.tar cannot be opened: ConnectionError")
    assert "Zq7" not in done.err + done.out
    for text in ('["Zq7"]', '"Zq7"', '{"Zq7"'):
        done = program("ls", "leaky://host/a.tar", "--storage-options", text)
        assert done.code == 2
        assert "Zq7" not in done.err
    done = program("ls", "leaky://host/a.tar", "--storage-options", "@none.json")
    assert "--storage-options: No such file or directory" in done.err
