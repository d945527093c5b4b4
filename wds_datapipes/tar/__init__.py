"""Tar archives: readers of headers and members, and a header writer."""
