"""Group members into samples, and operate on samples: shuffle, select, mix, join."""
