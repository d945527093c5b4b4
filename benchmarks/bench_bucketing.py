"""How much padding do batches of similar length and packed rows save, and what do they cost per sample?

    python benchmarks/bench_bucketing.py --json bucketing.json --plot bucketing.png

Samples of 8 to 2048 tokens come from memory; the logarithms of their lengths have a normal distribution, as those of
texts do. Each contender makes batches of 32 samples, batches of at most 16,384 tokens with the padding, or rows of 2048
tokens. The first table shows the share of padding in all tokens that a network would process; the second one, the
speed of the stages. Batches are not padded. ``.pack_samples()`` is slower because it also joins the arrays.

Results: 76% of the tokens are padding with ``.batch()``, 61% with torchdata's ``.max_token_bucketize()``, which always
yields the shortest samples of its buffer, 27% in buckets of the powers of two, 8% in the default buckets and with
torchdata's ``.bucketbatch()``, and 0.4% in packed rows. A sample costs 3.6 µs in ``.bucket_samples()``, 8.5 µs in
``.max_token_bucketize()``, and 11 µs in ``.pack_samples()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torchdata.datapipes.iter  # noqa: F401  registers the stages of torchdata
from contest import Contender, Contest, options, parse, plot_contests, write_report
from rich.console import Console
from rich.table import Table
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_datapipes  # noqa: F401  registers the stages

BATCH_SIZE, MAX_TOKENS, MAX_LENGTH = 32, 16_384, 2048
REFERENCE = "torch .batch"

Sample = dict[str, Any]
Build = Callable[[Any], Iterable[Any]]


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


def main() -> None:
    arguments = parse(options(__doc__, rounds=15))
    samples = samples_of(max(500, int(50_000 * arguments.scale)))
    builds = contenders()
    shares = {name: padding(build, samples) for name, build in builds.items()}
    table = Table("contender", "padding", "batches or rows", title=f"Padding of {len(samples):,} samples")
    for name, share in shares.items():
        table.add_row(name, f"{share['padding']:.1%}", f"{share['batches']:,}")
    Console().print(table)
    contest = Contest(
        "Batches of similar length",
        [Contender(name, partial(run, build, samples)) for name, build in builds.items()],
        REFERENCE,
    )
    contest.run(arguments.rounds)
    contest.show()
    write_report(arguments.json, [shares, contest.facts()])
    plot_contests(arguments.plot, [contest])


if __name__ == "__main__":
    main()
