"""Tools for testing pipelines and stages: test shards, a stage check and a resume check."""

from wds_datapipes.testing.resuming import check_resume
from wds_datapipes.testing.stage_contract import check_stage
from wds_datapipes.testing.tar_files import build_shard

__all__ = ["build_shard", "check_resume", "check_stage"]
