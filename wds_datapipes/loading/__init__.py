"""Reading services, datasets with a state, and everything else that knows torchdata's loaders."""
