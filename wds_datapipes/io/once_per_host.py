"""Once per host: one rank computes a result, such as a listing, while the others of the host wait for it."""

from __future__ import annotations

import json
import multiprocessing.util
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeAlias, TypeVar

from wds_datapipes.errors import RankLostError
from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.system import user_id

#: The lifetime of a result and that of the file of a killed process, in seconds.
VALID_S, KEPT_S = 60.0, 86_400.0
PREFIX = "wds-datapipes-host-"
#: The interval between two checks of a file, in seconds.
PAUSE_S = 0.02

T = TypeVar("T")
Compute: TypeAlias = "Callable[[Callable[[object], object]], T]"
"""Returns a JSON value, without tuples; it may call its argument to report progress."""

#: How often this process has asked for each result; the n-th call corresponds to the n-th call of the other ranks.
_calls = Counter[str]()
#: The stores whose connections this process shares with its parent.
_inherited: list[Any] = []


def share_on_host(action: str, compute: Compute[T], *facts: object) -> T:
    """Return the result of a function that one rank on this host calls for all of them.

    This saves the work and the requests of the others. `Ranks` is for what each rank has on its own, and must be equal.

    Without a process group, each process calls it. Otherwise, the first rank locks a file in the folder for temporary
    files and writes the result to it. If that rank fails or dies, the next one calls the function. Ranks share a result
    only if their calls have the same facts and follow the same number of earlier calls and of collective operations,
    because a rank may change what it lists between two calls.

    Args:
        action: what the rank does, for messages, such as ``"lists s3://bucket/"``.
        compute: the function.
        facts: the values on which the result depends.

    Raises:
        RankLostError: the rank that calls the function has made no progress within the timeout of the process group.
    """
    if (store := _store()) is None:
        return compute(str)
    group, collectives = sys.modules["torch.distributed"].group.WORLD, 0
    run, limit_s = store.compare_set("wds_datapipes/host", "", secrets.token_hex()), store.timeout.total_seconds()
    with suppress(RuntimeError):  # not all backends count operations
        collectives = group._get_sequence_number_for_group()
    call = sha256(repr((run, collectives, Path.cwd(), action, facts)).encode("utf-8", "surrogatepass")).hexdigest()
    _calls[call] += 1
    path = Path(gettempdir(), f"{PREFIX}{call[:32]}-{_calls[call]}")
    seen, since = -1.0, time.monotonic()
    while (text := _read(path)) is None:
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(lock_file(path, wait=False, keep_file=True))
            except OSError:  # the disk is full, read-only or has no locks
                return compute(str)
            if descriptor is not None and (text := _read(path)) is None:
                return _write(path, descriptor, f"rank {group.rank()}, process {os.getpid()}\n", compute)
        with suppress(FileNotFoundError):
            if (changed := path.stat().st_mtime) != seen:
                seen, since = changed, time.monotonic()
            elif time.monotonic() > since + limit_s:
                raise RankLostError(
                    f"This rank waits for {path.read_text().partition(chr(10))[0]}, which {action} for all ranks of "
                    f"this host, without progress for {limit_s:g} s. End it, or choose a longer timeout of the group"
                )
        time.sleep(PAUSE_S)
    found: T = json.loads(text)
    return found


def _read(path: Path) -> bytes | None:
    """Return the result in a file, where it follows the name of the file's owner.

    Returns:
        None if the file is missing, unfinished or old, or belongs to another user, who may write to the same folder.
    """
    with suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
        facts, text = os.fstat(file.fileno()), file.read().partition(b"\n")[2]
        if text.endswith(b"\n") and time.time() - facts.st_mtime < VALID_S and facts.st_uid == user_id():
            return text
    return None


def _write(path: Path, descriptor: int, owner: str, compute: Compute[T]) -> T:
    """Return the result of a function, after writing it to a file that this process has locked."""
    for other in path.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process has removed it, or it belongs to another user
            if time.time() - other.stat().st_mtime > KEPT_S:
                other.unlink()
    with suppress(OSError):  # the disk is full
        os.fchmod(descriptor, 0o600)  # URLs may contain credentials
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
    try:
        result = compute(lambda _: os.utime(descriptor))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    with suppress(OSError):
        os.pwrite(descriptor, f"{json.dumps(result)}\n".encode(), len(owner))
    # This also runs at the end of a process of multiprocessing.
    multiprocessing.util.Finalize(None, path.unlink, (True,), exitpriority=0)
    return result


def _store() -> Any:
    """Return the store of the default process group; None without a group and in processes that a rank has forked."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    store = distributed.distributed_c10d._get_default_store()
    return None if any(store is each for each in _inherited) else store


at_fork("process group", after_in_child=lambda: _inherited.append(_store()))
