"""The commands ``create images``, ``create imagenet`` and ``create recipe``: create shards from files."""
