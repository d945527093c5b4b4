"""Dataset preparation: create, convert, verify, count, reorder and preview shards."""
