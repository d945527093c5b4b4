"""Sources of samples outside shards: image folders, ImageNet, and tarp recipes."""
