"""A worker killed at a random item, and loaders that read in two threads at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from data_parallel_pipelines import stream, write_shards
from error_facts import naming
from loader_kinds import Service

from wds_datapipes.errors import WorkerDiedError

#: Enough for several epochs of a loader on a busy machine, in seconds; only a hang takes longer.
LIMIT_S = 300.0


def epochs_of(loader: Any, count: int = 3) -> list[list[Any]]:
    return [list(loader.epoch()) for _ in range(count)]


def left(items: Iterator[Any], loader: Any) -> Iterator[Any]:
    """Yield the rest of an epoch and the next one, because a killed worker may have sent all items of the first."""
    yield from items
    yield from loader.epoch()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("seed", range(6))
def test_after_a_kill_come_the_items_that_were_sent_and_an_error_and_the_state_resumes(
    tmp_path: Path, seed: int
) -> None:
    rng, build = Random(seed), partial(stream, write_shards(tmp_path), 2)
    workers, ahead = rng.randint(1, 3), rng.choice([0, 1, 10])
    new = partial(Service, build, workers, worker_prefetch_cnt=ahead, main_prefetch_cnt=ahead, timeout_s=LIMIT_S)
    whole = epochs_of(undisturbed := new())
    undisturbed.close()
    loader, (epoch, at) = new(), (rng.randrange(2), rng.randint(1, len(whole[0]) - 1))
    assert epochs_of(loader, epoch) == whole[:epoch]
    items = loader.epoch()
    taken = [next(items) for _ in range(at)]
    state = loader.state()
    os.kill(rng.choice(loader.loader.reading_service.report().workers).pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=naming("signal 9 (SIGKILL)")):
        taken.extend(left(items, loader))
    assert taken == (whole[epoch] + whole[epoch + 1])[: len(taken)]
    loader.close()
    resumed = new(state=state)
    assert epochs_of(resumed, 2) == [whole[epoch][at:], whole[epoch + 1]]
    resumed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_two_loaders_read_in_two_threads_at_once(tmp_path: Path, workers: int) -> None:
    build, together = partial(stream, write_shards(tmp_path), 2), threading.Barrier(2, timeout=LIMIT_S)
    new = partial(Service, build, workers, timeout_s=LIMIT_S)
    alone = new()
    expected = epochs_of(alone)
    alone.close()

    def read(loader: Service) -> list[list[Any]]:
        epochs = list[list[Any]]()
        try:
            for _ in expected:
                together.wait()
                epochs.append([])
                for item in loader.epoch():
                    epochs[-1].append(item)
                    loader.state()
        except BaseException:
            together.abort()
            raise
        loader.close()
        return epochs

    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(read, new()) for _ in range(2)]
    assert [each.exception() for each in reading] == [None, None]
    assert [each.result() for each in reading] == [expected, expected]
