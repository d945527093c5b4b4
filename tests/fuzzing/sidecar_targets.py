"""Files that describe shards, datasets and runs, written by this package or other programs."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import warnings
from functools import cache
from pathlib import Path
from random import Random
from zlib import crc32

from fuzz_loop import Finding, Target, change_json
from shard_targets import scratch

from wds_datapipes import errors
from wds_datapipes.errors import CorruptSidecarError, SidecarError, StateError
from wds_datapipes.index.format.builder import build_index
from wds_datapipes.index.format.index_file import HEAD, MAGIC, index_bytes, parse_index
from wds_datapipes.index.format.manifest import Manifest, read_manifest, write_manifest
from wds_datapipes.index.format.validity import check_index
from wds_datapipes.on_error.policy import read_quarantine
from wds_datapipes.shard_cache.entry import CopyFacts, Entry
from wds_datapipes.shards.mixture_spec import read_mixture
from wds_datapipes.shards.patterns import expand_braces
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.interop import read_wids_index
from wds_datapipes.types import ShardInfo
from wds_datapipes.writing.journal import FinishedShard, ShardJournal

#: The maximum number of shards to read from a mixture.
LOOKED_AT = 1000


@cache
def shard() -> str:
    """Create the shard that indexes are compared with."""
    samples = [{"__key__": f"{number}", "jpg": "x" * number, "cls": "1"} for number in range(4)]
    return build_shard(scratch() / "a.tar", samples)


@cache
def own_index() -> bytes:
    return index_bytes(build_index(shard()))


def place(name: str, content: bytes) -> str:
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return str(path)


def read_index_bytes(data: bytes) -> None:
    """Read and use an index, after correcting its checksums unless the first byte says not to."""
    content = data[1:] if data[:1] == b"\1" else with_index_checksums(data[1:])
    try:
        index = parse_index(content, name="x")
    except CorruptSidecarError:
        return
    for sample in index:
        for entry in sample.entries:
            if not sample.offset < entry.offset <= entry.offset + entry.size <= sample.end:
                raise Finding(f"{sample} leads out of itself")
    for number, key in enumerate(index.keys):
        if index[number].key != key:
            raise Finding(f"{key!r} is the key of another sample")
    if parse_index(index_bytes(index), name="x") != index:
        raise Finding("an index is another one once it is written and read")
    with contextlib.suppress(SidecarError):
        check_index(index, shard())


def with_index_checksums(content: bytes) -> bytes:
    if len(content) < HEAD.size or content[:8] != MAGIC:
        return content
    (length,) = struct.unpack_from("<I", content, 8)
    text, body = content[HEAD.size : HEAD.size + length], content[HEAD.size + length :]
    with contextlib.suppress(ValueError, RecursionError):
        facts = json.loads(text)
        if isinstance(facts, dict) and facts.get("crc32") != 0:
            facts = {**facts, "bytes": len(body), "crc32": crc32(body)}
            text = json.dumps(facts).encode()
            text += b" " * (-(HEAD.size + len(text)) % 64)
    return HEAD.pack(MAGIC, len(text), crc32(text)) + text + body


def read_shard_lists(data: bytes) -> None:
    """Read a manifest, and a wids index without checking the shards that it lists."""
    with contextlib.suppress(CorruptSidecarError):
        manifest = read_manifest(place("manifest.json", data))
        write_manifest(manifest, scratch() / "again.json")
        if read_manifest(scratch() / "again.json").fingerprint != manifest.fingerprint:
            raise Finding("a manifest is another one once it is written and read")


def manifest_seeds() -> list[bytes]:
    entries = [ShardInfo(f"{scratch()}/{number}.tar", number, 512, "ab" * 32) for number in (0, 3)]
    write_manifest(Manifest(entries), scratch() / "m.json")
    return [(scratch() / "m.json").read_bytes(), b"{}", b"[]"]


def read_wids(data: bytes) -> None:
    """Read a wids index, and request the sizes of the shards that it lists."""
    shard()
    content = place("wids.json", data)
    if any(mark in data for mark in (b":", b"//")) and b"://" in data.replace(b"\\/", b"/"):
        return  # would contact the stores of remote shards
    with contextlib.suppress(SidecarError, errors.ShardOpenError):
        read_wids_index(content)


def wids_seeds() -> list[bytes]:
    one = {"url": "a.tar", "nsamples": 4, "filesize": os.path.getsize(shard()), "md5sum": "ab"}
    facts = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "x", "shardlist": [one]}
    place("part.json", json.dumps(facts).encode())
    parts = [{"source_url": "part.json"}, {"shardlist": [one], "base": str(scratch())}]
    return [json.dumps(each).encode() for each in (facts, {**facts, "base": "."}, {**facts, "datasets": parts})]


def read_spec(data: bytes) -> None:
    """Read the specification of a mixture, as YAML or as JSON."""
    suffix, content = (".json", data[1:]) if data[:1] == b"j" else (".yaml", data[1:])
    with warnings.catch_warnings(), contextlib.suppress(errors.SpecError):
        warnings.simplefilter("ignore")
        mixture = read_mixture(place(f"spec{suffix}", content), expand_braces)
        drawn = mixture.draw(Random(0))
        for _, url in zip(range(LOOKED_AT), drawn, strict=False):
            if not isinstance(url, str):
                raise Finding(f"{url!r} is no shard")
        len(mixture)


def spec_seeds() -> list[bytes]:
    one = {"name": "x", "shards": "{0..3}.tar", "choose": 2}
    other = {"shards": ["a.tar", "b.tar"], "resample": 5, "buckets": "c"}
    facts = {"prefix": "p/", "buckets": ["b"], "datasets": [one, other]}
    yaml = b"prefix: p/\nbuckets: [b]\ndatasets:\n- name: x\n  shards: '{0..3}.tar'\n  resample: 2\n"
    yaml += b"- shards: [a, b]\n- shards: [a, c]\n"
    merged = b"datasets:\n- &a {shards: x}\n- &b {<<: [*a, *a]}\n- {<<: [*b, *b], name: y}\n"
    return [b"j" + json.dumps(facts).encode(), b"y" + yaml, b"y" + merged]


SPEC_TOKENS = [
    b"datasets",
    b"shards",
    b"resample",
    b"choose",
    b"scaleprob",
    b"settings",
    b"buckets",
    b"name",
    b"&a",
    b"*a",
    b"<<: ",
    b"!!int ''",
]
SPEC_TOKENS += [b"!!bool x", b"2001-99-99", b"!!binary x", b".inf", b"1e999", b"!!python/object:x"]


def read_records(data: bytes) -> None:
    """Read a quarantine list, a journal, and the facts of a copy."""
    with contextlib.suppress(CorruptSidecarError, errors.MissingSidecarError):
        for item in read_quarantine(place("passed-over.jsonl", data)):
            for value in item:
                if not isinstance(value, str):
                    raise Finding(f"{item} is none")
    path = place("journal", data)
    with contextlib.suppress(StateError):
        journal = ShardJournal(path, SETTINGS)
        try:
            for finished in journal.finished:
                str(finished.number + finished.info.samples)
            journal.add(FinishedShard(0, ShardInfo("a", 1, 2, "c"), {"of": 1}))
            journal.truncate(1)
        finally:
            journal.close()
    entry = Entry.of(scratch(), "a.tar")
    entry.facts_path.write_bytes(data)
    facts = entry.facts()
    if facts is not None:
        str(facts.bytes + facts.mtime_ns)


SETTINGS = {"max_samples": 10}


def record_seeds() -> list[bytes]:
    passed = {"stage": "wds_decode", "error": "DecodeError", "url": "a.tar", "key": "x", "field": "cls", "reason": "r"}
    entry = Entry.of(scratch(), "a.tar")
    entry.write_facts(CopyFacts("a.tar", 10, "ab", 12))
    path = place("new-journal", b"")
    journal = ShardJournal(path, SETTINGS)
    journal.add(FinishedShard(0, ShardInfo("a", 1, 2, "c"), {"of": 1}))
    journal.add(FinishedShard(1, ShardInfo("b", 1, 2, "c"), {}))
    journal.close()
    lines = Path(path).read_bytes()
    return [json.dumps(passed).encode() + b"\n", entry.facts_path.read_bytes(), lines]


def change_lines(data: bytes, rng: Random) -> bytes:
    """Change one line of JSON."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = change_json(lines[at], rng)
    return b"\n".join(lines)


JSON_TOKENS = [b'"', b":", b",", b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b"\\ud800", b"[" * 2000]


def index_seeds() -> list[bytes]:
    return [b"\0" + own_index(), b"\1" + own_index()]


TARGETS = [
    Target("index", read_index_bytes, index_seeds, 200, JSON_TOKENS),
    Target("manifest", read_shard_lists, manifest_seeds, 100, JSON_TOKENS, change_json),
    Target("wids", read_wids, wids_seeds, 60, JSON_TOKENS, change_json),
    Target("spec", read_spec, spec_seeds, 150, SPEC_TOKENS),
    Target("records", read_records, record_seeds, 150, JSON_TOKENS, change_lines),
]
