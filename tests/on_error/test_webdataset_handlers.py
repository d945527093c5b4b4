"""With webdataset's handlers as ``on_error``, each stage does the same as webdataset's stage."""

from __future__ import annotations

import tarfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
from readers import keys_of
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.testing import build_shard

Handler = Callable[[Exception], bool]
HANDLERS: list[Handler] = [
    webdataset.reraise_exception,
    webdataset.warn_and_continue,
    webdataset.ignore_and_continue,
    webdataset.warn_and_stop,
    webdataset.ignore_and_stop,
]
each_handler = pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.__name__)
URLS = [f"{number}.tar" for number in range(4)]
#: The size of a sample in the shards: two headers, and one and two blocks of data.
SAMPLE = 5 * 512


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """webdataset's warning handlers sleep for half a second."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.fixture(autouse=True)
def shards(folder: Path) -> None:
    """Four shards of ten samples in the current directory."""
    for number, url in enumerate(URLS):
        build_shard(url, [{"__key__": f"{number}{n}", "cls": "1", "txt": "x" * 700} for n in range(10)])


# Reading


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:size]


def damage(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + b"!!" + data[at + 2 :]


#: Damage to the second shard, which webdataset reads either up to the damage or not at all.
DAMAGE = {
    "missing": None,
    "empty": cut(0),
    "a page of a web server": lambda data: b"<html>503</html>" * 100,
    "first header damaged": damage(3),
    "inside a file": cut(4 * SAMPLE + 1024 + 512 + 300),
    "inside the first file of a sample": cut(4 * SAMPLE + 512),
    "inside a header": cut(4 * SAMPLE + 1024 + 100),
    "after a sample": cut(4 * SAMPLE),
    "header damaged": damage(4 * SAMPLE + 3),
}


def theirs(handler: Handler) -> list[dict[str, Any]]:
    return list(webdataset.WebDataset(URLS, shardshuffle=False, handler=handler, empty_check=False))


def ours(handler: Handler) -> Any:
    return ShardList(URLS).sharding_filter().load_wds_shards(on_error=handler).group_samples(on_error=handler)


def outcome(run: Callable[[], Any]) -> Any:
    """Return the result, or "error"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except (OSError, EOFError, ValueError, KeyError, tarfile.ReadError, webdataset.autodecode.DecodingError):
            return "error"


@each_handler
@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_shard(handler: Handler, change: Callable[[bytes], bytes] | None) -> None:
    path = Path(URLS[1])
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    expected = outcome(lambda: [each["__key__"] for each in theirs(handler) if "txt" in each])
    got = outcome(lambda: keys_of(ours(handler)))
    if got == "error":  # theirs takes some truncated shards for complete ones
        assert handler is webdataset.reraise_exception
        return
    # The sample before the damage may lack a file; theirs ignores this.
    last = max((key for key in expected if key[0] == "1"), default="")
    assert got in (expected, [key for key in expected if key != last])


def test_unread_samples_are_counted() -> None:
    cut_shard, missing = Path(URLS[0]), Path(URLS[2])
    cut_shard.write_bytes(cut_shard.read_bytes()[: 4 * SAMPLE + 300])
    missing.unlink()
    kinds = {
        "load_wds_shards: TruncatedShardError": 1,
        "load_wds_shards: ShardOpenError": 1,
        "load_wds_shards: not read": 1,
    }
    pipe = ours(webdataset.ignore_and_stop)
    assert len(list(pipe)) == 3 + 10
    assert dict(count_skipped(pipe).counts) == kinds
    assert len(list(DataLoader(ours(webdataset.ignore_and_stop), batch_size=None))) == 3 + 10
    with DataLoader2(ours(webdataset.ignore_and_stop), reading_service=ShardReadingService()) as loader:
        assert len(list(loader)) == 3 + 10
        assert dict(loader.reading_service.report().skipped.counts) == kinds


# Warnings


@pytest.mark.parametrize(
    ("handler", "answers", "messages"),
    [
        (webdataset.warn_and_continue, [True] * 3, ["a_stage skipped an item: ValueError: bad"]),
        (webdataset.ignore_and_continue, [True] * 3, []),
        (webdataset.warn_and_stop, [False], ["a_stage ended early, because of an error: ValueError: bad"]),
        (webdataset.ignore_and_stop, [False], []),
    ],
)
def test_a_handler_of_webdataset_does_what_its_name_says_and_never_sleeps(
    handler: Handler, answers: list[bool], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", None)  # calling it would be an error
    policy = ErrorPolicy(handler, "a_stage")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [policy.handle(ValueError("bad")) for _ in answers] == answers
    assert [str(warning.message) for warning in caught] == messages
    assert policy.has_ended is (not answers[0])
