"""The provenance of a run, from `wds_datapipes.tools.runs.provenance`."""

from wds_datapipes.tools.runs.provenance import as_markdown as as_markdown
from wds_datapipes.tools.runs.provenance import provenance as provenance
