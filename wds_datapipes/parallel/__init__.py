"""Mapping a function over many shards in several processes, or on an executor of the user's."""
