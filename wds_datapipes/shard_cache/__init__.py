"""Shard cache: local copies of shards, shared by any number of processes.

Layers, low to high: `entry` (the name of a copy and what is recorded about it), `eviction` (which copies are removed to
make room), `download` (from a source to a complete copy), `store` (the copies of a folder), `cached_shards` (the shards
of a stage).
"""
