"""Tools for testing pipelines and stages: test shards, and checks of stages, of coverage and of resuming."""

from wds_datapipes.testing.coverage import check_coverage
from wds_datapipes.testing.resuming import check_resume
from wds_datapipes.testing.stage_contract import check_stage
from wds_datapipes.testing.tar_files import build_shard

__all__ = ["build_shard", "check_coverage", "check_resume", "check_stage"]
