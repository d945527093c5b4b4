"""Shard cache: local copies of shards, shared by any number of processes."""
