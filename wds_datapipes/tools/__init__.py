"""Tools for datasets and runs: everything that a training process never imports."""
