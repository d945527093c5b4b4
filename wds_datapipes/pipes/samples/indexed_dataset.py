"""The map-style dataset of indexed samples."""

from __future__ import annotations

from wds_datapipes.datapipes import MapDataPipe
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.read.dataset_reader import ProcessReaders
from wds_datapipes.types import Sample


class IndexedDataset(MapDataPipe[Sample]):
    """A map-style dataset of indexed samples, in the order of the shards; see `IndexedSamples.map_style`."""

    def __init__(self, shards: IndexedShards) -> None:
        super().__init__()
        self._shards, self._readers = shards, ProcessReaders(shards)

    def __getitem__(self, number: int) -> Sample:
        return self._readers.read([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Sample]:
        """Return several samples; torch's ``DataLoader`` calls this for each batch."""
        return self._readers.read(numbers)

    def __len__(self) -> int:
        return len(self._shards)
