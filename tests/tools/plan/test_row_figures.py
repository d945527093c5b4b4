"""The figures of planned rows are those of the rows that loaders yield."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from packed_shards import ROW, as_tokens, lengths_of, planned, write_texts

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.index import EpochOptions, Pack, build_indexes
from wds_datapipes.tools.plan.planned_rows import plan_rows

SIZES = (120, 80, 40)


def seeded(shards: Any, **options: Any) -> Any:
    return planned(shards, 12, **options).set_seed(3)


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_figures_are_those_of_the_rows_that_are_read(folder: Any, remainder: str, lanes: int) -> None:
    shards = write_texts(folder, SIZES)
    options: dict[str, Any] = {"remainder": remainder, "lanes": lanes, "cost": lambda index: lengths_of(index) ** 2}
    figures = plan_rows(seeded(shards, **options), ranks=3)
    found = [*seeded(shards, **options).map_samples(as_tokens).pack_rows("tokens")]
    every = [*seeded(shards, **{**options, "remainder": "keep"}).map_samples(as_tokens).pack_rows("tokens")]
    assert figures.samples == sum(SIZES)
    assert figures.rows == len(every)
    assert figures.steps == -(-len(found) // 12)
    assert (figures.dropped, figures.padded) == (max(len(every) - len(found), 0), max(len(found) - len(every), 0))
    whole = [found[start : start + 12] for start in range(0, len(found) // 12 * 12, 12)]
    filled = [row for step in whole for row in step if row["__key__"]]
    assert figures.padding == pytest.approx(1 - sum(len(row["tokens"]) for row in filled) / len(filled) / ROW, abs=1e-5)
    costs = np.array([[sum(np.bincount(row["segment_ids"])[1:] ** 2) for row in step] for step in whole])
    by_rank = costs.reshape(len(costs), 3, 4).sum(axis=2)
    busiest = by_rank.max(axis=1) / by_rank.mean(axis=1)
    assert figures.busiest == pytest.approx((np.median(busiest), busiest.max()), abs=1e-3)


def test_warnings_name_the_argument_to_change(folder: Any) -> None:
    shards = write_texts(folder, SIZES)
    texts = plan_rows(seeded(shards, window=3), ranks=12).warnings
    assert "window" in texts[0]
    options: dict[str, Any] = {"cost": lambda index: lengths_of(index) ** 3, "window": sum(SIZES)}
    alone = plan_rows(seeded(shards, **options), ranks=12)
    assert any("similar" in text for text in alone.warnings)
    similar = plan_rows(seeded(shards, **options, balance="similar"), ranks=12)
    assert similar.busiest[0] < alone.busiest[0]
    assert similar.likeness > alone.likeness
    assert any("global_batch_size" in text for text in alone.warnings + similar.warnings)
    padded = plan_rows(seeded(shards, row=999, remainder="pad"))
    assert any(f"adds {padded.padded} empty rows to {padded.rows} rows: " in text for text in padded.warnings)
    with pytest.raises(
        EmptySourceError, match=f"has {padded.rows} rows, but a step takes 12.* smaller global_batch_size"
    ):
        plan_rows(seeded(shards, row=999, remainder="keep"))


def test_the_command_prints_rows(folder: Any, program: Any) -> None:
    shards = write_texts(folder, SIZES)
    build_indexes(
        shards, columns=lambda sample: {"length": len(sample["txt"]), "one": 1}, progress=False, num_workers=0
    )
    arguments = ("plan", shards, "--global-batch-size", "16", "--ranks-per-host", "4", "--pack")
    run = program(*arguments, f"length=length,row={ROW},second=one:9,window=60,balance=similar")
    assert (run.code, run.err) == (0, "")
    facts = json.loads(program(*arguments, f"length=length,row={ROW}", "--json").out)
    samples = IndexedSamples(shards, global_batch_size=16, epoch=EpochOptions(pack=Pack(length="length", row=ROW)))
    assert facts["samples"] == len(samples.dataset)
    assert f"{facts['samples']}" in run.lines[0]
    for wrong, named in (
        ("length=length", "row"),
        ("", "--pack must be NAME=VALUE"),
        ("length=length,row=8k", "row must be an integer, such as 8192, not '8k'"),
        ("length=length,row=9,second=one", "second must be COLUMN:LIMIT"),
        ("length=length,row=9,second=one:x", "the limit of second must be an integer"),
        ("length=length,row=9,pad=1", "pad"),
        (
            "length=tokens,row=9",
            f"Error: {shards.replace('{0..2}', '0')}.wdsidx has no column 'tokens', only ['length', ",
        ),
        ("length=tokens,row=9", "index --columns"),
        ("length=length,row=3", "long_samples"),
    ):
        run = program(*arguments, wrong)
        assert run.code
        assert named in run.err
    run = program(*arguments, f"length=length,row={ROW}", "--hosts", "3")
    assert "16 is not divisible by the 12 ranks of this run (--hosts 3, --ranks-per-host 4)" in run.err
    run = program(*arguments, f"length=length,row={ROW}", "--compare", "lanes=1,2")
    assert "--compare" in run.err
