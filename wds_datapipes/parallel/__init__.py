"""Parallel processing of shards, in several processes or on a user's executor."""
