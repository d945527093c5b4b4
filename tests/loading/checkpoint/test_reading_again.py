"""A resumed run reads only the needed parts of its shards again, and accepts no others."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
import torch
from faults import FaultProxy
from nginx_server import Nginx
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import ShardList
from wds_datapipes.errors import ChangedShardError, StateError
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.shards.position import merge_spans, unpack_positions
from wds_datapipes.testing import build_shard

SECRET = "hunter2hunter2"
COUNT, SIZE = 60, 30_000
#: A header of a tar archive.
HEADER = 512


def samples(shard: int = 0, *, count: int = COUNT, size: int = SIZE) -> list[dict[str, Any]]:
    return [
        {"__key__": f"{shard}-{number:03}", "bin": bytes([number]) * (size + 700 * (number % 5)), "cls": str(number)}
        for number in range(count)
    ]


def pipeline(urls: Any, buffer_size: int = 8, **options: Any) -> Any:
    pipe = ShardList(urls).load_wds_shards(**options).group_samples().shuffle_samples(buffer_size)
    pipe.set_seed(5)
    return pipe


def state_at(pipe: Any, cut: int) -> Any:
    items = iter(pipe)
    for _ in range(cut):
        next(items)
    return json.loads(json.dumps(save_state(pipe)))


def resumed(pipe: IterDataPipe[Any], state: Any) -> IterDataPipe[Any]:
    load_state(pipe, state)
    return pipe


def waiting_runs(state: Any, shard: int = 0) -> list[tuple[int, int]]:
    """The parts of a shard that contain buffered samples."""
    return merge_spans(
        [(start, end) for number, start, end, _ in unpack_positions(state[1]["waiting"]) if number == shard]
    )


def place(state: Any) -> int:
    return int(state[0]["next"][1])


# A server of the web ------------------------------------------------------------------------------------------------


@pytest.fixture
def site(nginx: Nginx, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Serve the working directory; return a function that maps a file name to its URL at a location of nginx."""
    folder = nginx.files / tmp_path.name
    folder.mkdir()
    monkeypatch.chdir(folder)

    def url(name: str, at: str = "") -> str:
        return f"http://127.0.0.1:{proxy.port}/{at}{folder.name}/{name}"

    return url


@pytest.mark.parametrize("cut", [1, 20, 50])
@pytest.mark.parametrize("buffer_size", [1, 8])
def test_only_buffered_samples_of_a_shard_on_the_web_are_read_again(
    site: Any, proxy: FaultProxy, cut: int, buffer_size: int
) -> None:
    size = Path(build_shard("0.tar", samples())).stat().st_size
    url = site(f"0.tar?sig={SECRET}")
    whole = list(pipeline(url, buffer_size))
    state = state_at(pipeline(url, buffer_size), cut)
    proxy.asked.clear()
    assert list(resumed(pipeline(url, buffer_size), state)) == whole[cut:]
    spans = [(0, HEADER), *waiting_runs(state), (place(state), size)]
    assert [part for _, part in proxy.asked] == [f"bytes={start}-{end - 1}" for start, end in spans]


def test_a_buffered_last_sample_is_read_up_to_the_end_of_its_shard(site: Any, proxy: FaultProxy) -> None:
    size = Path(build_shard("0.tar", samples())).stat().st_size
    build_shard("1.tar", samples(1))
    urls = site("{0,1}.tar")
    whole = list(pipeline(urls, 20))
    state = state_at(pipeline(urls, 20), 50)
    runs = waiting_runs(state)
    assert state[0]["next"][0] == 1
    assert runs[-1][1] == -1
    proxy.asked.clear()
    assert list(resumed(pipeline(urls, 20), state)) == whole[50:]
    spans = [(0, HEADER), *runs[:-1], (runs[-1][0], size)]
    assert [part for _, part in proxy.asked][: len(spans)] == [f"bytes={start}-{end - 1}" for start, end in spans]


def test_a_server_without_ranges_is_read_once_from_the_beginning(site: Any, proxy: FaultProxy) -> None:
    build_shard("0.tar", samples())
    url = site("0.tar", "whole/")
    whole = list(pipeline(url))
    state = state_at(pipeline(url), 40)
    proxy.asked.clear()
    assert list(resumed(pipeline(url), state)) == whole[40:]
    assert sorted(part or "" for _, part in proxy.asked) == ["", f"bytes=0-{HEADER - 1}"]


# Other sources -------------------------------------------------------------------------------------------------


def test_a_shard_in_a_seekable_file_system_resumes(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/places/0.tar", Path(build_shard("0.tar", samples())).read_bytes())
    memory.pipe("/places/1.tar.gz", Path(build_shard("1.tar.gz", samples(1))).read_bytes())
    urls = "memory://places/{0.tar,1.tar.gz}"
    whole = list(pipeline(urls))
    for cut in (0, 5, 57, 70, 118, 120):
        assert list(resumed(pipeline(urls), state_at(pipeline(urls), cut))) == whole[cut:]
    memory.rm("/places", recursive=True)


# Streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0.tar", "0.tar.gz"])
@pytest.mark.parametrize("cut", [40, 58])
def test_the_output_of_a_command_is_read_once(folder: Path, name: str, cut: int) -> None:
    build_shard(name, samples())
    url = f"pipe:echo >> {folder}/opened; cat {name}"
    whole = list(pipeline(url))
    state = state_at(pipeline(url), cut)
    assert len(waiting_runs(state)) > 1 or cut > 52
    Path("opened").unlink()
    assert list(resumed(pipeline(url), state)) == whole[cut:]
    assert Path("opened").read_text() == "\n"


def test_skipping_much_of_a_shard_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_shard("0.tar.gz", [{"__key__": str(number), "bin": bytes(1 << 20)} for number in range(40)])
    build_shard("0.tar", [{"__key__": str(number), "bin": bytes(1 << 20)} for number in range(40)])
    caplog.set_level(logging.INFO, "wds_datapipes")
    logged = []
    url = f"pipe:cat 0.tar # https://me:{SECRET}@host/"
    for name, cut in [("0.tar", 35), ("0.tar.gz", 3), ("0.tar.gz", 35), (url, 35)]:
        state = state_at(pipeline(name, 4), cut)
        caplog.clear()
        assert len(list(resumed(pipeline(name, 4), state))) == 40 - cut
        logged.append([(record.name, record.levelname, record.getMessage()) for record in caplog.records])
    assert logged[:2] == [[], []]
    what = "cannot be read from an offset: skipping its first {} MB to resume"
    megabytes = 38 * ((1 << 20) + 512) // 1_000_000
    assert logged[2] == [("wds_datapipes", "INFO", f"0.tar.gz {what.format(megabytes)}")]
    assert logged[3] == [("wds_datapipes", "INFO", f"pipe:cat 0.tar *** https://***@host/ {what.format(megabytes)}")]


# Changed shards -----------------------------------------------------------------------------------------------------


def shorter() -> list[dict[str, Any]]:
    return samples(size=SIZE - 600)


def renamed() -> list[dict[str, Any]]:
    return [{**sample, "__key__": "9" + sample["__key__"][1:]} for sample in samples()]


def fewer() -> list[dict[str, Any]]:
    return samples(count=20)


@pytest.mark.parametrize("kind", ["http:", "0.tar", "0.tar.gz", "pipe:cat 0.tar"])
@pytest.mark.parametrize(("buffer_size", "on_error"), [(1, "raise"), (8, "skip")])
@pytest.mark.parametrize("other", [shorter, renamed, fewer])
def test_a_changed_shard_is_an_error_and_yields_no_sample(
    site: Any, kind: str, buffer_size: int, other: Any, on_error: Any
) -> None:
    url = site("0.tar", "no-version/") if kind == "http:" else kind
    name = url.rpartition("/")[2].rpartition(" ")[2]
    build_shard(name, samples())
    state = state_at(pipeline(url, buffer_size), 40)
    build_shard(name, other())
    with pytest.raises(ChangedShardError, match="with the shards it was saved with"):
        next(iter(resumed(pipeline(url, buffer_size, on_error=on_error), state)))


def test_a_shard_that_ends_before_the_position_is_an_error_on_the_web(site: Any) -> None:
    build_shard("0.tar", samples())
    url = site("0.tar", "no-version/")
    state = state_at(pipeline(url, 1), 40)
    build_shard("0.tar", samples(count=1))
    with pytest.raises(ChangedShardError, match=r"ends before byte \d{7}, where reading should continue"):
        list(resumed(pipeline(url, 1), state))


def is_wanted(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] != b"-")


def never_ending(urls: str) -> Any:
    return ShardList(urls).resample_wds_shards().load_wds_shards().group_samples().filter(is_wanted)


@pytest.mark.parametrize(
    "cut_or_mixed",
    [
        lambda pipe: pipe,
        lambda pipe: pipe.slice_samples(19),
        lambda pipe: pipe.mix_samples(never_ending("other.tar"), stop="never"),
        lambda pipe: pipe.with_epoch(30),
    ],
    ids=["alone", "slice_samples", "mix_samples", "with_epoch"],
)
def test_an_endless_stream_is_not_searched_for_missing_samples(folder: Path, cut_or_mixed: Any) -> None:
    """All labels have changed, but not the bytes around them, so nothing else reveals the change."""

    def new() -> Any:
        pipe = cut_or_mixed(never_ending("{a..c}.tar")).shuffle_samples(5)
        apply_random_seed(pipe, torch.Generator().manual_seed(3))
        return pipe

    names = ("a", "b", "c", "other")
    for name in names:
        build_shard(f"{name}.tar", [{"__key__": f"{name}{number}", "cls": str(number)} for number in range(4)])
    state = state_at(new(), 17)
    assert list(itertools.islice(resumed(new(), state), 3))
    for name in names:
        labels = ["-" if number < 3 else "3" for number in range(4)]
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": label} for n, label in enumerate(labels)])
    with pytest.raises(
        StateError, match=r"SampleShuffler held back .* before it \(\.filter\(\).* drops it each time, in 20,000 tries"
    ):
        next(iter(resumed(new(), state)))
