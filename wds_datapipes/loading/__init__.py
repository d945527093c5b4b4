"""Reading services, stateful datasets, and everything else that depends on torchdata's loaders."""
