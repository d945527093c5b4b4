"""Benchmarks of a user's own shards: how fast they are read, decoded and delivered, and what limits that."""

from wds_datapipes.benchmark.advice import recommend
from wds_datapipes.benchmark.measure import BenchmarkOptions, Delivery, ShardBenchmark, measure_shards

__all__ = ["BenchmarkOptions", "Delivery", "ShardBenchmark", "measure_shards", "recommend"]
