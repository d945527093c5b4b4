"""Index formats of other programs: reads, verifies and writes them."""
