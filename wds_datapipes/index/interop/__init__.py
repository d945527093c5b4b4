"""The indexes of other programs: read, held against the headers of their shards, and written."""
