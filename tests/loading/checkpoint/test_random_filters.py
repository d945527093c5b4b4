"""Pipelines whose runs differ: a run resumes at the position of the delivered items, not after a number of items."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from loader_kinds import Service, Tracked, items_of
from pipeline_table import Build, Pipe, key_of, number_in, shards_of, split

CUT = 80

shards = shards_of(20)


def depends_on_run(sample: dict[str, Any]) -> bool:
    """Whether the sample depends on the run: here, all odd samples of the first run."""
    return number_in(sample) % 2 == 1 and Path("unlucky").exists()


def is_kept(sample: dict[str, Any]) -> bool:
    return not depends_on_run(sample)


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    if depends_on_run(sample):
        raise OSError("the store is away for a moment")
    return sample


def mixed() -> Pipe:
    return (
        split("a").shuffle_samples(40).filter(is_kept).mix_samples(split("b").filter(is_kept), stop="all").map(key_of)
    )


PIPELINES: dict[str, Build] = {
    "filtered": lambda: split().shuffle_samples(40).filter(is_kept).map(key_of),
    "skipping": lambda: split().shuffle_samples(40).map_samples(decoded, on_error="skip").map(key_of),
    # All stages that draw are inside one that restarts its source, so the epoch ends like that of the first pass.
    "in a stream": lambda: split().shuffle_samples(40).filter(is_kept).map(key_of).with_epoch(240),
    "mixed": mixed,
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", [Service, Tracked])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_yields_everything_after_the_last_delivered_sample(name: str, kind: Any, workers: int) -> None:
    build = PIPELINES[name]
    with closing(kind(build, workers)) as run:
        whole = items_of(run.epoch())
    Path("unlucky").touch()
    with closing(kind(build, workers)) as run:
        epoch = run.epoch()
        came, state = items_of(epoch, CUT), run.state()
        del epoch
    Path("unlucky").unlink()
    with closing(kind(build, workers, state)) as run:
        found = items_of(run.epoch())
    assert len(came) == CUT
    assert len({*came, *found}) == len(came + found)
    assert all(int(key[-1]) % 2 for key in {*whole} - {*came, *found})
    if name != "mixed":
        after = whole.index(came[-1]) + 1
        assert found[: len(whole) - after] == whole[after:]
