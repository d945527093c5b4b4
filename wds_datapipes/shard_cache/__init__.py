"""Shard cache: local copies of shards, shared by any number of processes.

Modules, low to high: `entry` (the files of a copy), `eviction` (removes old copies to free space), `download` (fetches
a complete copy), `foreign_copies` (copies under webdataset's names), `store` (the copies in a folder), `cached_shards`
(the shards of a stage, and shards that are downloaded in advance).
"""
