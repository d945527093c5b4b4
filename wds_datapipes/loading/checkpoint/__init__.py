"""The states of loaders: format, encoding, and resharding for a different number of ranks or workers."""
