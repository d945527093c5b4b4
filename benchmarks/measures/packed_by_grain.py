"""Rows that Grain's best-fit packing makes of sequences of given lengths, in its own environment.

    python measures/packed_by_grain.py lengths.npy rows.npz ROW BINS

writes the lengths of the sequences of all rows one after the other, how many each row has, and the processor time in
seconds.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import numpy as np


def main() -> None:
    source, target, row, bins = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    tokens = np.ones(row, np.int32)
    sequences = [{"tokens": tokens[:length]} for length in np.load(source).tolist()]
    grain: Any = importlib.import_module("grain")  # type checkers run in an environment without it
    dataset = importlib.import_module("grain.experimental").BestFitPackIterDataset(
        grain.MapDataset.source(sequences).to_iter_dataset(),
        length_struct={"tokens": row},
        num_packing_bins=bins,
        shuffle_bins=False,
    )
    begin = time.process_time()
    segments = [each["tokens_segment_ids"].copy() for each in dataset]
    seconds = time.process_time() - begin
    lengths = [np.bincount(each)[1:] for each in segments]
    np.savez(target, lengths=np.concatenate(lengths), counts=np.array([*map(len, lengths)]), seconds=seconds)


if __name__ == "__main__":
    main()
