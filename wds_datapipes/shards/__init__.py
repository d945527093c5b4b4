"""Listing shards and loading their members."""
