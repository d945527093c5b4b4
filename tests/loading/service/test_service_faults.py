"""Faults of a `ShardReadingService` cause the right error at the right position, no leftovers and no hang."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Result = dict[str, Any]

#: The time limit of a scenario, in seconds. Only a hang, or spawning on a busy machine, takes this long.
LIMIT_S = 300
TOPS = ("bare", "pinned", "prefetched")

# All scenarios of a group run in one fixture, and have their own limits.
pytestmark = pytest.mark.timeout(1200)

#: The worker with the fault in a pipeline with several workers, and the number of its items before the fault.
PLACES = {0: (0, 15), 1: (0, 15), 2: (1, 11), 3: (1, 16)}
SHARD = r"\S+/b\.tar"
#: What torch adds if a stage of the user reads the items.
ITER = r"(\nThis exception is thrown by __iter__ of (MemoryPinner|Kept)\(.*\))?"

NUMBERS = {"SIGABRT": 6, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}


def raised(kind: str, worker: int, text: str, shard: str = f", whose last shard was {SHARD}") -> str:
    """The expected error of a worker: its class, the worker, the shard, and the traceback to its origin."""
    return rf"{kind} in worker process {worker}{shard}\.\nOriginal Traceback \(most recent call last\):\n.*{text}.*"


def died(name: str, how: str, shard: str = r"The last shard that it opened is \S+/\w\.tar\.") -> str:
    return rf"WorkerDiedError: {name} \(pid \d+\) {how} while its data was still needed\. .* {shard}{ITER}"


def killed(name: str, signal: str = "SIGKILL", shard: str = r"The last shard that it opened is \S+/\w\.tar\.") -> str:
    return died(name, rf"was killed by signal {NUMBERS[signal]} \({signal}\)", shard)


#: Whether that has happened.
PERHAPS_A_SHARD = r"(The last shard that it opened is \S+/\w\.tar|It has opened no shard yet)\."

OWN = {
    "LookupError": ("LookupError: Caught LookupError", "in refuse\n.*LookupError: no such sample"),
    "MemoryError": ("MemoryError: Caught MemoryError", "in run_out\n.*MemoryError: no room"),
    "RecursionError": ("RecursionError: Caught RecursionError", "in recurse\n.*Previous line repeated"),
    "StopIteration": ("RuntimeError: Caught RuntimeError", "in stop\n.*generator raised StopIteration"),
    "two arguments": ("RuntimeError: Caught TwoArguments", "in fail_with_two_arguments\n"),
    "unpicklable": (
        "RuntimeError: Caught RuntimeError",
        r"in fail_stubbornly\n.*nowhere\.Stubborn: cannot be imported",
    ),
    "choosy": ("RuntimeError: Caught Choosy", "in fail_choosily\n"),
    "long": ("LookupError: Caught LookupError", "in fail_at_length\n"),
}
LEFT_AT_ONCE = {
    "BaseException": "ended with exit code 1",
    "KeyboardInterrupt": "ended with exit code 1",
    "sys.exit(3)": "ended with exit code 3",
    "sys.exit(text)": "ended with exit code 1",
    "os._exit(5)": "ended with exit code 5",
}


def of_a_fault(name: str) -> str:
    """The expected result of a pipeline in which one of several workers meets a fault."""
    kind, fault, workers = re.fullmatch(r"(\w+)(?:: (.*))?, (\d) workers.*", name, re.DOTALL).groups()  # type: ignore[union-attr]  # the names are below
    worker, before = PLACES[int(workers)]
    if workers == "0":
        return rf"{before}; LookupError: no such sample\n.*__iter__ of Acting\(.*"
    if kind == "error":
        error, text = OWN[fault or "LookupError"]
        return rf"{before}; {raised(error, worker, text)}__iter__ of Acting\(act=.*"
    if kind == "unsendable":
        is_nested = fault.startswith("nested")
        what = (
            r"a dict whose part 'meta' is an object of type builtins\.list"
            if is_nested
            else r"an object of type _thread\.lock"
        )
        text = rf"whose last stage here is Acting, made {what}, which cannot be sent"
        return rf"{before}; {raised('PicklingError: Caught PicklingError', worker, text)}"
    if fault in NUMBERS:
        return rf"\d+; {killed(f'Worker {worker}', fault)}"
    # Items made before the exit count if Python gets to send them, and if the loop does not notice the exit while it
    # waits for another worker.
    count = str(before) if workers == "1" and not fault.startswith("os._exit") else r"\d+"
    return rf"{count}; {died(f'Worker {worker}', LEFT_AT_ONCE[fault])}"


TURNS = [2, 1, 3, 2, 3]


def in_turn(kind: str, names: list[str], first: int) -> list[str]:
    return [f"{kind}: {name}, {TURNS[(first + number) % 5]} workers" for number, name in enumerate(names)]


FAULTS = [
    *(
        f"error, {workers} workers, {rest}"
        for workers, rest in [(0, "10, bare"), (2, "0, bare"), (3, "10, pinned"), (2, "10, prefetched")]
    ),
    *in_turn("error", list(OWN), 0),
    *in_turn("end", [*LEFT_AT_ONCE, "SIGABRT", "SIGSEGV", "SIGKILL", "SIGTERM"], len(OWN)),
    *in_turn("unsendable", ["lock", "nested lock"], len(OWN) + len(LEFT_AT_ONCE) + 4),
]
EARLY = ""  # no shard is open yet
CANNOT = r"cannot be started: Resource temporarily unavailable"
TOO_MANY = "cannot be started: Too many open files"
LOST = r"0; BlockingIOError: \[Errno 11\]"
LOOKUP = "LookupError: Caught LookupError"

OUTCOMES: dict[str, str] = {
    **{name: of_a_fault(name) for name in FAULTS},
    **{f"unreceivable: {name}": rf"11; LookupError: sealed{ITER}" for name in ("small, bare", "large, pinned")},
    "start: apply_sharding": "0; " + raised(LOOKUP, 0, "no shard for worker 0", EARLY),
    "start: iter raises": "0; " + raised(LOOKUP, 0, "raised by iter", EARLY),
    "start: iter returns a number": "0; " + raised("TypeError: Caught TypeError", 0, "'int' object is not an", EARLY),
    "start: worker_init_fn": "0; " + raised(LOOKUP, 0, "no such disk in worker 0", EARLY),
    # All workers exit, and any of them may be noticed first.
    "start: worker_init_fn exits": "0; "
    + died("Worker [01]", "ended with exit code 4", r"It has opened no shard yet\."),
    "start: worker_init_fn stops": "0; " + raised("RuntimeError: Caught StopIteration", 0, "init_stops", EARLY),
    "start: worker_reset_fn": "0; " + raised(LOOKUP, 0, "no such seed in worker 0", EARLY),
    "start: 0 forks": f"{LOST} Worker 0 {CANNOT}",
    "start: 1 forks": f"{LOST} Worker 1 {CANNOT}",
    "start: 1 descriptors": r"0; OSError: \[Errno 24\] Too many open files",
    **{
        f"start: {left} descriptors": rf"0; OSError: \[Errno 24\] Worker [01] {TOO_MANY}|60; end"
        for left in (2, 5, 8, 11)
    },
    "start: no memory": "0; " + died("Worker [01]", "ended with exit code 1", r"It has opened no shard yet\."),
    "spawn: error": "15; " + raised(LOOKUP, 0, "in refuse\n"),
    "spawn: unpickling fails": "0; " + raised(LOOKUP, 0, "not in a worker", EARLY),
    "spawn: killed at import": "0; " + killed("Worker 0", shard=r"It has opened no shard yet\."),
    "too many files later": r"OSError: this process has too many open files to receive a segment .* `ulimit -n`" + ITER,
    "no memory for an item": "11; " + raised("OSError: Caught OSError", 1, "Cannot allocate memory"),
    **{
        f"killed {moment}, {workers} workers, {ahead}, {top}": rf"\d+; {killed(f'Worker {workers - 1}', shard=shard)}"
        for moment, shard in {
            "at once": PERHAPS_A_SHARD,
            "sending": r"It has opened no shard yet\.",
            "waited for": r"The last shard that it opened is \S+/[abc]\.tar\.",
            "between epochs": r"The last shard that it opened is \S+/[def]\.tar\.",
            "at rest": r"The last shard that it opened is \S+/\w\.tar\.",
            "in reset": r"It has opened no shard yet\.",
        }.items()
        for workers, ahead, top in [(1, 0, "bare"), (2, 10, "pinned"), (3, 10, "prefetched")]
    },
    **{
        f"killed in shutdown, {workers} workers, {rest}": "shut down"
        for workers, rest in [(1, "0, bare"), (2, "10, pinned"), (3, "10, prefetched")]
    },
    "killed with a grandchild": r"\d+; " + killed("Worker 1"),
    "another is killed": "10; " + killed("Worker 1", shard=r"The last shard that it opened is \S+/f\.tar\."),
    "killed unseen": "10; " + died("Worker 1", "ended with an unknown exit code"),
    "killed with broken pipes": r"\d; " + killed("Worker 1"),
    **{
        f"shutdown by {whom}": rf"11; RuntimeError: The connection to Worker 1 was shut down .*{ITER}"
        for whom in ("a signal", *(f"another thread, {top}" for top in TOPS))
    },
    **{f"shutdown, {how}": "shut down" for how in ("asleep", "in C code", "deaf to SIGTERM", "stopped")},
    **{f"forgotten in a {where}": "gone" for where in ("function, bare", "cycle, pinned", "cycle, prefetched")},
    **{f"fork: {how}": "0, True, True" for how in ("shutdown", "end")},
    "begun in a thread": "True",
    "in a worker": "0; " + raised("RuntimeError: Caught RuntimeError", 0, "use num_workers=0 in it", EARLY),
    "in a worker, without workers": "60; end",
    "handled signals": "True, True",
    **{
        f"timeout, {top}": r"11; WorkerTimeoutError: Worker 1 \(pid of 1\) has sent nothing for timeout_s=4 s\. "
        rf"The last shard that it opened is {SHARD}\. .*{ITER}"
        for top in ("bare", "prefetched")
    },
    "timeout in reset": r"0; WorkerTimeoutError: Worker 0 \(pid of 0\) has sent nothing .*has opened no shard yet\..*",
    "timeout, stopped": r"\d+; WorkerTimeoutError: Worker 0 \(pid \d+\) has sent nothing .*",
    "outlived by an executor": "ended with 0, 0 left",
    "no room in /dev/shm": "100 True",
}

HOWS = {
    "with a loader in a module": 0,
    "with a local loader": 0,
    "in a loop": 6,
    "with an error": 1,
    "with sys.exit": 6,
    "with a thread that reads": 0,
    "after multiprocessing": 0,
}
BUSY_AND_TOPS = [(how, top) for how in ("asleep", "in C code", "deaf to SIGTERM") for top in TOPS]
SIGNALS = {"SIGINT": -2, "SIGTERM": -15, "SIGKILL": -9}
SIGNALLED = [(signal, whom) for signal in SIGNALS for whom in ("main", "group")]

#: The exit codes of main programs, by the way in which they exit.
ENDS: dict[str, int] = {
    **{f"exit {how}, {', '.join(BUSY_AND_TOPS[number % 9])}": HOWS[how] for number, how in enumerate(HOWS)},
    **{
        f"{signal} of {whom}, {', '.join(BUSY_AND_TOPS[(len(HOWS) + number) % 9])}": SIGNALS[signal]
        for number, (signal, whom) in enumerate(SIGNALLED)
    },
    **{
        f"{signal} of {whom}, idle, {TOPS[number]}": SIGNALS[signal]
        for number, (signal, whom) in enumerate(SIGNALLED[::2])
    },
}

#: The expected standard error: the traceback that ends a worker, and the argument of `sys.exit`.
NOISES = {
    "end: BaseException, 2 workers": r"Process \S+:\nTraceback .*Aside: no exception\n",
    "end: KeyboardInterrupt, 3 workers": r"Process \S+:\nTraceback .*KeyboardInterrupt\n",
    "end: sys.exit(text), 1 workers": "good bye\n",
    "outlived by an executor": "60; end\n",
    # The other worker may have been killed during its own traceback.
    "start: no memory": r"Process \S+:\n.*Traceback .*Cannot allocate memory\n.*",
}
#: CPython leaves its pipes to a process open if ``os.fork``, or its second call of ``os.pipe``, fails; and if
#: the system discards the exit status of processes.
LEAVES_PIPES = re.compile(r"start: (\d forks.*|\d+ descriptors)|killed unseen")
LEFT_PIPES = r"descriptors: \[(\"\(\d+, 'pipe:\[\d+\]'\)\"(, )?){2,4}\]"

TRACEBACKS = {
    "SIGINT": r"Traceback .*\nKeyboardInterrupt\n",
    "exit with an error": r"Traceback .*\nLookupError: the loop fails\n",
}

GROUPS = {
    "faults": "^(error|end|unsendable|unreceivable)",
    "beginnings": "^(start|spawn|too many|no memory)",
    "deaths": "^(killed|another)",
    "ends": "^(shutdown|forgotten|fork:|in |begun|handled|timeout|outlived|no room)",
    "mains": "^(exit|SIG)",
}


def run_scenarios(folder: Path, pattern: str) -> dict[str, Result]:
    script = Path(__file__).with_name("service_scenarios.py")
    done = subprocess.run(
        [sys.executable, script, str(LIMIT_S), pattern],
        env={**os.environ, "SCENARIOS_FOLDER": str(folder)},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Result] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Result]]:
    """Return the results of the scenarios of a group; the first request runs all of them."""
    done: dict[str, dict[str, Result]] = {}

    def results_of(group: str) -> dict[str, Result]:
        if group not in done:
            done[group] = run_scenarios(tmp_path_factory.mktemp(group), GROUPS[group])
        return done[group]

    return results_of


def group_of(name: str) -> str:
    (group,) = (group for group, pattern in GROUPS.items() if re.search(pattern, name))
    return group


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_fault_is_reported_and_leaves_nothing(name: str, results: Callable[[str], dict[str, Result]]) -> None:
    result = results(group_of(name))[name]
    assert re.fullmatch(OUTCOMES[name], result["outcome"], re.DOTALL), result["outcome"]
    assert re.fullmatch(NOISES.get(name, ""), result["noise"], re.DOTALL), result["noise"]
    if LEAVES_PIPES.match(name):
        assert all(re.fullmatch(LEFT_PIPES, each) for each in result["left"]), result["left"]
    else:
        assert result["left"] == []


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_with_its_workers(name: str, results: Callable[[str], dict[str, Result]]) -> None:
    result = results(group_of(name))[name]
    assert result["outcome"] == f"ended with {ENDS[name]}, 0 left"
    assert result["left"] == []
    # It prints only its own traceback.
    own = next((text for begin, text in TRACEBACKS.items() if name.startswith(begin)), "")
    assert re.fullmatch(own, result["noise"], re.DOTALL), result["noise"]
    assert result["noise"].count("Traceback") == bool(own)


def test_the_outcome_depends_on_the_number_of_descriptors(results: Callable[[str], dict[str, Result]]) -> None:
    ends = [results("beginnings")[f"start: {left} descriptors"]["outcome"] for left in (1, 11)]
    assert ends[0] != ends[-1] == "60; end"


UNGUARDED = """
import warnings
warnings.simplefilter("ignore")
from torchdata.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2
from wds_datapipes import ShardReadingService
pipe = IterableWrapper([f"{number:06}.tar" for number in range(100_000)]).sharding_filter()
with DataLoader2(pipe, reading_service=ShardReadingService(1, "spawn")) as loader:
    list(loader)
"""


def test_a_program_that_workers_cannot_import_ends(tmp_path: Path) -> None:
    # The program lacks `if __name__ == "__main__"`, and its pipeline is larger than a pipe's buffer.
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, check=False, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "before the current process has finished its bootstrapping phase" in " ".join(done.stderr.split())
    assert re.search(died("Worker 0", "ended with exit code 1", r"It has opened no shard yet\."), done.stderr)


@pytest.mark.parametrize("group", GROUPS)
def test_every_scenario_is_judged(group: str, results: Callable[[str], dict[str, Result]]) -> None:
    assert set(results(group)) == {name for name in [*OUTCOMES, *ENDS] if group_of(name) == group}
