"""Advice in messages: the argument exists where the error is raised, and passing it helps."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

import wds_datapipes
from wds_datapipes import (
    IndexedSamples,
    JobOptions,
    ReadLimits,
    ReadOptions,
    Sample,
    ShardList,
    convert_shards,
    dataset_stats,
    hints,
    last_dot,
    verify_shards,
)
from wds_datapipes import index as indexes
from wds_datapipes.errors import CorruptShardError, WdsError
from wds_datapipes.hints import ARGUMENTS, END_MARKER, IGNORE_ZEROS, LIMITS, Hint
from wds_datapipes.index import AccessOptions, IndexOptions, build_index, build_indexes, read_table, write_dali_index
from wds_datapipes.loading.transport.serialization import SendableError
from wds_datapipes.signatures import phrase_for

PACKAGE = Path(wds_datapipes.__file__).parent
#: Advice to pass an argument.
ADVICE = re.compile(r"\b(?:pass|use|choose|set|with|by|or|and|only|to) ([a-z_]+)=", re.IGNORECASE)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings, with {} in place of what is inserted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    skipped = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped | parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


#: For each module with advice that is not a hint, the functions and stages that the user has called then, by the name
#: of the argument; "" for an argument of another program.
CALLED: dict[str, dict[str, str]] = {
    "codecs/decoding.py": {"partial": "wds_decode", "only": "wds_decode"},
    "foreign_names.py": {"on_error": ""},  # what to write instead of another package's arguments
    "index/format/index_lookup.py": {"access": "IndexedSamples read_table", "indexing": "AccessOptions"},
    "index/order/batch_share.py": {"remainder": "IndexedSamples"},
    "index/order/substitutes.py": {"select": "IndexedSamples"},
    "index/order/lanes.py": {"lanes": "IndexedSamples"},
    "index/order/join.py": {"missing": "Join"},
    "index/read/assemble.py": {"fields": "IndexedSamples"},
    "index/order/select.py": {"order": "IndexedSamples"},
    "integrations/dali.py": {"paths": "", "cycle": ""},
    "io/remote/http_request.py": {"no_proxy": ""},
    "io/urls.py": {"replace": "register_opener", "allow_local_files": "ShardList"},
    "loading/checkpoint/format.py": {"snapshot_every_n_steps": "", "snapshot_frequency": ""},
    "loading/checkpoint/resharding.py": {"distributed": "StatefulShards ShardReadingService"},
    "loading/distributed.py": {"distributed": "StatefulShards ShardReadingService"},
    "index/order/timeline.py": {"snapshot_every_n_steps": ""},  # of the StatefulDataLoader
    "loading/loader_batches.py": {"num_workers": ""},  # of the DataLoader
    "loading/service/service.py": {"num_workers": "ShardReadingService"},
    "loading/service/service_loop.py": {"distributed": "ShardReadingService"},
    "loading/stateful_dataset/dataset.py": {"distributed": "StatefulShards"},
    "loading/stateful_dataset/epochs.py": {"num_workers": ""},
    "loading/torchdata_patches/local_functions.py": {"multiprocessing_context": ""},
    "loading/transport/protocol.py": {"num_workers": "ShardReadingService"},
    "loading/transport/shared_memory.py": {"num_workers": "ShardReadingService"},
    "pipes/foreign_calls.py": {"order": "IndexedSamples"},
    "loading/workers/exit_message.py": {"PYTHONFAULTHANDLER": ""},
    "loading/workers/pool.py": {"num_workers": "ShardReadingService"},
    "pipes/sharding.py": {"global_batch_size": "IndexedSamples"},
    "parallel/executors.py": {"executor": "convert_shards build_indexes"},
    "pipes/samples/indexed_phases.py": {"epoch": "IndexedSamples"},
    "pipes/shards/shard_reading.py": {"open_shards": "load_wds_shards load_wds_records"},
    "pipes/shards/cache_wds_shards.py": {"max_bytes": "cache_wds_shards"},
    "pipes/shards/listing.py": {"buffer_size": ""},  # of torch's stage
    "tools/plan/training_run.py": {"cache_bytes": "AccessOptions"},
    "index/order/rows/row_columns.py": {"select": "IndexedSamples"},
    "tools/plan/planned_rows.py": {"balance": "Pack"},
    "samples/batching.py": {"crop": "ImageDecoder"},
    "samples/bucketing.py": {"on_error": "bucket_samples"},
    "samples/fields.py": {"missing": "to_tuple"},
    "samples/packing.py": {"layout": "pack_samples", "long_samples": "pack_samples", "on_error": "pack_samples"},
    "samples/select.py": {"remainder": "IndexedSamples", "duplicate_is_error": "rename_keys"},
    "shards/patterns.py": {"allow_local_files": "ShardList"},
    "shards/records.py": {"format": "load_wds_records", "key": "load_wds_records", "fields": "load_wds_records"},
    "writing/packer.py": {"limits": "load_wds_shards"},
}


def find_called(name: str) -> Callable[..., Any]:
    """Return a function, a class or a stage."""
    for module in (wds_datapipes, indexes):
        if name in module.__all__:
            return getattr(module, name)  # type: ignore[no-any-return]
    from torch.utils.data import IterDataPipe

    stage = IterDataPipe.functions[name]
    return stage.func if hasattr(stage, "func") else stage


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_advice_names_an_argument_of_what_the_user_called(path: Path) -> None:
    called = CALLED.get(path.relative_to(PACKAGE).as_posix(), {})
    found = {name for text in texts_of(path) for name in ADVICE.findall(text)} if path.name != "hints.py" else set()
    assert {name for name in found if name in called} == found, "write a Hint, or say who takes the argument"
    for name in found:
        for function in map(find_called, called[name].split()):
            assert phrase_for(function, Hint(name)).startswith(f"pass {name}=")


def all_hints() -> list[Hint]:
    return [*(each for each in vars(hints).values() if isinstance(each, Hint)), *LIMITS.values()]


def test_the_table_has_every_argument_that_a_hint_names() -> None:
    assert {hint.argument for hint in all_hints()} == ARGUMENTS.keys()
    assert set(LIMITS) == set(inspect.signature(ReadLimits).parameters)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_the_page_of_an_argument_explains_it(argument: str) -> None:
    page = (PACKAGE.parent / ARGUMENTS[argument].page).read_text(encoding="utf-8")
    assert argument in page or (ARGUMENTS[argument].option or f"--{argument}".replace("_", "-")) in page


def damaged() -> CorruptShardError:
    return CorruptShardError("s3://me:secret@host/a.tar is odd: ", IGNORE_ZEROS, " or ", END_MARKER, " if this is so")


TEXT = 's3://***@host/a.tar is odd: pass ignore_zeros=True or pass end_marker="optional" if this is so'


def test_an_error_carries_its_hints() -> None:
    assert str(damaged()) == TEXT
    assert damaged().hints == (IGNORE_ZEROS, END_MARKER)
    assert WdsError("a").hints == WdsError().hints == ()
    assert (
        damaged()
        .args[0]
        .spell(lambda hint: f"<{hint.argument}>")
        .endswith("<ignore_zeros> or <end_marker> if this is so")
    )
    outer = WdsError("The shard failed: ", str(damaged()), ". ", LIMITS["headers"])
    assert str(outer) == f"The shard failed: {TEXT}. pass limits=ReadLimits(headers=...)"
    assert outer.hints == (IGNORE_ZEROS, END_MARKER, LIMITS["headers"])


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_copy_of_an_error_keeps_its_hints_and_their_words(
    copied: Callable[[CorruptShardError], CorruptShardError],
) -> None:
    error = damaged()
    assert (str(copied(error)), copied(error).hints) == (TEXT, error.hints)
    error.args = (error.args[0].spell(lambda hint: f"use --{hint.argument}"),)
    assert (str(copied(error)), copied(error).hints) == (str(error), error.hints)
    assert "use --ignore_zeros or use --end_marker" in str(copied(error))


@pytest.mark.parametrize("wrapper", [ExceptionWrapper, SendableError])
def test_an_error_from_another_process_has_its_advice(wrapper: Callable[..., ExceptionWrapper]) -> None:
    try:
        raise damaged()
    except CorruptShardError:
        wrapped = pickle.loads(pickle.dumps(wrapper(where="in a worker")))
    with pytest.raises(CorruptShardError, match=re.escape(TEXT)) as caught:
        wrapped.reraise()
    # PyTorch's DataLoader keeps only the text of an error.
    assert caught.value.hints == ((IGNORE_ZEROS, END_MARKER) if wrapper is SendableError else ())


def write(path: Path, names: list[str], *, form: int = tarfile.GNU_FORMAT) -> bytes:
    with tarfile.open(path, "w", format=form) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, BytesIO(b"1"))
    return path.read_bytes()


def write_repeated_headers(path: Path) -> bytes:
    member = tarfile.TarInfo("a.cls")
    global_headers = tarfile.TarInfo.create_pax_global_header({"comment": "x"}) * 300
    return global_headers + member.tobuf() + bytes(1024)


#: Valid shards that are not read by default, and what is advised.
SHARDS: dict[str, Callable[[Path], bytes]] = {
    "end_marker": lambda path: write(path, ["a.cls", "b.cls"])[:2048],
    "ignore_zeros": lambda path: write(path, ["a.cls"]) + write(path, ["b.cls"]),
    "on_duplicate": lambda path: write(path, ["a.cls", "a.cls"]),
    "name_bytes": lambda path: write(path, [f"{'d/' * 3000}a.cls"]),
    "headers": write_repeated_headers,
    "tail_bytes": lambda path: write(path, ["a.cls"]) + bytes(20_000),
}


def stream(url: str, **options: Any) -> object:
    grouping = {name: options.pop(name) for name in ("on_duplicate",) if name in options}
    return list(ShardList(url).load_wds_shards(**options).group_samples(**grouping))


def shorten(sample: Sample) -> Sample:
    return {**sample, "__key__": sample["__key__"][-1]}


def converted(url: str, **options: Any) -> object:
    job = replace(options.pop("job", JobOptions()), progress=False, retries=0)
    return convert_shards(shorten, [url], f"{url}.out/", num_workers=0, job=job, **options)


ENTRIES: dict[str, Callable[..., object]] = {
    "stream": stream,
    "IndexedSamples": lambda url, **options: list(IndexedSamples(url, **options)),
    "build_index": build_index,
    "build_indexes": lambda url, **options: build_indexes([url], num_workers=0, progress=False, **options),
    "build_indexes in processes": lambda url, **options: build_indexes([url], num_workers=2, **options),
    "read_table": read_table,
    "write_dali_index": write_dali_index,
    "convert_shards": converted,
}
NAMES = {
    "JobOptions": JobOptions,
    "AccessOptions": AccessOptions,
    "IndexOptions": IndexOptions,
    "ReadLimits": ReadLimits,
    "last_dot": last_dot,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", SHARDS)
def test_passing_what_a_message_advises_helps(tmp_path: Path, kind: str, entry: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(SHARDS[kind](path))
    with pytest.raises(WdsError) as caught:
        ENTRIES[entry](str(path))
    advice = re.search(rf"pass (\w+=.*?{kind}=.*?|{kind}=.*?)(?= |$|;|,)", str(caught.value))
    if entry == "convert_shards" and kind in ("ignore_zeros", "on_duplicate"):
        assert re.search(rf"read it with \.\w+\({kind}=", str(caught.value))
        return
    assert advice is not None, str(caught.value)
    arguments = eval(f"dict({advice[1].replace('...', 'None')})", dict(NAMES))
    ENTRIES[entry](str(path), **arguments)


def test_the_faults_of_a_dataset_are_spelled_for_the_function_that_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(SHARDS["end_marker"](path))
    (shard,) = verify_shards(str(path), num_workers=0, progress=False)
    (fault,) = dataset_stats(str(path), num_workers=0, progress=False).faults
    advice = 'pass options=ReadOptions(end_marker="optional")'
    assert [advice in message for message in (shard.faults[0].message, fault.message)] == [True, True]
    options = ReadOptions(end_marker="optional")
    assert not verify_shards(str(path), num_workers=0, progress=False, options=options)[0].faults
    assert not dataset_stats(str(path), num_workers=0, progress=False, options=options).faults
