"""Training runs: the samples of each step."""
