"""Stages that list, open, cache and write shards."""
