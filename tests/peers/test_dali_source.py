"""Samples of our pipelines in real DALI pipelines, on the CPU; `nox -s "peers(dali)"` installs DALI."""

from __future__ import annotations

import io
import os
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from error_facts import naming
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from page_runs import PAGES_OF_PEERS, run_script
from PIL import Image

from wds_datapipes import ShardList
from wds_datapipes.errors import EmptySourceError, EncodeError, MissingFieldError, StateError
from wds_datapipes.index import write_dali_index
from wds_datapipes.integrations.dali import external_source
from wds_datapipes.testing import build_shard

SHARDS, SAMPLES, BATCH = 3, 5, 4
ALL = list(range(SHARDS * SAMPLES))


@pytest.fixture(autouse=True)
def shards(folder: Path) -> None:
    """Shards of JPEG files, class numbers and empty texts, and the same files in a folder."""
    for shard in range(SHARDS):
        samples: list[dict[str, Any]] = []
        for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            file = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 256, (12 + number, 16, 3), np.uint8)
            Image.fromarray(pixels).save(file, "JPEG")
            samples.append({"__key__": f"{number:03d}", "jpg": file.getvalue(), "cls": f"{number:02d}", "txt": b""})
        build_shard(f"{shard}.tar", samples)
        with tarfile.open(f"{shard}.tar") as tar:
            tar.extractall("files", filter="data")


PATHS = f"{{0..{SHARDS - 1}}}.tar"


def numbers(checkpoint: str | None = None, *, paths: Any = PATHS, extensions: Any = "cls", **options: Any) -> Any:
    """A DALI pipeline of the classes."""

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, enable_checkpointing=True)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        return external_source(paths=paths, extensions=extensions, **options)

    return pipeline(checkpoint=checkpoint)


def run(pipe: Any, count: int) -> list[list[int] | str]:
    """The classes of some batches, and the positions of resets."""
    found: list[list[int] | str] = []
    for _ in range(count):
        try:
            found.append([int(bytes(np.asarray(each))) for each in pipe.run()[0]])
        except StopIteration:  # noqa: PERF203  it ends an epoch, not the loop
            found.append("reset")
            pipe.reset()
    return found


def epochs_of(batches: list[list[int] | str]) -> list[list[int]]:
    """The classes of each finished epoch."""
    epochs: list[list[int]] = [[]]
    for batch in batches:
        if isinstance(batch, str):
            epochs.append([])
        else:
            epochs[-1] += batch
    return epochs[:-1]


@pytest.mark.parametrize("batch_size", [1, 4, 15])
def test_the_images_are_those_of_two_readers_of_dali(batch_size: int) -> None:
    urls = [f"{shard}.tar" for shard in range(SHARDS)]
    files = sorted(str(path) for path in Path("files").glob("*.jpg"))

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=None)  # type: ignore[untyped-decorator]
    def ours() -> Any:
        return fn.decoders.image(external_source(paths=PATHS))

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=None)  # type: ignore[untyped-decorator]
    def webdataset() -> Any:
        for url in urls:
            write_dali_index(url)
        indexes = [url.replace(".tar", ".idx") for url in urls]
        return fn.decoders.image(fn.readers.webdataset(paths=urls, index_paths=indexes, ext=["jpg"]))

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=None)  # type: ignore[untyped-decorator]
    def folder() -> Any:
        return fn.decoders.image(fn.readers.file(files=files)[0])

    pipes = [ours(), webdataset(), folder()]
    for _ in range(2 * len(ALL) // batch_size):
        images, *others = [[np.asarray(image) for image in pipe.run()[0]] for pipe in pipes]
        assert len(images) == batch_size
        for other in others:
            for image, same in zip(images, other, strict=True):
                np.testing.assert_array_equal(image, same)


PARTIAL = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14]]
PADDED = [*PARTIAL[:3], [12, 13, 14, 14]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [*PARTIAL[:3], [12, 13, 14, 0], [1, 2, 3, 4]]),
        ({"pad_last_batch": True}, [*PADDED, *PADDED]),
        ({"cycle": "raise"}, [*PARTIAL, "reset", *PARTIAL, "reset", *PARTIAL]),
        ({"cycle": "raise", "pad_last_batch": True}, [*PADDED, "reset", *PADDED, "reset"]),
        ({"cycle": "no"}, [*PARTIAL, "reset", "reset", "reset"]),
    ],
)
def test_an_epoch_ends_as_the_arguments_say(options: dict[str, Any], expected: list[Any]) -> None:
    assert run(numbers(**options), len(expected)) == expected


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("initial_fill", [1, 3, 256])
def test_a_shuffle_yields_each_sample_once_in_another_order_in_each_epoch(initial_fill: int, read_ahead: bool) -> None:
    options: dict[str, Any] = {
        "random_shuffle": True,
        "initial_fill": initial_fill,
        "read_ahead": read_ahead,
        "cycle": "raise",
    }
    found = epochs_of(run(numbers(seed=3, **options), 15))
    assert [sorted(epoch) for epoch in found] == [ALL] * 3
    assert epochs_of(run(numbers(seed=3, **options), 15)) == found
    if initial_fill > 1:
        assert found[0] != found[1] != found[2]
        assert epochs_of(run(numbers(seed=4, **options), 15)) != found


def test_samples_that_are_read_ahead_are_not_read_again() -> None:
    pipe = numbers(read_ahead=True, cycle="raise")
    for shard in range(SHARDS):
        os.remove(f"{shard}.tar")
    assert epochs_of(run(pipe, 10)) == [ALL, ALL]


@pytest.mark.parametrize(
    "options",
    [
        {"cycle": "raise"},
        {"cycle": "raise", "random_shuffle": True, "initial_fill": 6},
        {"cycle": "raise", "random_shuffle": True, "read_ahead": True},
    ],
)
def test_a_checkpoint_of_dali_resumes_with_the_next_batch(options: dict[str, Any]) -> None:
    whole = run(numbers(**options), 12)
    for cut in range(10):
        pipe = numbers(**options)
        head = run(pipe, cut)
        assert head + run(numbers(pipe.checkpoint(), **options), 12 - cut) == whole


def test_ranks_share_the_shards() -> None:
    found = [epochs_of(run(numbers(distributed=(rank, 2), cycle="raise"), 9)) for rank in range(2)]
    for epoch in range(2):
        assert sorted(chain.from_iterable(ranks[epoch] for ranks in found)) == ALL


@pytest.mark.parametrize("extensions", ["jpg;cls", ["cls"], ["jpg", "cls", "txt"]])
def test_a_pipeline_gives_as_many_inputs_as_extensions(extensions: Any) -> None:
    (*outputs,) = numbers(extensions=extensions).run()
    assert len(outputs) == (1 if isinstance(extensions, str) else len(extensions))
    if len(outputs) == 3:
        assert [np.asarray(each).size for each in outputs[2]] == [0] * BATCH


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["cls"])
    array = np.full(3, number, np.float32)
    return {"__key__": sample["__key__"], "a": number, "b": array, "c": torch.tensor(array), "d": f"{number}"}


def test_decoded_values_arrive_as_they_are() -> None:
    pipe = ShardList(PATHS).load_wds_shards().group_samples().map_samples(decoded)

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
    def values() -> Any:
        return external_source(pipe, extensions=["a", "b", "c", "d"])

    integers, arrays, tensors, texts = values().run()
    assert [int(np.asarray(each)) for each in integers] == [0, 1, 2, 3]
    for found in (arrays, tensors):
        assert [np.asarray(each).tolist() for each in found] == [[float(number)] * 3 for number in range(BATCH)]
    assert [bytes(np.asarray(each)) for each in texts] == [b"0", b"1", b"2", b"3"]


def test_an_iterator_of_dali_has_epochs() -> None:
    loader = DALIGenericIterator(
        [numbers(cycle="raise")],
        ["cls"],
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
        dynamic_shape=True,
    )
    for _ in range(3):
        assert sum(len(batch[0]["cls"]) for batch in loader) == len(ALL)


def stream(checkpoint: str | None = None) -> Any:
    pipe = ShardList(PATHS).load_wds_shards().group_samples().with_epoch(7)

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, enable_checkpointing=True)  # type: ignore[untyped-decorator]
    def classes() -> Any:
        return external_source(pipe, extensions="cls", cycle="raise")

    return classes(checkpoint=checkpoint)


def test_epochs_of_a_stream_follow_each_other_and_are_not_restored() -> None:
    pipe = stream()
    epochs = epochs_of(run(pipe, 9))
    assert list(chain.from_iterable(epochs)) == [*ALL, *ALL[:6]]
    with pytest.raises(StateError, match="each epoch continues the previous one"):
        run(stream(pipe.checkpoint()), 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"extensions": "png"}, MissingFieldError, "'png' was requested"),
        ({"distributed": (5, 9)}, EmptySourceError, "Epoch 0 has no samples for DALI on this rank"),
        ({"cycle": "quite"}, ValueError, 'must be "quiet", "raise" or "no", not \'quite\''),
        ({"dp": "0.tar", "paths": None}, TypeError, "not '0.tar'; paths= takes names of shards"),
        ({"dp": ShardList("0.tar"), "paths": "0.tar"}, TypeError, "pass one of them"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        numbers(**options).run()


def test_a_value_that_dali_cannot_hold_is_named() -> None:
    pipe = ShardList(PATHS).load_wds_shards().group_samples().map_samples(with_list)
    with pytest.raises(EncodeError, match=naming("'boxes'", "'000'", "list")):
        numbers(dp=pipe, paths=None, extensions="boxes").run()


def with_list(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "boxes": [1, 2]}


@pytest.mark.parametrize("script", PAGES_OF_PEERS["dali"])
def test_a_page_runs(script: str, tmp_path: Path) -> None:
    run_script(script, tmp_path)
