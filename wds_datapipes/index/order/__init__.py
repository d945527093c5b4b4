"""Orders of the samples of an epoch and the share of each rank and worker."""
