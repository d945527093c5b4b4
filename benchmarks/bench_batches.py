"""What is in a batch: how well is an epoch mixed, and how much padding do batches have?

    python benchmarks/bench_batches.py --only shuffle_quality --plots .

**shuffle_quality**: One process reads 64 shards of 500 samples, in an order from a seed, and the positions of the
samples in the epoch are compared with those in a uniform permutation. Medians over the rounds, each with another seed:

- "shards in a batch": how many shards contribute to a batch of 64; 40.6 on average in a uniform permutation.
- "neighbors from one shard": how many percent of adjacent samples; 1.6 in a uniform permutation.
- "spread of a shard": the standard deviation of the positions of its samples, relative to a uniform permutation. At 100
  %, a shard is spread over the epoch; at 0 %, its samples come one after the other.
- "distance of its neighbors": how far apart two samples are, on average, that are adjacent in their shard, relative to
  a uniform permutation.
- "samples held" and "open shards": the most samples that wait in memory, and the most shards that are open at a time.

**bucketing**: Samples of 8 to 2048 tokens come from memory; the logarithms of their lengths have a normal distribution,
as those of texts do. Each contender makes batches of 32 samples, batches of at most 16,384 tokens with the padding, or
rows of 2048 tokens. The first table shows the share of padding in all tokens that a network would process; the second
one, the speed of the stages. Batches are not padded. ``.pack_samples()`` is slower because it also joins the arrays.

Results: 76% of the tokens are padding with ``.batch()``, 61% with torchdata's ``.max_token_bucketize()``, which always
yields the shortest samples of its buffer, 27% in buckets of the powers of two, 8% in the default buckets and with
torchdata's ``.bucketbatch()``, and 0.4% in packed rows. A sample costs 3.6 µs in ``.bucket_samples()``, 8.5 µs in
``.max_token_bucketize()``, and 11 µs in ``.pack_samples()``.
"""

from __future__ import annotations

import itertools
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torchdata.datapipes.iter  # noqa: F401  registers the stages of torchdata
import webdataset
from harness.contest import Contender, Contest
from harness.datasets import write_shard
from harness.plots import pyplot
from harness.questions import Question, answer, options
from numpy.typing import NDArray
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_random_seed

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.index import AccessOptions, EpochOptions, Manifest, build_indexes
from wds_datapipes.index.order.sample_order import Order

SHARDS, SAMPLES, BATCH = 64, 500, 64
#: The shards whose samples are plotted.
PLOTTED = 3
#: The batches of `bucketing`, in samples and tokens, and their reference.
BATCH_SIZE, MAX_TOKENS, MAX_LENGTH = 32, 16_384, 2048
REFERENCE = "torch .batch"

Sample = dict[str, Any]
Begin = Callable[[list[str], "Meter", int], Iterable[Sample]]
Build = Callable[[Any], Iterable[Any]]


class Meter:
    """Counts the samples that were read and not yet delivered, and the shards that are open.

    Attributes:
        held: the most samples held.
        open: the most open shards.
    """

    def __init__(self) -> None:
        self.held = self.open = 0
        self._read = self._delivered = 0

    def count(self, sample: Sample) -> Sample:
        """Count a sample that was read, and return it."""
        self._read += 1
        return sample

    def deliver(self) -> None:
        """Count a sample that was delivered."""
        self._delivered += 1
        self.held = max(self.held, self._read - self._delivered)
        if self._delivered % 50 == 0:
            self.open = max(self.open, sum(map(_is_shard, os.scandir("/proc/self/fd"))))


def _is_shard(descriptor: os.DirEntry[str]) -> bool:
    try:
        return Path(descriptor.path).readlink().suffix == ".tar"
    except FileNotFoundError:  # of the scan itself
        return False


def webdatasets(urls: list[str], meter: Meter, seed: int, *, buffer_size: int) -> Iterable[Sample]:
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=seed).map(meter.count)
    samples: Iterable[Sample] = dataset.shuffle(buffer_size, seed=seed)
    return samples


def stream(urls: list[str], meter: Meter, seed: int, *, buffer_size: int, open_shards: int = 1) -> Iterable[Sample]:
    samples = ShardList(urls).shuffle().load_wds_shards(open_shards=open_shards).group_samples()
    return _seeded(samples.map(meter.count).shuffle_samples(buffer_size), seed)


def indexed(
    urls: list[str], _meter: Meter, seed: int, *, order: Order, open_shards: int, window: int = 16, lanes: int = 1
) -> Iterable[Sample]:
    samples = IndexedSamples(
        Manifest(build_indexes(urls)),
        order=order,
        global_batch_size=BATCH,
        lanes=lanes,
        remainder="keep",
        epoch=EpochOptions(window_shards=window),
        access=AccessOptions(open_shards=open_shards),
    )
    return _seeded(samples, seed)


def _seeded(pipe: Any, seed: int) -> Iterable[Sample]:
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    samples: Iterable[Sample] = pipe
    return samples


ORDERS: dict[str, Begin] = {
    "shards only": partial(stream, buffer_size=1),
    "webdataset, buffer 1000": partial(webdatasets, buffer_size=1000),
    "buffer 1000": partial(stream, buffer_size=1000),
    "buffer 8000": partial(stream, buffer_size=8000),
    "4 open shards, buffer 1000": partial(stream, buffer_size=1000, open_shards=4),
    "16 open shards, buffer 100": partial(stream, buffer_size=100, open_shards=16),
    "16 open shards, buffer 1000": partial(stream, buffer_size=1000, open_shards=16),
    'index, "window" of 16': partial(indexed, order="window", open_shards=16),
    'index, "window" of 1, 16 lanes': partial(indexed, order="window", open_shards=16, window=1, lanes=16),
    'index, "window" of 2, 16 lanes': partial(indexed, order="window", open_shards=32, window=2, lanes=16),
    'index, "global", 16 lanes': partial(indexed, order="global", open_shards=64, lanes=16),
    'index, "global"': partial(indexed, order="global", open_shards=64),
}


class Quality(NamedTuple):
    """How well an epoch is mixed, and what it takes."""

    shards_in_a_batch: float
    same_shard: float
    spread: float
    distance: float
    held: float
    open: float


def measure(begin: Begin, urls: list[str], seed: int) -> tuple[Quality, NDArray[np.int64]]:
    """Return the quality of an epoch, and its order: the numbers of the samples, shard by shard."""
    meter = Meter()
    numbers = []
    for sample in begin(urls, meter, seed):
        meter.deliver()
        numbers.append(int(sample["__key__"]))
    order = np.array(numbers)
    size, per_shard = len(order), len(order) // len(urls)
    if not np.array_equal(np.sort(order), np.arange(len(urls) * per_shard)):
        raise AssertionError("a sample is missing or repeated")
    shards = order // per_shard
    positions = np.argsort(order).reshape(len(urls), per_shard)
    batches = [len(np.unique(batch)) for batch in np.split(shards, range(BATCH, size, BATCH)) if len(batch) == BATCH]
    quality = Quality(
        shards_in_a_batch=statistics.mean(batches),
        same_shard=float(np.mean(shards[1:] == shards[:-1])),
        spread=float(np.mean(positions.std(axis=1)) / (size / np.sqrt(12))),
        distance=float(np.mean(np.abs(np.diff(positions, axis=1))) / (size / 3)),
        held=meter.held,
        open=meter.open,
    )
    return quality, order


def write_shards(folder: Path, samples: int) -> list[str]:
    """Write missing shards; the keys number all samples."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"shuffle-{samples}-{shard}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        if not path.exists():
            keys: Iterator[int] = iter(range(shard * samples, (shard + 1) * samples))
            write_shard(path, ((f"{key:06d}", {"cls": b"1"}) for key in keys))
    return list(map(str, paths))


def plot_orders(path: Path, found: dict[str, Quality], orders: dict[str, NDArray[np.int64]]) -> None:
    """Plot where the samples of some shards are in the epoch, with the figures beside them."""
    figure, panel = pyplot().subplots(figsize=(10, 0.5 * len(found) + 1.2))
    columns = {1.07: "shards in\na batch", 1.17: "samples\nheld", 1.26: "open\nshards"}
    for row, (name, quality) in enumerate(found.items()):
        order = orders[name]
        positions = np.argsort(order).reshape(SHARDS, -1)
        ranked = np.argsort(np.median(positions, axis=1))
        for number in range(PLOTTED):
            # The shards in the middle of each third of the epoch.
            shard = ranked[(2 * number + 1) * SHARDS // (2 * PLOTTED)]
            panel.eventplot(
                positions[shard] / len(order), lineoffsets=row, linelengths=0.7, linewidths=0.4, color=f"C{number}"
            )
        figures = (f"{quality.shards_in_a_batch:.0f}", f"{quality.held:,.0f}", f"{quality.open:.0f}")
        for place, text in zip(columns, figures, strict=True):
            panel.text(place, row, text, ha="center", va="center", transform=panel.get_yaxis_transform(), fontsize=9)
    for place, text in columns.items():
        panel.text(place, -0.75, text, ha="center", va="bottom", transform=panel.get_yaxis_transform(), fontsize=8)
    panel.set_yticks(range(len(found)), list(found), fontsize=9)
    panel.set_ylim(len(found) - 0.5, -0.6)
    panel.set_xlim(0, 1)
    panel.set_xticks([0, 0.5, 1], ["start of the epoch", "half", "end"], fontsize=8)
    panel.set_title(
        f"Where the samples of {PLOTTED} of {SHARDS} shards come in an epoch", loc="left", fontsize=10, pad=26
    )
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def shuffle_quality(arguments: Namespace) -> dict[str, Any]:
    """Measure the orders."""
    urls = write_shards(arguments.data, max(8, round(SAMPLES * arguments.scale)))
    found, orders = dict[str, Quality](), dict[str, NDArray[np.int64]]()
    for name, begin in ORDERS.items():
        qualities = []
        for seed in range(arguments.rounds):
            quality, orders[name] = measure(begin, urls, seed)
            qualities.append(quality)
        found[name] = Quality(*(statistics.median(values) for values in zip(*qualities, strict=True)))
    if arguments.plots is not None:
        plot_orders(arguments.plots / "shuffle_quality.png", found, orders)
    return {name: quality._asdict() for name, quality in found.items()}


def samples_of(count: int) -> list[Sample]:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, count).clip(8, MAX_LENGTH).astype(int).tolist()
    tokens = np.arange(MAX_LENGTH, dtype=np.int32)
    return [{"__key__": str(number), "tokens": tokens[:length]} for number, length in enumerate(lengths)]


def length_of(sample: Sample) -> int:
    return len(sample["tokens"])


def sort_by_length(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=length_of)


def contenders() -> dict[str, Build]:
    """Return functions that make batches, by the name of the contender."""
    powers = [2**exponent for exponent in range(3, 12)]
    return {
        REFERENCE: lambda pipe: pipe.batch(BATCH_SIZE),
        "torchdata .bucketbatch": lambda pipe: pipe.bucketbatch(BATCH_SIZE, batch_num=32, sort_key=sort_by_length),
        "torchdata .max_token_bucketize": lambda pipe: pipe.max_token_bucketize(
            MAX_TOKENS, length_of, buffer_size=1024, include_padding=True
        ),
        "ours, batch_size": lambda pipe: pipe.bucket_samples("tokens", batch_size=BATCH_SIZE),
        "ours, max_tokens": lambda pipe: pipe.bucket_samples("tokens", max_tokens=MAX_TOKENS),
        "ours, max_tokens, powers of two": lambda pipe: pipe.bucket_samples(
            "tokens", boundaries=powers, max_tokens=MAX_TOKENS
        ),
        "ours, packed rows": lambda pipe: pipe.pack_samples(MAX_LENGTH, "tokens"),
    }


def run(build: Build, samples: list[Sample]) -> Iterator[Any]:
    """Return one item for each sample."""
    batches = build(IterableWrapper(samples, deepcopy=False))
    return itertools.chain.from_iterable(each["__key__"] if isinstance(each, dict) else each for each in batches)


def padding(build: Build, samples: list[Sample]) -> dict[str, float]:
    """Return the share of padding, and the number of batches or rows."""
    padded = batches = 0
    for batch in build(IterableWrapper(samples, deepcopy=False)):
        batches += 1
        padded += MAX_LENGTH if isinstance(batch, dict) else max(map(length_of, batch)) * len(batch)
    return {"padding": 1 - sum(map(length_of, samples)) / padded, "batches": batches}


def bucketing(arguments: Namespace) -> dict[str, Any]:
    """Measure the padding and the speed."""
    samples = samples_of(max(500, int(50_000 * arguments.scale)))
    builds = contenders()
    contest = Contest(
        "Batches of similar length",
        [Contender(name, partial(run, build, samples)) for name, build in builds.items()],
        REFERENCE,
    )
    return {
        "samples": len(samples),
        "padding": {name: padding(build, samples) for name, build in builds.items()},
        "contest": contest.run(arguments.rounds),
    }


if __name__ == "__main__":
    answer(options(__doc__), Question("shuffle_quality", shuffle_quality, 5), Question("bucketing", bucketing, 15))
