"""Orders of the samples of an epoch, and the share that each rank and worker has of them."""
