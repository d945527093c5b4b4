"""Sources of samples that are not in shards yet: folders of images, ImageNet, tables of files, recipes of tarp."""
