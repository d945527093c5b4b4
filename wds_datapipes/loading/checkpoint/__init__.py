"""The states of loaders: their format, their encoding, and resharding to another number of workers."""
