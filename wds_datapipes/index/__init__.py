"""Sidecar indexes of shards, and the manifest of a dataset."""
