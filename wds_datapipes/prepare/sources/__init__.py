"""Sources of samples outside shards: image folders, ImageNet, tables of files, and tarp recipes."""
