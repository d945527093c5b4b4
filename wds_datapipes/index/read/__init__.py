"""Reading samples by their indexes, in any order: from one shard, from all shards of a dataset, and for an epoch."""
