"""The table of faults: what happens in a program, and what it must say.

A fault is one entry in the module of its kind, beside the function that causes it: `sample_faults`, `start_faults`,
`worker_faults`, `program_faults` or `rank_faults`. `@fault` adds it, with a pipeline that meets it, the moment at which
a worker is killed, or a function. Each runs in a process of its own, and returns how an epoch ended:
"11; LookupError: ..." after eleven items. `test_faults` compares this with what the entry says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from faulty_pipelines import killed, read
from torch.utils.data import IterDataPipe

#: The modules with the faults of each kind.
KINDS = ("sample_faults", "start_faults", "worker_faults", "program_faults", "rank_faults")

Cause = Callable[[], object]


class Fault(NamedTuple):
    """What happens, and patterns of the result, of standard error, and of each kind of resource that remains."""

    cause: Cause
    says: str
    noise: str
    left: str | None


#: The faults by name.
FAULTS: dict[str, Fault] = {}
#: The number of workers, the number of items that they prefetch, and the stage in the main process.
Turn = tuple[int, int, str]
BARE: Turn = (2, 10, "bare")
C = TypeVar("C", bound=Cause)


def all_faults() -> dict[str, Fault]:
    """Return the faults of all kinds by name."""
    for kind in KINDS:
        import_module(kind)
    return FAULTS


def fault(
    name: str,
    *,
    says: str,
    pipeline: IterDataPipe[Any] | None = None,
    kill: str | None = None,
    turn: Turn = BARE,
    noise: str = "",
    left: str | None = None,
    **options: Any,
) -> Callable[[C], C]:
    """Add a fault to the table: that of a function, which this decorates, or of a pipeline.

    Args:
        name: the name of the test.
        says: a pattern of the result.
        pipeline: what a loader reads.
        kill: the moment at which the last worker is killed, as `killed` knows them.
        turn: the workers, and what else differs between faults, so that each is met in some of them.
        noise: a pattern of standard error.
        left: a pattern of what remains, if CPython leaves something.
        options: further options of the service.
    """

    def add(cause: C) -> C:
        assert name not in FAULTS, f"two faults are named {name!r}"
        FAULTS[name] = Fault(cause, says, noise, left)
        return cause

    if kill is not None:
        add(partial(killed, kill, pipeline, *turn, **options))  # type: ignore[arg-type]  # it is a function without arguments
    elif pipeline is not None:
        add(partial(read, pipeline, *turn, **options))
    return add


# what it says

NUMBERS = {"SIGABRT": 6, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}
SHARD = r"\S+/b\.tar"
OPENED, NONE_OPENED = r"The last shard that it opened is \S+/\w\.tar\.", r"It has opened no shard yet\."
#: Whether that has happened.
PERHAPS_OPENED = rf"({OPENED}|{NONE_OPENED})"
#: No shard is open yet, in the error of a worker.
EARLY = ""
#: What torch adds if a stage of the user reads the items.
ITER = r"(\nThis exception is thrown by __iter__ of (MemoryPinner|Kept)\(.*\))?"


def raised(kind: str, worker: int, text: str, shard: str = f", whose last shard was {SHARD}") -> str:
    """The expected error of a worker: its class, the worker, the shard, and the traceback to its origin."""
    return rf"{kind} in worker process {worker}{shard}\.\nOriginal Traceback \(most recent call last\):\n.*{text}.*"


def died(name: str, how: str, shard: str = OPENED) -> str:
    return rf"WorkerDiedError: {name} \(pid \d+\) {how} while its data was still needed\. .* {shard}{ITER}"


def signalled_to(name: str, signal: str = "SIGKILL", shard: str = OPENED) -> str:
    return died(name, rf"was killed by signal {NUMBERS[signal]} \({signal}\)", shard)


#: The beginning of an error of a worker.
LOOKUP = "LookupError: Caught LookupError"
#: CPython leaves its pipes to a process open if ``os.fork``, or its second call of ``os.pipe``, fails; and if the
#: system discards the exit status of processes.
LEFT_PIPES = r"descriptors: \[(\"\(\d+, 'pipe:\[\d+\]'\)\"(, )?){2,4}\]"
