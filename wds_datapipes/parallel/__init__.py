"""Process shards in parallel, in several processes or on a user's executor."""
