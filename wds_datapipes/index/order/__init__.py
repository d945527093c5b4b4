"""Which samples a dataset has, in which order they come in an epoch, and the share of each rank and worker."""
