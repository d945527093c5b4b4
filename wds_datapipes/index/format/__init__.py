"""The index of a shard, its file, how it is built and found, and the manifest of a dataset."""
