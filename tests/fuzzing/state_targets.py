"""States of loaders, from a checkpoint of untrusted origin."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import warnings
import zlib
from functools import cache
from itertools import islice
from random import Random
from typing import Any, BinaryIO

from fuzz_loop import Target, change_json
from shard_targets import scratch

from wds_datapipes import ShardList, StatefulShards
from wds_datapipes.errors import ChangedShardError, ShardError, StateError
from wds_datapipes.io.openers import open_url, register_opener
from wds_datapipes.loading.checkpoint.format import STATE, checkpoints_in, with_checksum
from wds_datapipes.loading.checkpoint.resharding import merge_states
from wds_datapipes.shards.packed_rows import pack_rows, unpack_rows
from wds_datapipes.testing import build_shard

#: The maximum number of items to read from a loader.
LOOKED_AT = 100


@cache
def shards() -> str:
    for shard in range(3):
        build_shard(scratch() / f"s{shard}.tar", [{"__key__": f"{shard}-{number}", "cls": "1"} for number in range(9)])
    register_opener("fuzzed", opened)
    return "fuzzed:s{0..2}.tar"  # the same in every process, so that a state can be loaded again elsewhere


def opened(url: str, /, **_: Any) -> BinaryIO:
    return open_url(f"{scratch()}/{url.partition(':')[2]}")


def loader() -> StatefulShards:
    urls = ShardList(shards()).shuffle().sharding_filter()
    return StatefulShards(urls.load_wds_shards().group_samples().shuffle_samples(20).to_tuple("__key__", "cls"))


@cache
def states() -> list[bytes]:
    """Save states at the beginning, in the middle and at the end of an epoch."""
    found = []
    for stop in (0, 1, 5, 17, 100):
        data = loader()
        iterator = iter(data)
        for _ in islice(iterator, stop):
            pass
        found.append(json.dumps(data.state_dict()).encode())
    one = json.loads(found[1])
    found.append(json.dumps({"dataset_state": one, "_iterator_finished": False}).encode())
    snapshot = {"_worker_snapshots": {"worker_0": {"dataset_state": one}}, "_last_yielded_worker_id": 0}
    found.append(json.dumps({"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}).encode())
    return found


def load(data: bytes) -> None:
    """Load a state, and the same state with valid checksums."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        state = data
    resume(state, data)
    if (valid := with_checksums(state)) != state:
        resume(valid, json.dumps(valid).encode())


def with_checksums(state: Any) -> Any:
    """Return a state with the checksums of its contents."""
    if isinstance(state, list):
        return [*map(with_checksums, state)]
    if not isinstance(state, dict):
        return state
    state = {key: with_checksums(value) for key, value in state.items()}
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, RecursionError):
        state[STATE] = with_checksum(*state[STATE].split("\n")[1:])
    return state


def resume(state: Any, data: bytes) -> None:
    """Resume from a state, which is refused by a `StateError`, or because the shards differ."""
    if re.search(rb"draws[^0-9a-z]{1,6}[0-9]{7}", data):
        return  # draws a number for each earlier sample
    with warnings.catch_warnings(), contextlib.suppress(StateError, ChangedShardError, ShardError):
        warnings.simplefilter("ignore")
        checkpoints_in(data)
        own = loader()
        own.load_state_dict(state)
        for _ in islice(own, LOOKED_AT):
            pass
    with contextlib.suppress(StateError):
        merge_states([state, state] if len(data) % 2 else [state])


def change_state(data: bytes, rng: Random) -> bytes:
    """Change a state, or the text within it that is the state of a pipeline."""
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, RecursionError):
        state = json.loads(data)
        if rng.random() < 0.6:
            lines = state[STATE].split("\n")
            line = rng.randrange(len(lines))
            lines[line] = change_json(lines[line].encode(), rng).decode("utf-8", "replace")
            state[STATE] = "\n".join(lines)
            return json.dumps(state).encode()
    return change_json(data, rng)


TOKENS = [b'"stages"', b'"parts"', b'"next"', b"null", b"[]", b"{}", b"-1", b"1e999", b'"waiting"', b'"again"']
TOKENS += [b'"version"', b'"ranks"', b'"_snapshot"', b'"dataset_state"', b"999999999999", b"NaN", b"true"]


def packed(data: bytes) -> str:
    """Return the text from which these bytes are unpacked as positions."""
    packer = zlib.compressobj(wbits=-15)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode()


def positions() -> list[bytes]:
    tables = [[[n // 9, 512 * n, 512 * n + 1024] for n in range(40)], [[0, n, -1, n % 3, 7] for n in range(300)]]
    return [zlib.decompress(base64.b64decode(str(pack_rows(table))), -15) for table in tables]


def unpack(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert all(len(row) >= 3 for row in unpack_rows(packed(data)))


TARGETS = [Target("states", load, states, 120, TOKENS, change_state), Target("positions", unpack, positions, 200)]
