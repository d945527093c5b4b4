"""Planning: what a training run on many hosts will read and store."""
