"""The fuzz targets without atheris, on their seeds and on a fixed set of a few hundred changed inputs."""

from __future__ import annotations

import pytest
from fuzz_loop import Escaped, Target, changed_inputs, confined, run
from sweeps import WHOLE
from targets import TARGETS

#: `nox -s nightly` tries all changes.
PART = 1 if WHOLE else 3


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_target_accepts_its_seeds_and_some_changes(target: Target) -> None:
    for data in target.seeds():
        run(target, data)
    for data in changed_inputs(target, target.rounds // PART):
        tried(target, data)


def tried(target: Target, data: bytes) -> None:
    try:
        run(target, data)
    except (Exception, Escaped) as error:
        pytest.fail(f"{type(error).__name__}: {error!s:.1000}, by the input {data!r:.3000}")


def test_an_input_that_starts_a_process_is_a_finding() -> None:
    import subprocess

    with pytest.raises(Escaped, match="subprocess"), confined():
        subprocess.run(["true"], check=False)
    subprocess.run(["true"], check=True)
