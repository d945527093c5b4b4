"""`StatefulShards`: a pipeline as a dataset with ``state_dict()``, for torch's DataLoader and StatefulDataLoader."""
