"""Shards: pattern expansion, listing, mixtures, and loading of their members."""
