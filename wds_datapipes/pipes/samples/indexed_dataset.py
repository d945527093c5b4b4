"""The map-style dataset of indexed samples."""

from __future__ import annotations

from wds_datapipes.datapipes import MapDataPipe
from wds_datapipes.index.read.indexed_shards import IndexedShards
from wds_datapipes.types import Sample


class IndexedDataset(MapDataPipe[Sample]):
    """A map-style dataset of indexed samples, in the order of the shards; see `IndexedSamples.map_style`."""

    def __init__(self, shards: IndexedShards) -> None:
        super().__init__()
        self._shards = shards

    def __getitem__(self, number: int) -> Sample:
        return self._shards.samples([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Sample]:
        """Return several samples; torch's ``DataLoader`` calls this for each batch."""
        return self._shards.samples(numbers)

    def __len__(self) -> int:
        return len(self._shards)
