"""A secret in any URL or command appears in nothing that the package shows."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import pickle
import pprint
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.graph import traverse_dps
from torchdata.dataloader2 import DataLoader2

import wds_datapipes
from wds_datapipes import (
    DatasetSpec,
    DirectoryShards,
    ErrorBudget,
    IndexedSamples,
    JobOptions,
    ShardList,
    ShardReadingService,
    ShardWriter,
    TarWriter,
    WriteOptions,
    convert_shards,
    create_shards,
    dataset_stats,
    index,
    verify_shards,
)
from wds_datapipes.index import AccessOptions
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.sample_spec import SampleSpec, UrlPart
from wds_datapipes.tools.prepare.shell_command import SampleCommand
from wds_datapipes.types import ShardInfo

SECRET = "Zq7x+y/z=='s 7qZ"
QUOTED = "'Zq7x+y/z=='\\''s 7qZ'"
WEB = "Zq7x%2By%2Fz%3D%3D7qZ"

#: URLs and commands with the secret, of a shard that cannot be read, is damaged, or is empty. Port 9 refuses.
PLACES = {
    "option": f"pipe:false --passphrase {QUOTED} /data/name.tar",
    "header": "pipe:false -H 'X-Api-Key: Zq7x7qZ' -b 'session=Zq7y7qZ' -u me:Zq7z7qZ https://host/name.tar",
    "variable": f"pipe:TOKEN={QUOTED} false /data/name.tar",
    "URL of a command": f"pipe:false 'https://me:{WEB}@host/name.tar?jwt={WEB}#{WEB}'",
    "rclone": "pipe:false :s3,access_key_id=Zq7x7qZ,secret_access_key=Zq7y7qZ:bucket/name.tar",
    "message": f"pipe:sh -c 'echo oops \"$2\" >&2; exit 3' /data/name.tar -- {QUOTED}",
    "syntax error": f"pipe:cat /data/name.tar; ) {QUOTED}",
    "user": f"http://me:{WEB}@127.0.0.1:9/name.tar",
    "user with ? and #": "http://me:Zq7?x#7qZ@127.0.0.1:9/name.tar",
    "user with white space": "http://me:my Zq7x\ty7qZ@127.0.0.1:9/name.tar",
    "user with digits and a slash": "http://me:80/Zq7x7qZ@127.0.0.1:9/name.tar",
    "user of a file": "file://me:Zq7x7qZ@host/name.tar",
    "user in a chain": "simplecache::http://me:Zq7x7qZ@127.0.0.1:9/name.tar",
    "query": f"http://127.0.0.1:9/name.tar?jwt={WEB}&sign={WEB}&hdnts=exp=1~hmac={WEB}#{WEB}",
    "unknown scheme": f"nosuch://me:{WEB}@host/name.tar?x={WEB}",
}


pytestmark = pytest.mark.usefixtures("pauses")


def read(url: str, folder: Path) -> Iterator[object]:
    for on_error in ("raise", "warn", "skip"):
        pipe = ShardList([url, url]).load_wds_shards(retries=0, on_error=on_error).group_samples().wds_decode()
        yield lambda pipe=pipe: list(pipe)
        yield from (pipe, traverse_dps(pipe), count_skipped(pipe))
    budget = ErrorBudget(max_errors=0, quarantine=folder / "quarantine")
    yield lambda: list(ShardList([url]).load_wds_shards(retries=0, on_error=budget))


def list_shards(url: str, _: Path) -> Iterator[object]:
    for urls in (f"{url}{{", f"{url} ${{NONE}}", f"{url}::", [url, b"x"], [url.encode()], {url}, [(url,)]):
        yield lambda urls=urls: ShardList(urls)
        yield lambda urls=urls: DirectoryShards(urls)
    yield lambda: ShardList(url).load_wds_shards(allow_local_files=False)
    yield lambda: list(ShardList(url).load_wds_shards(allow_local_files=False))
    yield lambda: list(ShardList(url).load_wds_shards(read_ahead=-1))
    yield lambda: list(ShardList(url).batch(1).load_wds_shards())
    yield lambda: list(ShardList(url).load_wds_shards().load_wds_shards())
    yield lambda: list(ShardList(url).group_samples())


def cache(url: str, folder: Path) -> Iterator[object]:
    pipe = ShardList([url]).cache_wds_shards(folder / "cache")
    yield lambda: list(pipe.load_wds_shards(retries=0))
    yield lambda: list(ShardList([url]).batch(1).cache_wds_shards(folder / "cache"))
    yield from (pipe, traverse_dps(pipe))


def load_and_skip(url: str, _: Path) -> Iterator[object]:
    names = [build_shard(f"{name}.tar", [{"__key__": name, "txt": name}]) for name in "ab"]
    pipe = ShardList([url, names[0], url, names[1]]).sharding_filter()
    for on_error, num_workers in (("skip", 0), ("raise", 1)):
        samples = pipe.load_wds_shards(retries=0, on_error=on_error).group_samples()
        with DataLoader2(samples, reading_service=ShardReadingService(num_workers)) as loader:
            yield lambda loader=loader: next(iter(loader))
            report = loader.reading_service.report()
            yield from (report, str(report), loader.state_dict())


def open_it(url: str, _: Path) -> Iterator[object]:
    yield lambda: open_url(url, retries=0).read()
    yield lambda: open_url(url, retries=0, allow_local_files=False).read()
    yield lambda: open_parts(url, retries=0)


def write(url: str, folder: Path) -> Iterator[object]:
    sample = {"__key__": "a", "txt": "x" * 100_000}

    def fill(writer: Any) -> None:
        with writer:
            for number in range(20):
                writer.write(sample | {"__key__": f"{number}"})

    yield lambda: fill(TarWriter(url))
    yield lambda: TarWriter(url, options=WriteOptions(compress=False)).write(sample)  # and it is not closed
    for pattern in (f"{url}%06d", f"{url}%06d%06d", f"{url}%06d.tar".replace("name.tar", "name-%06d.tar.7z")):
        yield lambda pattern=pattern: fill(ShardWriter(pattern, verbose=True))
        yield lambda pattern=pattern: fill(ShardWriter(pattern, resume=True))
        yield lambda pattern=pattern: fill(ShardWriter(pattern, resume=folder / "journal", maxcount=3))
    good = f"pipe:cat > /dev/null; : {url}%06d" if url.startswith("pipe:") else f"{url}%06d"
    for _ in range(2):
        yield lambda: fill(ShardWriter(good, resume=folder / "good", verbose=True))
    shard = build_shard("a.tar", [sample])
    pipe = ShardList(shard).load_wds_shards().group_samples().write_wds_shards(f"{url.replace('%', '%%')}%06d")
    yield lambda: list(pipe)
    yield from (pipe, traverse_dps(pipe))


def convert(url: str, folder: Path) -> Iterator[object]:
    good = build_shard("a.tar", [{"__key__": "a", "txt": "x"}])
    of_text, of_url = (SampleSpec("a", {"txt": part}, "row 1") for part in (b"x", UrlPart(url)))
    quick: dict[str, Any] = {"num_workers": 0, "job": JobOptions(retries=1)}
    yield lambda: convert_shards(same, [url, good], "out/", **quick, if_changed="redo", on_error="skip")
    yield lambda: convert_shards(same, [url, url], "out/", **quick)
    for output in (url, f"{url}%06d", f"{url}{{name}}"):
        yield lambda output=output: convert_shards(
            same, [good, good], output, num_workers=0, job=JobOptions(journal=folder / "journal", retries=1)
        )
        yield lambda output=output: create_shards([of_text], output, num_workers=0)
    yield lambda: create_shards([of_url], "made/%d.tar", num_workers=0, on_error="warn")
    yield lambda: verify_shards([url], decode=True, num_workers=0)
    yield lambda: dataset_stats([url], num_workers=0)
    command = SampleCommand(url.partition(":")[2])
    yield command
    yield lambda: command({"__key__": "a"})
    yield lambda: convert_shards(command, [good], "out2/", **quick)


def same(sample: Any) -> Any:
    return sample


def specify(url: str, folder: Path) -> Iterator[object]:
    good = build_shard("a.tar", [{"__key__": "a", "txt": "x"}])
    one = {"shards": url}
    for datasets in (
        [one, one | {"scale": 2}],
        [one | {"resample": -1}],
        [one | {"choose": 9}],
        [url],
        url,
        [one | {"buckets": [url, url]}],
        [{"shards": {url: 1}}],
    ):
        spec = {"datasets": datasets}
        yield lambda spec=spec: list(DatasetSpec(spec))
        yield lambda spec=spec: list(DatasetSpec(spec).load_wds_shards(retries=0))
        (folder / "spec.json").write_text(json.dumps(spec))
        yield lambda: list(DatasetSpec(folder / "spec.json"))
    yield lambda: DatasetSpec(url)
    yield lambda: DatasetSpec(f"{url}.json")
    yield lambda: DatasetSpec(f"{url}.yaml", allow_local_files=False)
    pipe = DatasetSpec({"datasets": [one, {"shards": good}]})
    yield from (pipe, traverse_dps(pipe))


def index_it(url: str, folder: Path) -> Iterator[object]:
    """Call each function for indexes with the secret in each parameter that may contain it."""
    good = build_shard("a.tar", [{"__key__": "a", "txt": "x"}, {"__key__": "b", "txt": "x"}])
    built = index.build_index(good)
    entry = ShardInfo(url, 2, 1024, "0" * 64)
    manifest = index.Manifest((entry,))
    path = str(folder / "other")
    harmless: dict[str, Any] = {
        "url": good,
        "urls": [good],
        "shards": [good],
        "path": path,
        "folder": path,
        "index": built,
    }
    harmless |= {"indexes": [built], "manifest": manifest}
    planted: dict[str, Any] = {"url": url, "urls": [url, url], "shards": [url], "path": url, "folder": url}
    planted |= {"manifest": index.Manifest((entry, entry))}
    for name in index.__all__:
        found = getattr(index, name)
        parameters = inspect.signature(found).parameters
        required = {each for each, parameter in parameters.items() if parameter.default is parameter.empty}
        # Files that contain the URLs of shards.
        allowed = {"manifest"} if name in ("write_manifest", "write_wids_index") else set()
        for each in (parameters.keys() & planted.keys()) - allowed if required <= harmless.keys() else ():
            arguments = {**{name: harmless[name] for name in required}, each: planted[each]}
            yield lambda found=found, arguments=arguments: found(**arguments)
    table = index.SampleTable([url, url], [built, built])
    yield table
    yield lambda: table.find(["a", "none"])
    yield lambda: IndexedSamples([url, url], access=AccessOptions(index_dir=folder))
    yield lambda: IndexedSamples(manifest)
    yield lambda: IndexedSamples([good], join={"other": [url]})
    yield lambda: IndexedSamples({"one": [url], "two": [url]}, weights={"one": 1, "two": 1})


USES = [read, list_shards, cache, load_and_skip, open_it, write, convert, specify, index_it]

COMMANDS = """
ls --json {}
show {}#a
cat {good} -o {}%06d
verify {good} {}
verify {good} --manifest {}
index {good} --manifest {}
index {} --index-dir f
stats --json {}
bench --json {}
split {} -o o-%06d.tar
shuffle {good} -o {}%06d.tar
sort {} -o t-%06d.tar
map --json --command true {good} {} -o n/ --num-workers 0
map --command true {good} -o {} --num-workers 0
cache warm --json {} --cache-dir c
cache ls --cache-dir c
create recipe {} -o r-%06d.tar
create images {} -o r-%06d.tar
ls {} --storage-options {}
ls {} --storage-options @{}
ls --nosuch {}
nosuch {}
"""


def chained(error: BaseException | None) -> Iterator[BaseException]:
    if error is not None:
        yield error
        yield from chained(error.__cause__)
        yield from chained(error.__context__)


def result_of(use: object) -> object:
    """Call a function, and return its result, or its error if it fails; return any other object."""
    try:
        found = use() if inspect.isfunction(use) else use
        return None if isinstance(found, str) else found  # such as the URL of an index
    except Exception as error:
        return error


def texts_of(found: object) -> Iterator[str]:
    """Return everything shown about an object or an error."""
    if isinstance(found, BaseException):
        for error in chained(found):
            yield f"{error} {error!r} {error.args} {vars(error)} {getattr(error, '__notes__', '')}"
            with contextlib.suppress(TypeError, AttributeError):  # an error of another library
                yield repr(pickle.dumps(error, 0))
        # Without the lines of source code.
        yield "".join(traceback.TracebackException.from_exception(found).format_exception_only())
        return
    yield from (str(found), repr(found), pprint.pformat(found))


@contextlib.contextmanager
def recorded(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG, "wds_datapipes"):
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in warned]
    said += [record.getMessage() for record in caplog.records]
    caplog.clear()


def check(said: list[str], folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.name not in ("spec.json",)]
    said += [str(path.relative_to(folder)) for path in files]
    said += [path.read_text(errors="replace") for path in files if path.is_file()]
    shown = [text for text in said if "Zq7" in text or "7qZ" in text]
    assert not shown, "\n\n".join(shown)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_nothing_shows_a_secret(
    use: Callable[[str, Path], Iterator[object]], place: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recorded(caplog) as said:
        for found in use(PLACES[place], folder):
            said += texts_of(result_of(found))
    check(said, folder)


@pytest.mark.parametrize("place", ["option", "user with ? and #", "user with white space"])
@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
def test_no_command_shows_a_secret(
    command: str, place: str, folder: Path, program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good = build_shard("a.tar", [{"__key__": "a", "txt": "x"}])
    url = PLACES[place]
    words = [word.replace("{good}", good).replace("{}", url) for word in command.split()]
    with recorded(caplog) as said:
        done = program(*words)
    check([*said, done.out, done.err], folder)


def test_each_entry_that_takes_a_url_is_tried() -> None:
    """Every public name with a parameter for a URL, a pattern or a command is in the uses above."""
    kinds = {"url", "urls", "pattern", "path", "spec", "shards", "target", "output", "folder", "source"}
    source = "".join(map(inspect.getsource, USES))
    harmless = {
        "Member",  # a value
        "WorkerReport",
        "ConvertedShard",
        "ReadLimits",
        "ImageDecoder",
        "read_quarantine",  # of a local file
    }
    for name in sorted(set(wds_datapipes.__all__) - harmless):
        found = getattr(wds_datapipes, name)
        if (inspect.isfunction(found) or inspect.isclass(found)) and not kinds.isdisjoint(
            inspect.signature(found).parameters
        ):
            assert re.search(rf"\b{name}\b", source), f"{name} takes a URL and is not tried"
