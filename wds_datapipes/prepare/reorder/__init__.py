"""Sorting and shuffling all samples of a dataset."""
