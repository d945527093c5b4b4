"""Benchmark a user's own shards: how fast they are read, decoded and delivered, and what limits the speed."""
