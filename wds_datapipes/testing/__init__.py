"""Tools for tests of pipelines and stages: write shards, check a stage's contract, check sharing and resuming."""

from wds_datapipes.testing.pipeline_checks import check_coverage, check_resume
from wds_datapipes.testing.stage_contract import check_stage
from wds_datapipes.testing.tar_files import build_shard

__all__ = ["build_shard", "check_coverage", "check_resume", "check_stage"]
