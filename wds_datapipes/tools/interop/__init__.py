"""Index files of other programs: a DALI index for each shard and a wids index for a dataset."""

from wds_datapipes.signatures import spells_hints
from wds_datapipes.tools.interop import dali_index
from wds_datapipes.tools.interop.wids_index import read_wids_index, write_wids_index

write_dali_index = spells_hints(dali_index.write_dali_index)

__all__ = ["read_wids_index", "write_dali_index", "write_wids_index"]
