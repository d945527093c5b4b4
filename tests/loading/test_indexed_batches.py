"""Global batches of indexed samples: the same on any ranks and workers, also in a run that resumes on others."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import IndexedSamples, ShardReadingService, StatefulShards, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.index import Manifest, build_indexes
from wds_datapipes.testing import build_shard

SIZES = (7, 1, 30, 12, 5, 45)
BATCH = 12
EPOCHS = 2
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for shard, size in enumerate(SIZES):
        samples: list[dict[str, bytes | str]] = []
        for number in range(size):
            label = int(rng.integers(2))
            content = io.BytesIO()
            pixels = rng.integers(0, 128, (8, 8, 3), np.uint8) + np.uint8(100 * label)
            Image.fromarray(pixels).save(content, "png")
            samples.append({"__key__": f"{shard}-{number:02}", "png": content.getvalue(), "cls": f"{label}"})
        build_shard(folder / f"{shard}.tar", samples)
    return Manifest(build_indexes(f"{folder}/{{0..5}}.tar"))


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"]) + ("+" if sample.get("__padding__") else "")


def pipeline(manifest: Manifest, *, buffer: int = 1, ranks: int = 1, **options: Any) -> IterDataPipe[Any]:
    pipe: Any = IndexedSamples(manifest, batch_size=BATCH, **options)
    if buffer > 1:
        pipe = pipe.shuffle_samples(buffer)
    return pipe.map(key_of).batch(BATCH // ranks)  # type: ignore[no-any-return]  # torch's stages carry no types


def service_loader(workers: int, pipe: IterDataPipe[Any]) -> Any:
    loader: Any = DataLoader2(pipe, reading_service=ShardReadingService(num_workers=workers))
    loader.seed(3)
    return loader


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
@pytest.mark.parametrize("order", ["global", "window"])
def test_a_run_resumes_with_any_number_of_workers(manifest: Manifest, order: str, remainder: str) -> None:
    def loader(workers: int) -> Any:
        return service_loader(workers, pipeline(manifest, order=order, remainder=remainder, window_shards=2))

    with loader(0) as whole_loader:
        whole = [list(whole_loader) for _ in range(EPOCHS)]
    for workers, cut, later in ((0, 5, 2), (2, 1, 3), (3, 4, 0), (3, len(whole[0]), 1), (2, 0, 1), (1, 7, 1)):
        with loader(workers) as first:
            iterator = iter(first)
            found = [next(iterator) for _ in range(cut)]
            state = first.state_dict()
        assert found == whole[0][:cut]
        with loader(later) as second:
            second.load_state_dict(merge_states([state]))
            # The state of the end of an epoch begins the next one.
            rest = [list(second) for _ in range(EPOCHS)]
        expected = [whole[0][cut:], *whole[1:]]
        assert rest[0] == expected[0], (workers, cut, later)
        assert rest[1] == expected[1], (workers, cut, later)


def test_a_chain_of_runs_with_other_workers_and_a_buffer_yields_each_sample_once(manifest: Manifest) -> None:
    def loader(workers: int) -> Any:
        return service_loader(workers, pipeline(manifest, buffer=20, remainder="keep"))

    for workers in (0, 2):
        with loader(workers) as whole_loader:
            whole = list(whole_loader)
        with loader(workers) as first:
            iterator = iter(first)
            found = [next(iterator) for _ in range(3)]
            state = first.state_dict()
        with loader(workers) as same:
            same.load_state_dict(state)
            assert found + list(same) == whole
        for later in (3, 1, 2):
            with loader(later) as other:
                other.load_state_dict(merge_states([state]))
                iterator = iter(other)
                found.append(next(iterator))
                state = other.state_dict()
        with loader(0) as last:
            last.load_state_dict(merge_states([state]))
            found += list(last)
        keys = list(chain.from_iterable(found))
        assert len(keys) == sum(SIZES)
        assert sorted(keys) == sorted(chain.from_iterable(whole))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_other_loaders_yield_the_same_batches(manifest: Manifest, workers: int) -> None:
    with service_loader(0, pipeline(manifest)) as loader:
        whole = list(loader)
        assert len(loader) == len(whole) == sum(SIZES) // BATCH

    data = StatefulShards(pipeline(manifest), seed=3)
    batches = list(DataLoader(data, batch_size=None, num_workers=workers))
    assert len(batches) == len(whole)
    again = StatefulShards(pipeline(manifest), seed=3)
    assert list(DataLoader(again, batch_size=None, num_workers=1)) == batches

    torch.manual_seed(0)
    plain: list[list[str]] = list(DataLoader(pipeline(manifest), batch_size=None, num_workers=workers))
    assert len(set(chain.from_iterable(plain))) == sum(SIZES) // BATCH * BATCH


def test_a_state_of_other_data_is_refused(manifest: Manifest) -> None:
    with service_loader(0, pipeline(manifest)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = Manifest(manifest.entries[:-1])
    with (
        service_loader(0, pipeline(other)) as loader,
        pytest.raises(StateError, match=r"IndexedSamples\(shards=100 samples in 6 shards"),
    ):
        loader.load_state_dict(state)


def train(
    manifest: Manifest, workers: int, state: dict[str, Any] | None, stop: int | None
) -> Iterator[tuple[list[str], float, Any, Any]]:
    """Train a model, and yield the keys and the loss of each global batch, and what a checkpoint consists of."""
    ranks = dist.get_world_size()
    samples: Any = IndexedSamples(manifest, batch_size=BATCH, remainder="pad")
    pipe = samples.wds_decode("torchrgb").to_tuple("__key__", "png", "cls").batch(BATCH // ranks).collate()
    torch.manual_seed(0)
    module = torch.nn.Linear(192, 2).double()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    service = ShardReadingService(num_workers=workers, distributed=True)
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(5)
        if state is not None:
            loader.load_state_dict(state["loader"])
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(EPOCHS):
            for keys, images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(images.double().flatten(1)), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                parts: list[Any] = [None] * ranks
                dist.all_gather_object(parts, list(keys))
                own = loader.state_dict() if stop is not None else None
                yield list(chain.from_iterable(parts)), float(mean) / ranks, own, (module, optimizer)


def run_rank(
    pipe: Any, rank: int, ranks: int, meeting: Path, run: Callable[[], Iterator[tuple[Any, ...]]], stop: int | None
) -> None:
    """Run a rank, and send what it yields; kill it after ``stop`` steps."""
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        for step, (keys, loss, state, trained) in enumerate(run(), 1):
            weights = io.BytesIO()  # tensors would be sent through this process, which is killed
            torch.save([part.state_dict() for part in trained], weights)
            pipe.send((keys, loss, state, weights.getvalue() if step == stop else b""))
            if step == stop:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def train_on_ranks(
    ranks: int, manifest: Manifest, folder: Path, *, workers: int, state: Any = None, stop: int | None = None
) -> tuple[list[tuple[list[str], float]], Any]:
    """Return the keys and the loss of each global batch, and what was saved at the end if the ranks were killed."""
    meeting = folder / f"meeting-{ranks}-{workers}-{stop}-{state is None}"
    processes = []
    for rank in range(ranks):
        ours, theirs = FORK.Pipe(duplex=False)
        arguments = (theirs, rank, ranks, meeting, lambda: train(manifest, workers, state, stop), stop)
        process = FORK.Process(target=run_rank, args=arguments)
        process.start()
        theirs.close()
        processes.append((process, ours))
    logs: list[list[Any]] = [[] for _ in processes]
    for log, (process, ours) in zip(logs, processes, strict=True):
        try:
            while (found := ours.recv()) is not None:
                assert not isinstance(found, str), found
                log.append(found)
        except EOFError:
            assert stop is not None
        process.join()
        assert process.exitcode == (0 if stop is None else -signal.SIGKILL)
        process.close()
        ours.close()
    assert all([step[:2] for step in log] == [step[:2] for step in logs[0]] for log in logs)
    saved = None
    if stop is not None:
        model, optimizer = torch.load(io.BytesIO(logs[0][-1][3]))
        saved = {"loader": merge_states([log[-1][2] for log in logs]), "model": model, "optimizer": optimizer}
    return [step[:2] for step in logs[0]], saved


def test_training_is_the_same_on_any_number_of_ranks_and_resumes_on_others(manifest: Manifest, tmp_path: Path) -> None:
    whole, _ = train_on_ranks(1, manifest, tmp_path, workers=0)
    steps = -(-sum(SIZES) // BATCH)
    assert len(whole) == EPOCHS * steps
    assert whole[0][1] > whole[-1][1], "it learns"
    for ranks, workers in ((2, 2), (4, 1)):
        found, _ = train_on_ranks(ranks, manifest, tmp_path, workers=workers)
        assert [keys for keys, _ in found] == [keys for keys, _ in whole]
        np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in whole], rtol=1e-9)
    begun, state = train_on_ranks(2, manifest, tmp_path, workers=2, stop=steps // 2)
    rest, _ = train_on_ranks(4, manifest, tmp_path, workers=1, state=state)
    found = [*begun, *rest[: steps - steps // 2 + steps]]
    assert [keys for keys, _ in found] == [keys for keys, _ in whole]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in whole], rtol=1e-9)


class Wrapper(IterableDataset[Any]):
    """Hides a pipeline from torch's ``DataLoader``, as trainers do."""

    def __init__(self, pipe: IterDataPipe[Any]) -> None:
        self.pipe = pipe

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipe)


def test_workers_that_are_not_known_are_warned_of(manifest: Manifest) -> None:
    message = "Each of 2 workers reads all shards, since the DataLoader did not find the IndexedSamples"
    with pytest.raises(UserWarning, match=message):  # warnings are errors in workers, too
        list(DataLoader(Wrapper(pipeline(manifest)), batch_size=None, num_workers=2))
