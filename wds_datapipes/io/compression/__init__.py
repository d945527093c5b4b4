"""Reading and writing compressed shards."""
