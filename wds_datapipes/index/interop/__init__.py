"""Indexes of other programs: read, verified against the headers of their shards, and written."""
