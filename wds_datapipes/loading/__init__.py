"""Reading services, stateful datasets, and other code that depends on torchdata's loaders."""
