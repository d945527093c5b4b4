"""The states of loaders: their format, their encoding, and resharding for a different number of ranks or workers."""
