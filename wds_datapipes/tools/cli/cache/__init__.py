"""The commands ``cache ls``, ``cache warm`` and ``cache clear``: the local copies that `.cache_wds_shards()` keeps."""
