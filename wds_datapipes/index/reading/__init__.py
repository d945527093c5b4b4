"""Reading samples by their indexes: from one shard, from all shards of a dataset, and for an epoch."""
