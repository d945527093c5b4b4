"""Train from WebDataset tar shards on torchdata DataPipes.

Importing this package registers its stages, so that every ``IterDataPipe`` has ``.load_wds_shards()`` and the others,
and mends what is broken in torchdata's own reading service; `repairs` lists it.
"""

from wds_datapipes.core.codecs.images import ImageDecoder
from wds_datapipes.core.codecs.matching import handle_extension
from wds_datapipes.core.naming import first_dot, last_dot
from wds_datapipes.core.openers import register_opener
from wds_datapipes.core.types import Member, Sample
from wds_datapipes.pipes.decoding import SampleDecoder, register_decoder
from wds_datapipes.pipes.fields import DictMapper, FieldRenamer, TupleMaker, TupleMapper
from wds_datapipes.pipes.members import ShardLoader
from wds_datapipes.pipes.samples import SampleGrouper, SampleShuffler
from wds_datapipes.pipes.shards import ShardList
from wds_datapipes.reading.repairs import apply as _apply_repairs
from wds_datapipes.reading.repairs import repairs

__all__ = [
    "DictMapper",
    "FieldRenamer",
    "ImageDecoder",
    "Member",
    "Sample",
    "SampleDecoder",
    "SampleGrouper",
    "SampleShuffler",
    "ShardList",
    "ShardLoader",
    "TupleMaker",
    "TupleMapper",
    "first_dot",
    "handle_extension",
    "last_dot",
    "register_decoder",
    "register_opener",
    "repairs",
]

_apply_repairs()
