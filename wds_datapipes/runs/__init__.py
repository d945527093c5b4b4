"""Public names for the samples of a run's steps, whose modules are in `wds_datapipes.tools`, as training needs none."""
