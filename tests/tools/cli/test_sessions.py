"""Sessions with the command line: what it prints, and its exit codes, for the commands in ``sessions/*.txt``.

A line ``== TITLE`` begins a session in a new folder with the shards of the fixture ``shards``. In it,

- ``$ ls a.tar`` runs the command line in this process, and ``% tar tf a.tar`` runs bash; lines that begin with ``> ``
  continue a command, and lines that begin with ``#`` are comments,
- ``@ b.tar k.txt=one`` writes a shard with these members,
- the lines that follow a command are its output, with those of standard error after ``! ``, and ``[1]`` is its exit
  code, which is 0 otherwise. ``...`` matches anything.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from wds_datapipes.testing import build_shard

SESSIONS = sorted(Path(__file__).with_name("sessions").glob("*.txt"))


class Step(NamedTuple):
    """A command of a session, and what it is expected to print."""

    kind: str
    command: str
    out: list[str]
    err: list[str]
    code: int


def sessions_of(path: Path) -> Iterator[tuple[str, list[Step]]]:
    """Yield the titles and steps of the sessions in a file."""
    for section in path.read_text(encoding="utf-8").split("\n== ")[1:]:
        title, _, body = section.partition("\n")
        steps: list[Step] = []
        for line in body.rstrip("\n").split("\n"):
            code = re.fullmatch(r"\[(\d+)\]", line)
            if line[:2] in ("$ ", "% ", "@ "):
                steps.append(Step(line[0], line[2:], [], [], 0))
            elif line[:2] in ("> ", ">"):
                steps[-1] = steps[-1]._replace(command=f"{steps[-1].command}\n{line[2:]}")
            elif code is not None:
                steps[-1] = steps[-1]._replace(code=int(code[1]))
            elif line.startswith("! "):
                steps[-1].err.append(line[2:])
            elif not line.startswith("#"):
                steps[-1].out.append(line)
        yield title, [step._replace(out=step.out[:-1] if step.out[-1:] == [""] else step.out) for step in steps]


def run_step(step: Step, program: Any) -> tuple[str, str, int]:
    """Run a command, and return its output, what it printed to standard error, and its exit code."""
    if step.kind == "$":
        done = program(*shlex.split(step.command))
        return done.out, done.err, done.code
    if step.kind == "%":
        run = subprocess.run(["bash", "-c", step.command], capture_output=True, text=True, check=False)
        return run.stdout, run.stderr, run.returncode
    name, *members = shlex.split(step.command)
    samples: dict[str, dict[str, Any]] = {}
    for member in members:
        key, field, data = re.split(r"\.([\w.]+)=", member, maxsplit=1)
        samples.setdefault(key, {"__key__": key})[field] = data
    build_shard(name, list(samples.values()))
    return "", "", 0


def matches(lines: list[str], text: str) -> bool:
    """Whether a text has these lines, in which ``...`` matches anything."""
    pattern = "".join(f"{line}\n" for line in lines)
    text += "" if text.endswith("\n") or not text else "\n"
    return re.fullmatch(re.escape(pattern).replace(r"\.\.\.", ".*"), text, flags=re.DOTALL) is not None


@pytest.mark.parametrize(
    "steps",
    [pytest.param(steps, id=f"{path.stem}: {title}") for path in SESSIONS for title, steps in sessions_of(path)],
)
@pytest.mark.usefixtures("shards")
def test_session(program: Any, steps: list[Step]) -> None:
    for step in steps:
        out, err, code = run_step(step, program)
        shown = f"{step.kind} {step.command}\n{out}{re.sub('^', '! ', err, flags=re.MULTILINE) if err else ''}[{code}]"
        assert code == step.code, shown
        assert matches(step.out, out), shown
        assert matches(step.err, err), shown
